"""One engine with the bundled model for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle import Engine
from tests.proofs import proved
from tests.sessions.service.held import settings_in


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with proved(Engine(settings_in(tmp_path_factory.mktemp("store")))) as engine:
        yield engine
