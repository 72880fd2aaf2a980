"""The figures of another engine's metrics: increments are given once, levels as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle_vllm.figures import FIGURES, STORE_S, Figures
from rekindle_vllm.requests import Reuse
from tests.vllm.engine import StubEngine
from tests.vllm.stored import Stores, prompt


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path)
    yield made
    made.close()


def test_increments_are_given_once_and_the_store_is_asked_now_and_then(stores: Stores) -> None:
    owner, now = stores.open(), 100.0
    figures = Figures(owner, clock=lambda: now)
    assert figures.take() == {"disk_bytes": 0, "records": 0, "branches": 0}
    engine, ids = StubEngine(owner), prompt(300)
    engine.serve("a", ids)
    assert owner.store.flush(10)
    for name in ("a", "b"):
        if name == "b":
            engine.forget_hot()
            engine.serve("b", ids)
        reuse = engine.reuse[name]
        assert isinstance(reuse, Reuse)
        figures.finished(reuse)
    assert owner.store.flush(10)
    assert figures.take() == {"requests": 2, "prompt_tokens": 600, "loaded_tokens": 256}
    assert figures.take() == {}
    now += STORE_S
    stats, found, later = owner.stats(), figures.take(), owner.stats()
    # The store's writer notes by itself what was read, at any time.
    assert stats.index_bytes_written <= found.pop("index_bytes_written") <= later.index_bytes_written
    assert found == {
        "records_written": 4,
        "bytes_written": stats.bytes_written,
        "bytes_read": stats.bytes_read,
        "disk_bytes": stats.used_bytes,
        "records": 4,
        "branches": 1,
    }
    now += STORE_S
    again = figures.take()
    assert again.pop("index_bytes_written", 0) < stats.index_bytes_written
    assert again == {"disk_bytes": stats.used_bytes, "records": 4, "branches": 1}
    assert found.keys() <= {figure.name for figure in FIGURES}
