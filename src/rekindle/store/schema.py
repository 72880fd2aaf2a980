"""The tables of the index, the MACs of their rows, and the migration from older versions.

Version 4 added covers: without them, blocks kept all their parts. Version 3 gave every row a MAC. Migrated rows get one
if they can be verified: a block by its hash of parent and ids, an agent by its key. The other tables' rows were never
verifiable; for a block, the records on disk decide whether its row is right.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES, BlockHash, block_hash, id_bytes, tail_hash
from rekindle.errors import StoreError
from rekindle.store.row_macs import TableMac, row_key
from rekindle.store.sqlite_file import transaction
from rekindle.store.values import StoredBlock

logger = logging.getLogger(__name__)

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
_TABLES_TO_3 = frozenset(COLUMNS) - {"cover"}  # of the first three versions


def block_rows(block: StoredBlock, last_use: float) -> list[tuple[Any, ...]]:
    """The rows of a block, one for each stored part, without their MACs."""
    own = block.identity
    ids = id_bytes(own.ids)
    return [
        (own.hash, place.part, own.parent, own.root, place.slot, own.num_tokens, ids, place.crc, last_use)
        for place in block.places
    ]


_COVER_TABLE = """
CREATE TABLE cover(
    agent BLOB NOT NULL, branch INTEGER NOT NULL, name BLOB NOT NULL, part INTEGER NOT NULL, mac BLOB NOT NULL,
    PRIMARY KEY(agent, branch, name, part)) WITHOUT ROWID
"""
_COVER_INDEX = "CREATE INDEX cover_part ON cover(name, part)"
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
{_COVER_TABLE}; {_COVER_INDEX};
PRAGMA user_version = {INDEX_VERSION};
"""
# Version -> statements that migrate it to the next.
_MIGRATIONS = {
    1: ["ALTER TABLE agent ADD COLUMN pinned_until REAL NOT NULL DEFAULT 0"],
    2: [f"ALTER TABLE {table} ADD COLUMN mac BLOB NOT NULL DEFAULT x''" for table in sorted(_TABLES_TO_3)],
    3: [_COVER_TABLE, _COVER_INDEX],
}
_MIGRATED_ROWS = 10_000  # per batch


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


def prepare(db: sqlite3.Connection, secret: bytes, path: Path) -> None:
    """Create the tables of a new index, or migrate an older one, one transaction per version.

    StoreError for a newer version, sqlite3.DatabaseError if the file is not an index.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0 and not tables:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        return
    if version > INDEX_VERSION and tables >= set(COLUMNS):
        raise StoreError(
            f"{path} was written by a newer Rekindle (version {version}, this one knows {INDEX_VERSION}): "
            "use that one, or choose another directory as store"
        )
    if version < 1 or not tables >= (_TABLES_TO_3 if version < INDEX_VERSION else set(COLUMNS)):
        raise sqlite3.DatabaseError(f"tables {sorted(tables)} of version {version}")
    for number in range(version, INDEX_VERSION):
        logger.info("migrating the index to version %d, once; 640,000 blocks take up to a minute", number + 1)
        with transaction(db):
            for statement in _MIGRATIONS[number]:
                db.execute(statement)
            if number == 2:
                _add_macs(db, secret)
            db.execute(f"PRAGMA user_version = {number + 1}")


def _add_macs(db: sqlite3.Connection, secret: bytes) -> None:
    """Add a MAC to every row that can be verified. The others stay without, and so count as missing."""
    macs = index_macs(secret)
    update = "UPDATE block SET mac = ? WHERE id = ?"
    for rows in _blocks(db):
        db.executemany(update, [(macs["block"].of(row[1:]), row[0]) for row in rows if _is_block(row[1:])])
    proven = {row[0]: row for row in db.execute(f"SELECT {AGENT} FROM agent").fetchall() if is_agent(row, secret)}
    rows = [(macs["agent"].of(row), key) for key, row in proven.items() if _is_time(row[3])]
    db.executemany("UPDATE agent SET mac = ? WHERE agent = ?", rows)
    rest: dict[Table, tuple[tuple[str, ...], Callable[[Row], bool]]] = {
        "sequence": (("agent", "branch"), lambda row: row[0] in proven and _is_branch(row)),
        "free": (("part", "slot"), _are_slots),
        "meta": (("key",), _is_mark),
    }
    for table, (key, is_proven) in rest.items():
        found = [row for row in db.execute(f"SELECT {COLUMNS[table]} FROM {table}").fetchall() if is_proven(row)]
        where = " AND ".join(f"{column} = ?" for column in key)
        change = f"UPDATE {table} SET mac = ? WHERE {where}"
        db.executemany(change, [(macs[table].of(row), *row[: len(key)]) for row in found])


def _blocks(db: sqlite3.Connection) -> Iterator[list[Row]]:
    """Yield row ids and rows of all blocks, in batches."""
    last = -(1 << 63)
    query = f"SELECT id, {BLOCK} FROM block WHERE id > ? ORDER BY id LIMIT {_MIGRATED_ROWS}"
    while rows := db.execute(query, (last,)).fetchall():
        yield rows
        last = rows[-1][0]


def _is_block(row: Row) -> bool:
    own, part, parent, root, slot, num_tokens, ids, crc, last_use = row[:9]
    if not (_is_hash(own) and _is_hash(parent) and _is_hash(root) and isinstance(ids, bytes) and len(ids) % 4 == 0):
        return False
    held = np.frombuffer(ids, dtype="<u4").astype(np.uint32)
    if not (num_tokens == len(held) > 0 and all(_is_count(number) for number in (part, slot, crc))):
        return False
    return _is_time(last_use) and own in (make(BlockHash(parent), held) for make in (block_hash, tail_hash))


def is_agent(row: Row, secret: bytes) -> bool:
    """Whether an agent row's key is the keyed hash of its namespace and id."""
    try:
        return bool(row[0] == agent_key(row[1], row[2], secret))
    except (TypeError, AttributeError, ValueError):
        return False


def _is_branch(row: Row) -> bool:
    _, branch, root, head, num_tokens, canonical, last_use, ends, _ = row
    counts = all(_is_count(number) for number in (branch, num_tokens, canonical)) and canonical <= num_tokens
    return counts and _is_hash(root) and _is_hash(head) and _is_time(last_use) and _are_ends(ends)


def _are_ends(value: object) -> bool:
    return isinstance(value, bytes) and len(value) % 4 == 0


def _are_slots(row: Row) -> bool:
    return _is_count(row[0]) and _is_count(row[1])


def _is_mark(row: Row) -> bool:
    return isinstance(row[0], str) and _is_count(row[1])


def _is_hash(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == HASH_BYTES


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _is_time(value: object) -> bool:
    return isinstance(value, float) and not math.isnan(value)
