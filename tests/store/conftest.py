"""Stores of the tests: made in a temporary directory, closed at the end whatever happened."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.store.warm import WarmStore
from tests.store.chains import open_store


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., WarmStore]]:
    """Opens and starts a store in the test's directory; all that are left open are closed."""
    stores: list[WarmStore] = []

    def open_one(*, start: bool = True, **settings: Any) -> WarmStore:
        store = open_store(tmp_path / "store", **settings)
        stores.append(store)
        if start:
            store.start()
        return store

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Hundreds of stores log what is wrong with them; one is enough."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
