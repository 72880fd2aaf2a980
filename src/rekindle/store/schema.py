"""The tables of the index, the MACs of their rows, and the keyed hash that identifies an agent."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rekindle.cache.blocks.hashing import HASH_BYTES, id_bytes
from rekindle.errors import StoreError
from rekindle.store.row_macs import TableMac, row_key
from rekindle.store.values import StoredBlock

INDEX_VERSION = 4
Row = Sequence[Any]
Table = Literal["meta", "free", "agent", "sequence", "block", "cover"]
IndexMacs = dict[Table, TableMac]

# Columns in the order they are read and hashed, the MAC last.
BLOCK = "name, part, parent, root, slot, num_tokens, ids, crc, last_use, mac"
AGENT = "agent, namespace, id, pinned_until, mac"
SEQUENCE = "agent, branch, root, head, num_tokens, canonical_tokens, last_use, turn_ends, mac"
FREE = "part, slot, mac"
META = "key, value, mac"
COVER = "agent, branch, name, part, mac"
COLUMNS: dict[Table, str] = {
    "meta": META,
    "free": FREE,
    "agent": AGENT,
    "sequence": SEQUENCE,
    "block": BLOCK,
    "cover": COVER,
}
_KINDS: dict[Table, str] = {
    "meta": "ti",
    "free": "ii",
    "agent": "bttf",
    "sequence": "bibbiifb",
    "block": "bibbiibif",
    "cover": "bibi",
}


def block_rows(block: StoredBlock, last_use: float) -> list[tuple[Any, ...]]:
    """The rows of a block, one for each stored part, without their MACs."""
    own = block.identity
    ids = id_bytes(own.ids)
    return [
        (own.hash, place.part, own.parent, own.root, place.slot, own.num_tokens, ids, place.crc, last_use)
        for place in block.places
    ]


# The child index contains the ids, so the child with the most leading ids in common is adjacent to the queried ids:
# O(log n), even below a root with ten thousand children.
_SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL, mac BLOB NOT NULL DEFAULT x'') WITHOUT ROWID;
CREATE TABLE block(
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, part INTEGER NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
    slot INTEGER NOT NULL, num_tokens INTEGER NOT NULL, ids BLOB NOT NULL, crc INTEGER NOT NULL, last_use REAL NOT NULL,
    mac BLOB NOT NULL DEFAULT x'', UNIQUE(name, part), UNIQUE(part, slot));
CREATE INDEX block_child ON block(parent, ids) WHERE part = 0;
CREATE TABLE agent(
    agent BLOB PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, pinned_until REAL NOT NULL DEFAULT 0,
    mac BLOB NOT NULL DEFAULT x'') WITHOUT ROWID;
CREATE TABLE sequence(
    agent BLOB NOT NULL, branch INTEGER NOT NULL, root BLOB NOT NULL, head BLOB NOT NULL, num_tokens INTEGER NOT NULL,
    canonical_tokens INTEGER NOT NULL, last_use REAL NOT NULL, turn_ends BLOB NOT NULL, mac BLOB NOT NULL DEFAULT x'',
    PRIMARY KEY(agent, branch)) WITHOUT ROWID;
CREATE INDEX sequence_head ON sequence(head);
CREATE TABLE free(
    part INTEGER NOT NULL, slot INTEGER NOT NULL, mac BLOB NOT NULL DEFAULT x'', PRIMARY KEY(part, slot)) WITHOUT ROWID;
CREATE TABLE cover(
    agent BLOB NOT NULL, branch INTEGER NOT NULL, name BLOB NOT NULL, part INTEGER NOT NULL, mac BLOB NOT NULL,
    PRIMARY KEY(agent, branch, name, part)) WITHOUT ROWID;
CREATE INDEX cover_part ON cover(name, part);
PRAGMA user_version = {INDEX_VERSION};
"""


def index_macs(secret: bytes) -> IndexMacs:
    """The MAC of each table, keyed with the store's secret."""
    key = row_key(secret, "index")
    return {table: TableMac(key, table, kinds) for table, kinds in _KINDS.items()}


def agent_key(namespace: str, agent: str, secret: bytes) -> bytes:
    """The keyed hash that identifies an agent's rows."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, key=secret, person=b"rekindle.agent")
    for field in (namespace.encode(), agent.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Create the tables of a new index.

    StoreError for one of another version, sqlite3.DatabaseError if the file is not an index.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0 and not tables:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    elif version > INDEX_VERSION and tables >= set(COLUMNS):
        raise StoreError(
            f"{path} was written by a newer Rekindle (version {version}, this one knows {INDEX_VERSION}): "
            "use that one, or choose another directory as store"
        )
    elif version != INDEX_VERSION or not tables >= set(COLUMNS):
        raise sqlite3.DatabaseError(f"tables {sorted(tables)} of version {version}")


def is_agent(row: Row, secret: bytes) -> bool:
    """Whether an agent row's key is the keyed hash of its namespace and id."""
    try:
        return bool(row[0] == agent_key(row[1], row[2], secret))
    except (TypeError, AttributeError, ValueError):
        return False
