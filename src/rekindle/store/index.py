"""The index: which block lies in which slot, which sequence ends in which block. SQLite in WAL mode.

Owns the schema and all questions; what changes rows stands in `ledger`. One connection writes (the writer thread's),
others (`connections`) read and see whole transactions only. Every block is a row per part and is there only with
all its parts. Knows no files but its own.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

from rekindle.cache.hashing import HASH_BYTES, BlockHash, TokenIds, id_bytes
from rekindle.errors import StoreError
from rekindle.store.connections import ReadConnections, connect
from rekindle.store.values import Location, SequenceRecord

logger = logging.getLogger(__name__)

INDEX_VERSION = 2
# What a question raises: SQLite has no checksums, so a row may hold anything where its column's type is expected.
INDEX_DAMAGE = (sqlite3.Error, ValueError, TypeError, OverflowError)
# The child index holds the ids, so that the child with the longest common ids is a neighbour of the ids asked for,
# found in O(log n) also below a root with ten thousand children.
_SCHEMA = f"""
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE block(
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, part INTEGER NOT NULL, parent BLOB NOT NULL, root BLOB NOT NULL,
    slot INTEGER NOT NULL, num_tokens INTEGER NOT NULL, ids BLOB NOT NULL, crc INTEGER NOT NULL, last_use REAL NOT NULL,
    UNIQUE(name, part), UNIQUE(part, slot));
CREATE INDEX block_child ON block(parent, ids) WHERE part = 0;
CREATE TABLE agent(
    agent BLOB PRIMARY KEY, namespace TEXT NOT NULL, id TEXT NOT NULL, pinned_until REAL NOT NULL DEFAULT 0)
    WITHOUT ROWID;
CREATE TABLE sequence(
    agent BLOB NOT NULL, branch INTEGER NOT NULL, root BLOB NOT NULL, head BLOB NOT NULL, num_tokens INTEGER NOT NULL,
    canonical_tokens INTEGER NOT NULL, last_use REAL NOT NULL, turn_ends BLOB NOT NULL,
    PRIMARY KEY(agent, branch)) WITHOUT ROWID;
CREATE INDEX sequence_head ON sequence(head);
CREATE TABLE free(part INTEGER NOT NULL, slot INTEGER NOT NULL, PRIMARY KEY(part, slot)) WITHOUT ROWID;
PRAGMA user_version = {INDEX_VERSION};
"""
# From the version that is the key to the next one.
_MIGRATIONS = {1: "ALTER TABLE agent ADD COLUMN pinned_until REAL NOT NULL DEFAULT 0;"}
_TABLES = {"meta", "block", "agent", "sequence", "free"}
_CHAIN = """
WITH RECURSIVE chain(parent, ids, depth) AS (
    SELECT parent, ids, 1 FROM block WHERE name = ? AND part = 0
    UNION ALL
    SELECT block.parent, block.ids, depth + 1 FROM chain JOIN block ON block.name = chain.parent AND block.part = 0
    WHERE depth < ?)
SELECT parent, ids FROM chain ORDER BY depth DESC
"""
# Every block that a pinned agent stands on, once.
_PINNED = """
WITH RECURSIVE chain(name, parent) AS (
    SELECT name, parent FROM block WHERE part = 0 AND name IN (
        SELECT head FROM agent JOIN sequence USING(agent) WHERE pinned_until > 0 AND pinned_until >= ?)
    UNION
    SELECT block.name, block.parent FROM chain JOIN block ON block.name = chain.parent AND part = 0)
SELECT COUNT(*) FROM chain
"""
_NEIGHBOURS = (
    "SELECT name, ids FROM block WHERE part = 0 AND parent = ? AND ids <= ? ORDER BY ids DESC LIMIT 1",
    "SELECT name, ids FROM block WHERE part = 0 AND parent = ? AND ids > ? ORDER BY ids LIMIT 1",
)


def agent_key(namespace: str, agent: str, secret: bytes) -> bytes:
    """The keyed hash under which an agent's rows stand."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES, key=secret, person=b"rekindle.agent")
    for field in (namespace.encode(), agent.encode()):
        digest.update(len(field).to_bytes(8, "little") + field)
    return digest.digest()


def common_tokens(stored: bytes, asked: bytes) -> int:
    """How many leading ids two runs of u32 share."""
    size = min(len(stored), len(asked)) // 4
    a, b = (np.frombuffer(run, dtype="<u4", count=size) for run in (stored, asked))
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else size


def packed(turn_ends: tuple[int, ...]) -> bytes:
    """Ends of turns as they stand in a row: u32 little-endian."""
    return np.array(turn_ends, dtype="<u4").tobytes()


def unpacked(turn_ends: bytes) -> tuple[int, ...]:
    """The ends of turns in a row."""
    return tuple(np.frombuffer(turn_ends, dtype="<u4").tolist())


class Index:
    """Questions to the index, from any thread. Raises sqlite3.Error when the file is damaged."""

    def __init__(self, path: Path, num_parts: int) -> None:
        self.num_parts = num_parts
        self._path = path
        self._readers = ReadConnections(path)
        self.writer = connect(path)
        try:
            self._prepare()
        except BaseException:
            self.writer.close()
            raise

    def _prepare(self) -> None:
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            "secure_delete = ON",
        ):
            self.writer.execute(f"PRAGMA {pragma}")
        version = self.writer.execute("PRAGMA user_version").fetchone()[0]
        tables = {row[0] for row in self.writer.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if version == 0 and not tables:
            self.writer.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            return
        if version > INDEX_VERSION and tables >= _TABLES:
            raise StoreError(
                f"{self._path} was written by a newer Rekindle (version {version}, this one knows {INDEX_VERSION}): "
                "use that one, or choose another directory with --store"
            )
        if version < 1 or not tables >= _TABLES:
            raise sqlite3.DatabaseError(f"tables {sorted(tables)} of version {version}")
        for number in range(version, INDEX_VERSION):
            step = f"BEGIN IMMEDIATE; {_MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;"
            self.writer.executescript(step)

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """A read connection that nobody else uses meanwhile."""
        return self._readers.reading()

    def close(self) -> None:
        """Empty the WAL into the file and close all connections; one that is reading is closed by its reader."""
        try:
            self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            logger.error("the store's index could not be closed in order, its next open will do that: %s", error)
        self.abandon()

    def rewrite(self) -> None:
        """Write the file anew: `secure_delete` alone leaves copies of rows that SQLite has moved between pages."""
        self.writer.execute("PRAGMA temp_store = MEMORY")  # or a copy of everything would pass through another disk
        self.writer.execute("VACUUM")

    def truncate_wal(self) -> None:
        """Move all of the WAL into the file and cut it to nothing, so that what was deleted is in neither.

        Called by the writer's thread. StoreError when a reader is in the way for a minute.
        """
        busy = self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreError(f"the log of {self._path} could not be emptied, somebody reads it: purge again")

    @property
    def num_bytes(self) -> int:
        """Size of SQLite's files."""
        num_bytes = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):  # SQLite makes and removes the last two as it likes
                num_bytes += Path(f"{self._path}{suffix}").stat().st_size
        return num_bytes

    def abandon(self) -> None:
        """Close all connections as they are."""
        self._readers.close()
        self.writer.close()

    def meta(self) -> dict[str, int]:
        """Settings of the store that were fixed when it was made, and its high-water marks."""
        with self.reading() as connection:
            return dict(connection.execute("SELECT key, value FROM meta"))

    def location(self, name: BlockHash) -> Location | None:
        """Where a block lies, None unless all its parts are there. About 10 µs."""
        with self.reading() as connection:
            return self._location(connection, name)

    def _location(self, connection: sqlite3.Connection, name: bytes) -> Location | None:
        rows = connection.execute(
            "SELECT parent, root, ids, slot, crc FROM block WHERE name = ? ORDER BY part", (name,)
        ).fetchall()
        if len(rows) != self.num_parts:
            return None
        parent, root, ids = rows[0][:3]
        return Location(
            BlockHash(name),
            BlockHash(parent),
            BlockHash(root),
            np.frombuffer(ids, dtype="<u4").astype(np.uint32),
            tuple(row[3] for row in rows),
            tuple(row[4] for row in rows),
        )

    def chain(self, names: Sequence[BlockHash], parent: BlockHash, ids: TokenIds) -> list[Location]:
        """The leading blocks of a chain that are there, whole, and hold exactly these ids after `parent`."""
        found: list[Location] = []
        size = len(ids) // len(names) if names else 0
        with self.reading() as connection:
            for number, name in enumerate(names):
                location = self._location(connection, name)
                wanted = ids[number * size : (number + 1) * size]
                if location is None or location.parent != parent or not np.array_equal(location.ids, wanted):
                    break
                found.append(location)
                parent = name
        return found

    def nearest_child(self, parent: BlockHash, ids: TokenIds) -> tuple[Location, int] | None:
        """The child of `parent` that shares the most leading ids, at least one, with how many. O(log n)."""
        asked = id_bytes(ids)
        with self.reading() as connection:
            rows = [connection.execute(query, (parent, asked)).fetchone() for query in _NEIGHBOURS]
            shared = [(common_tokens(row[1], asked), row[0]) for row in rows if row is not None]
            for num_tokens, name in sorted(shared, reverse=True):
                location = self._location(connection, name) if num_tokens else None
                if location is not None:
                    return location, num_tokens
        return None

    def has_blocks(self) -> bool:
        """Whether there is any block."""
        with self.reading() as connection:
            return connection.execute("SELECT 1 FROM block LIMIT 1").fetchone() is not None

    def names(self) -> list[BlockHash]:
        """Every block, in the order of the slots; reads the whole index."""
        with self.reading() as connection:
            return [
                BlockHash(row[0]) for row in connection.execute("SELECT name FROM block WHERE part = 0 ORDER BY slot")
            ]

    def parents(self) -> dict[bytes, tuple[bytes, int]]:
        """Every block's parent and tokens; reads the whole index."""
        with self.reading() as connection:
            rows = connection.execute("SELECT name, parent, num_tokens FROM block WHERE part = 0")
            return {name: (parent, num_tokens) for name, parent, num_tokens in rows}

    def sequences(self) -> list[SequenceRecord]:
        """Every branch of every agent, without ids."""
        with self.reading() as connection:
            rows = connection.execute(
                "SELECT namespace, id, branch, root, head, num_tokens, canonical_tokens, last_use, turn_ends"
                " FROM sequence JOIN agent USING(agent)"
            )
            return [
                SequenceRecord(namespace, agent, branch, root, head, num_tokens, canonical, last_use, unpacked(ends))
                for namespace, agent, branch, root, head, num_tokens, canonical, last_use, ends in rows
            ]

    def ids(self, record: SequenceRecord, block_tokens: int) -> TokenIds | None:
        """The token ids of a branch, from a walk up its chain; None where a block of it is missing."""
        if record.num_tokens == 0:
            return np.empty(0, dtype=np.uint32)
        with self.reading() as connection:
            rows = connection.execute(_CHAIN, (record.head, record.num_tokens // block_tokens + 1)).fetchall()
        ids = np.frombuffer(b"".join(row[1] for row in rows), dtype="<u4").astype(np.uint32)
        if not rows or rows[0][0] != record.root or len(ids) < record.num_tokens:
            return None
        return ids[: record.num_tokens]

    def counts(self) -> tuple[int, int]:
        """Agents and sequences."""
        with self.reading() as connection:
            row = connection.execute("SELECT (SELECT COUNT(*) FROM agent), (SELECT COUNT(*) FROM sequence)").fetchone()
        return row[0], row[1]

    def pins(self, now: float) -> dict[tuple[str, str], float]:
        """(namespace, agent) -> until when it is pinned, of those still pinned at `now`."""
        with self.reading() as connection:
            query = "SELECT namespace, id, pinned_until FROM agent WHERE pinned_until > 0 AND pinned_until >= ?"
            return {(namespace, agent): until for namespace, agent, until in connection.execute(query, (now,))}

    def num_pinned_blocks(self, now: float) -> int:
        """Blocks that pinned agents stand on; costs a walk along all of them."""
        with self.reading() as connection:
            return int(connection.execute(_PINNED, (now,)).fetchone()[0])
