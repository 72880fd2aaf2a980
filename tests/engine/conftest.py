"""Engines for the tests of this folder; `tests/exactness` takes its fixtures from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.api import Engine
from tests.given import settings_of
from tests.proofs import proved
from tests.tiny_models import tiny_model_dir

Start = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model in fp32."""
    return tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("models"))


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[Start]:
    """Start an engine on a model directory (none: a tiny llama), with settings named as for `settings_of`.

    All engines of a test share one store, so those before are closed first.
    """
    engines: list[Engine] = []

    def make(model: Path | None = None, **settings: Any) -> Engine:
        for engine in engines:
            engine.close()
        given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "store": str(tmp_path / "store"), "kv": "q4h"}
        # Tests count what is computed: idle work is asked for by those that are about it.
        given = {**given, "anticipate": "off", **settings}
        engine = proved(Engine(settings_of(model=str(model or tiny_llama), **given)))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
