"""Whoever asks a store that is closing or closed gets an answer, and leaves nothing open."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import StoreError
from rekindle.store.warm import WarmStore
from tests.store.chains import SIZE, Chain, save

Opened = Callable[..., WarmStore]


def files_of_sqlite(store: WarmStore) -> list[str]:
    """Names of what lies beside the index only while somebody has it open."""
    found: Path = store._parts.place.index_path
    return sorted(path.name for path in found.parent.glob(f"{found.name}-*"))


def test_questions_while_it_closes(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    for _ in range(20):
        store = opened()
        save(store, Chain.of(store, range(3 * SIZE)), "ann")
        begun, done = threading.Barrier(4), threading.Event()

        def ask(store: WarmStore = store, begun: threading.Barrier = begun, done: threading.Event = done) -> None:
            begun.wait(60)
            try:
                while not done.is_set():
                    store.stats()
                    assert len(store.sequences()) <= 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        begun.wait(60)
        store.close()
        done.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert failures == []
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_closed_store_answers_and_opens_nothing(opened: Opened) -> None:
    store = opened()
    save(store, Chain.of(store, range(3 * SIZE)), "ann")
    assert len(store.sequences()) == 1 and store.stats().num_agents == 1
    assert files_of_sqlite(store) == ["index.db-shm", "index.db-wal"]
    store.close()
    assert files_of_sqlite(store) == []
    assert store.sequences() == [] and store.stats().num_agents == 0
    assert files_of_sqlite(store) == []
    with pytest.raises(StoreError, match="closed"):
        store.delete("default", "ann").result(60)
    with pytest.raises(StoreError, match="closed"):
        store.flush()
    assert len(opened().sequences()) == 1, "nothing of it was carried out"


def test_a_reader_that_is_late_closes_what_it_read_with(opened: Opened) -> None:
    store = opened()
    save(store, Chain.of(store, range(3 * SIZE)), "ann")
    with store._index.reading() as connection:
        closing = threading.Thread(target=store.close)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "it does not wait for readers"
        assert connection.execute("SELECT COUNT(*) FROM sequence").fetchone() == (1,)
    assert files_of_sqlite(store) == []
