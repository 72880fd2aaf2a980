"""The index through versions: one of version 1 is taken over whole, one of a newer Rekindle is left alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import StoreError
from rekindle.store.commands import Delete, Pin
from rekindle.store.description import Description
from rekindle.store.other_stores import OtherStores
from rekindle.store.schema import INDEX_VERSION, agent_key
from rekindle.store.sync import OsFileSystem
from rekindle.store.warm import WarmStore
from tests.store.chains import FINGERPRINT, LAYOUT, SIZE, Chain, save, warm_tokens

Opened = Callable[..., WarmStore]
SCHEMA_1 = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE block(
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, part INTEGER NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
    slot INTEGER NOT NULL, num_tokens INTEGER NOT NULL, ids BLOB NOT NULL, crc INTEGER NOT NULL, last_use REAL NOT NULL,
    UNIQUE(name, part), UNIQUE(part, slot));
CREATE INDEX block_child ON block(parent, ids) WHERE part = 0;
CREATE TABLE agent(agent BLOB PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sequence(
    agent BLOB NOT NULL, branch INTEGER NOT NULL, root BLOB NOT NULL, head BLOB NOT NULL, num_tokens INTEGER NOT NULL,
    canonical_tokens INTEGER NOT NULL, last_use REAL NOT NULL, turn_ends BLOB NOT NULL,
    PRIMARY KEY(agent, branch)) WITHOUT ROWID;
CREATE INDEX sequence_head ON sequence(head);
CREATE TABLE free(part INTEGER NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY(part, slot)) WITHOUT ROWID;
PRAGMA user_version = 1;
"""
COLUMNS = {
    "meta": "key, value",
    "block": "id, name, part, parent, root, slot, num_tokens, ids, crc, last_use",
    "agent": "agent, namespace, id",
    "sequence": "agent, branch, root, head, num_tokens, canonical_tokens, last_use, turn_ends",
    "free": "part, slot",
}


def make_version_1(path: Path) -> None:
    """Write what the index holds as version 1 wrote it."""
    with sqlite3.connect(path) as connection:
        rows = {
            table: connection.execute(f"SELECT {names} FROM {table}").fetchall() for table, names in COLUMNS.items()
        }
    connection.close()
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SCHEMA_1)
    for table, names in COLUMNS.items():
        marks = ", ".join("?" * (names.count(",") + 1))
        connection.executemany(f"INSERT INTO {table}({names}) VALUES ({marks})", rows[table])
    connection.commit()
    connection.close()


def test_an_index_of_version_1_is_taken_over(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chains = {agent: Chain.of(store, range(first, first + 50)) for first, agent in ((0, "ann"), (500, "bob"))}
    for agent, chain in chains.items():
        save(store, chain, agent)
    save(store, Chain.of(store, range(900, 990)), "gone")
    store.submit(Delete("default", "gone")).result(10)
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    make_version_1(index)
    others = OtherStores(tmp_path / "store" / "other", OsFileSystem())
    assert others.changes(agent_key("default", "ann", store.secret), Description("", LAYOUT, ())) == ()
    store = opened()
    assert {record.agent: record.num_tokens for record in store.sequences()} == {"ann": 50, "bob": 50}
    assert all(warm_tokens(store, chain) == 50 for chain in chains.values())
    assert store.pins() == {}
    assert store.submit(Pin("default", "ann", 1e9)).result(10)
    save(store, Chain.of(store, range(50 + SIZE)), "ann")
    store.check("records")
    store.close()
    with sqlite3.connect(index) as connection:
        assert connection.execute("PRAGMA user_version").fetchone()[0] == INDEX_VERSION == 4
    connection.close()
    assert opened().pins() == {("default", "ann"): 1e9}
    assert not list(index.parent.glob("*damaged*"))


def make_version_2(path: Path) -> None:
    """Leave of the index what version 2 wrote: rows without MACs."""
    with sqlite3.connect(path) as connection:
        for table in COLUMNS:
            connection.execute(f"ALTER TABLE {table} DROP COLUMN mac")
        connection.execute("DROP TABLE cover")
        connection.execute("PRAGMA user_version = 2")
    connection.close()


def test_rows_of_version_2_are_taken_over_as_far_as_they_prove_themselves(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    chains = {agent: Chain.of(store, range(first, first + 50)) for first, agent in ((0, "ann"), (500, "bob"))}
    for agent, chain in chains.items():
        save(store, chain, agent)
    save(store, Chain.of(store, range(900, 990)), "gone")
    assert store.submit(Pin("default", "bob", 1e9)).result(10)
    store.submit(Delete("default", "gone")).result(10)
    store.close()
    index = tmp_path / "store" / FINGERPRINT.hex() / "index.db"
    make_version_2(index)
    pristine = index.read_bytes()
    store = opened()
    assert {record.agent: store.sequence_ids(record).tolist() for record in store.sequences()} == {
        agent: chain.ids.tolist() for agent, chain in chains.items()
    }
    assert all(warm_tokens(store, chain) == 50 for chain in chains.values())
    assert store.pins() == {("default", "bob"): 1e9} and store.stats().damaged_rows == 0
    store.check("records")
    store.close()

    index.write_bytes(pristine)
    with sqlite3.connect(index) as connection:
        connection.execute("UPDATE agent SET id = 'eve' WHERE id = 'ann'")
        connection.execute("UPDATE block SET ids = x'02000001' || substr(ids, 5) WHERE id = 6 AND part = 0")
        connection.execute("UPDATE meta SET value = 2 WHERE key = 'num_slots.0'")
    connection.close()
    store = opened()
    assert {record.agent for record in store.sequences()} <= {"bob"}
    assert store.stats().damaged_rows >= 1
    for agent, chain in chains.items():
        save(store, chain, agent)
        assert warm_tokens(store, chain) == 50
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


def test_the_bytes_of_the_index_are_told(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    save(store, Chain.of(store, range(50)))
    place = tmp_path / "store" / FINGERPRINT.hex()
    assert store.stats().index_bytes == sum(path.stat().st_size for path in place.glob("index.db*")) > 4096
