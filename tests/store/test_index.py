"""An index of another version: an earlier one is rebuilt from the records, one of a newer Rekindle is left alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import StoreError
from rekindle.store.rows.index import LOG_BYTES, PAGE_BYTES
from rekindle.store.rows.schema import INDEX_VERSION
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, Chain, save, warm_tokens

Opened = Callable[..., WarmStore]


def test_an_index_of_an_earlier_version_is_rebuilt_from_the_records(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chain = Chain.of(store, range(50))
    save(store, chain, "ann")
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    with sqlite3.connect(index) as connection:
        connection.execute("DROP TABLE cover")
        connection.execute(f"PRAGMA user_version = {INDEX_VERSION - 1}")
    connection.close()
    store = opened()
    assert warm_tokens(store, chain) == 50
    assert {record.agent: record.num_tokens for record in store.sequences()} == {"ann": 50}
    assert list(index.parent.glob("index.db.damaged-*"))
    store.check("records")


def test_an_index_of_a_newer_rekindle_is_refused_and_left_alone(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(50)))
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    with sqlite3.connect(index) as connection:
        connection.execute(f"PRAGMA user_version = {INDEX_VERSION + 1}")
    connection.close()
    with pytest.raises(StoreError, match="newer Rekindle"):
        opened()
    assert not list(index.parent.glob("*damaged*"))
    with sqlite3.connect(index) as connection:
        connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
    connection.close()
    assert len(opened().sequences()) == 1


def test_a_new_index_has_small_pages_and_a_log_of_megabytes(opened: Opened) -> None:
    writer = opened().index.writer
    found = [writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_size", "wal_autocheckpoint")]
    assert found == [PAGE_BYTES, LOG_BYTES // PAGE_BYTES]


def test_the_bytes_of_the_index_are_told(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(50)))
    place = tmp_path / "store" / FINGERPRINT.hex()
    assert store.stats().index_bytes == sum(path.stat().st_size for path in place.glob("index.db*")) > 4096
