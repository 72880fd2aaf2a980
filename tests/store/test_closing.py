"""Whoever asks a store that is closing or closed gets an answer, and leaves nothing open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rekindle.errors import StoreError
from rekindle.store.commands import Delete
from rekindle.store.warm import WarmStore
from tests.store.chains import SIZE, Chain, save

Opened = Callable[..., WarmStore]


def files_of_sqlite(directory: Path) -> list[str]:
    """Names of what lies beside the index only while somebody has it open."""
    return sorted(path.name for path in directory.rglob("index.db-*"))


@pytest.mark.parametrize(
    "question", [lambda store: store.stats(), lambda store: store.index.num_bytes], ids=["figures", "size"]
)
def test_questions_while_it_closes(
    opened: Opened, caplog: pytest.LogCaptureFixture, question: Callable[[WarmStore], object]
) -> None:
    """Figures, and of those the one that looks at files which go away, often enough to meet the moment."""

    def ask(store: WarmStore, begun: threading.Barrier, done: threading.Event) -> None:
        begun.wait(60)
        while not done.is_set():
            question(store)

    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            store = opened()
            save(store, Chain.of(store, range(3 * SIZE)), "ann")
            begun, done = threading.Barrier(4), threading.Event()
            asked = [threads.submit(ask, store, begun, done) for _ in range(3)]
            begun.wait(60)
            store.close()
            done.set()
            for each in asked:
                each.result(60)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_closed_store_answers_and_opens_nothing(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(3 * SIZE)), "ann")
    assert len(store.sequences()) == 1 and store.stats().num_agents == 1
    assert files_of_sqlite(tmp_path) == ["index.db-shm", "index.db-wal"]
    store.close()
    assert files_of_sqlite(tmp_path) == []
    assert store.sequences() == [] and store.stats().num_agents == 0
    assert files_of_sqlite(tmp_path) == []
    with pytest.raises(StoreError, match="closed"):
        store.submit(Delete("default", "ann")).result(60)
    with pytest.raises(StoreError, match="closed"):
        store.flush()
    assert len(opened().sequences()) == 1, "nothing of it was carried out"


def test_a_reader_that_is_late_closes_what_it_read_with(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(3 * SIZE)), "ann")
    with store.index.reading() as connection:
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "it does not wait for readers"
        assert connection.execute("SELECT COUNT(*) FROM sequence").fetchone() == (1,)
    assert files_of_sqlite(tmp_path) == []
