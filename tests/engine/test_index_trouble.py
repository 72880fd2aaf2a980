"""An index that cannot be read, or holds a damaged row, costs reuse: never a memory, a request or a thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from rekindle.errors import StoreError
from rekindle.store.rows.index import Index

Start = Callable[..., Engine]
HELLO = [{"role": "user", "content": "Remember me, please, for a while."}]


def failing_once(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, times: int) -> None:
    real, left = getattr(kind, name), [times]

    def flaky(self: object, *args: object) -> object:
        if left[0]:
            left[0] -= 1
            raise sqlite3.OperationalError("unable to open database file")
        return real(self, *args)

    monkeypatch.setattr(kind, name, flaky)


@contextmanager
def refused(engine: Engine, *changes: str) -> Iterator[None]:
    """Meanwhile SQLite refuses such changes (as `DELETE ON sequence`) of the index in which turns are saved."""
    store = engine.components.store
    assert store is not None
    writer = store.index.writer

    def run(statement: str) -> None:
        store.writer.call(lambda _: writer.execute(statement)).result()

    names = {change: f"refused_{change.replace(' ', '_')}" for change in changes}
    for change, name in names.items():
        run(f"CREATE TEMP TRIGGER {name} BEFORE {change} BEGIN SELECT RAISE(ABORT, 'no more today'); END")
    try:
        yield
    finally:
        for name in names.values():
            run(f"DROP TRIGGER {name}")


def branches(engine: Engine) -> int:
    engine.flush()
    return engine.agent("ada").info().branches


def test_a_failed_read_of_the_index_costs_no_branch(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    for text in ("One. ", "Two. ", "Three. "):
        engine.chat("ada", [{"role": "user", "content": text * 9}], max_tokens=3)
    assert branches(engine) == 3
    engine.close()
    failing_once(monkeypatch, Index, "ids", 3)
    engine = start()
    engine.chat("ada", HELLO, max_tokens=3)
    engine.close()
    assert branches(start()) == 4


def test_a_deletion_that_fails_is_said_and_can_be_repeated(start: Start) -> None:
    engine = start()
    engine.chat("ada", HELLO, max_tokens=3)
    engine.flush()
    with refused(engine, "DELETE ON sequence"), pytest.raises(StoreError, match="delete it again"):
        engine.agent("ada").delete()
    engine.agent("ada").delete()
    engine.close()
    assert start().agents() == []


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE block SET ids = substr(ids, 1, 5)",
        "UPDATE block SET ids = 'abcd'",
        "UPDATE sequence SET num_tokens = 'x'",
        "UPDATE sequence SET turn_ends = x'010203'",
        "UPDATE agent SET id = CAST(x'ff' AS TEXT)",
        "UPDATE block SET ids = substr(ids, 1, 3) || x'01' || substr(ids, 5)",  # beyond the vocabulary
        "UPDATE block SET slot = slot + 100000000 WHERE part = 0",
        "UPDATE sequence SET head = x'00'",
        "UPDATE agent SET namespace = 'other'",
        "UPDATE agent SET pinned_until = 'x'",
        "UPDATE meta SET value = 'x' WHERE key = 'num_slots.0'",
    ],
)
def test_a_damaged_row_reads_as_not_there(start: Start, tmp_path: Path, damage: str) -> None:
    engine = start()
    cold = engine.chat("ada", HELLO, max_tokens=5, temperature=0.0)
    engine.close()
    (path,) = tmp_path.glob("**/index.db")
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    connection.close()
    engine = start()
    assert engine.agents(namespace="other") == []
    assert engine.chat("ada", HELLO, max_tokens=5, temperature=0.0).token_ids == cold.token_ids
    assert engine.flush()
    (ada,) = engine.agents()
    assert ada.saved_tokens == ada.num_tokens > 0
    assert not [said for said in engine.health().problems if "free space" in said]
