"""The index: maps blocks to slots and sequences to their head blocks. SQLite in WAL mode.

Owns all queries; tables are defined in `schema`, changes in `ledger`. Every row read is verified against its MAC, and
one that does not verify counts as missing. One connection writes (the writer thread's); others (`connections`) read and
see only whole transactions. A block has a row for each stored part and counts as present with its first one; those of
windows are there for as long as a branch may be resumed with them. Knows no other files.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds, id_bytes
from rekindle.errors import StoreError
from rekindle.store.damage import IndexDamage
from rekindle.store.schema import (
    AGENT,
    BLOCK,
    COLUMNS,
    META,
    SEQUENCE,
    Row,
    Table,
    index_macs,
    prepare,
)
from rekindle.store.sqlite_file import connect, connect_writer
from rekindle.store.values import Place, SequenceRecord, StoredBlock

logger = logging.getLogger(__name__)

_BLOCK = f"SELECT {BLOCK} FROM block WHERE name = ? ORDER BY part"
_CHAIN = f"""
WITH RECURSIVE chain(depth, {BLOCK}) AS (
    SELECT 1, {BLOCK} FROM block WHERE name = ? AND part = 0
    UNION ALL
    SELECT depth + 1, {", ".join(f"block.{column}" for column in BLOCK.split(", "))}
    FROM chain JOIN block ON block.name = chain.parent AND block.part = 0 WHERE depth < ?)
SELECT {BLOCK} FROM chain ORDER BY depth DESC
"""
_SEQUENCES = f"""
SELECT {", ".join(f"sequence.{column}" for column in SEQUENCE.split(", "))},
    {", ".join(f"agent.{column}" for column in AGENT.split(", "))} FROM sequence LEFT JOIN agent USING(agent)
"""
_SEQUENCE_COLUMNS = SEQUENCE.count(",") + 1
# Every block in the chain of a pinned agent, once.
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


# Read connections to one SQLite file, each used by one reader at a time.
#
# Owns the open connections. Any thread may read, even during `close`: a reader that finishes later closes its own
# connection, so none leaks.


class ReadConnections:
    """A pool as large as the most concurrent readers so far. Raises sqlite3.Error if unreadable or closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._is_closed = False

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for exclusive use inside the `with` block."""
        connection = self._take() or self._open()
        try:
            yield connection
        finally:
            self._give_back(connection)

    def _take(self) -> sqlite3.Connection | None:
        with self._lock:
            if self._is_closed:
                raise sqlite3.ProgrammingError(f"{self._path} is closed")
            return self._idle.pop() if self._idle else None

    def _open(self) -> sqlite3.Connection:
        connection = connect(self._path)
        connection.execute("PRAGMA query_only = ON")
        return connection

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Refuse new readers; reads in progress may finish."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def common_tokens(stored: bytes, asked: bytes) -> int:
    """Count the leading ids that two u32 byte strings share."""
    size = min(len(stored), len(asked)) // 4
    a, b = (np.frombuffer(run, dtype="<u4", count=size) for run in (stored, asked))
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else size


def packed(turn_ends: tuple[int, ...]) -> bytes:
    """Encode turn ends for a row: u32 little-endian."""
    return np.array(turn_ends, dtype="<u4").tobytes()


def unpacked(turn_ends: bytes) -> tuple[int, ...]:
    """Decode the turn ends of a row."""
    return tuple(np.frombuffer(turn_ends, dtype="<u4").tolist())


class Index:
    """Queries on the index, from any thread; `damage` records the damage found. Raises sqlite3.Error."""

    def __init__(self, path: Path, num_parts: int, *, secret: bytes, mark_damaged: Callable[[], None]) -> None:
        self.num_parts = num_parts
        self.macs = index_macs(secret)
        self.damage = IndexDamage(mark_damaged)
        self._path = path
        self._readers = ReadConnections(path)
        self.writer = connect_writer(path)
        try:
            prepare(self.writer, path)
        except BaseException:
            self.writer.close()
            raise

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """A read connection for exclusive use inside the `with` block."""
        return self._readers.reading()

    def close(self) -> None:
        """Checkpoint the WAL and close all connections; a connection in use is closed by its reader."""
        try:
            self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            logger.error("the store's index could not be closed cleanly, the next open recovers it: %s", error)
        self.abandon()

    def rewrite(self) -> None:
        """Rewrite the file: `secure_delete` alone leaves copies of rows that SQLite has moved between pages."""
        self.writer.execute("PRAGMA temp_store = MEMORY")  # otherwise a full copy may be written to another disk
        self.writer.execute("VACUUM")

    def truncate_wal(self) -> None:
        """Checkpoint the WAL and truncate it to zero, so that deleted rows are in neither file.

        Called on the writer thread. StoreError if a reader blocks it for a minute.
        """
        busy = self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise StoreError(f"the log of {self._path} could not be emptied because it is being read: purge again")

    def look_through(self, how: Literal["quick_check", "integrity_check"]) -> None:
        """Have SQLite check its B-trees; report what it finds as damage to repair. Reads the whole file.

        For 500 MB, "quick_check" takes one second and "integrity_check" ten: it compares rows with their indexes.
        """
        (found,) = self.writer.execute(f"PRAGMA {how}(1)").fetchone()
        if found != "ok":
            self.damage.found(found)

    def verify_rows(self) -> None:
        """Verify every row's MAC; one second for 300,000 rows."""
        for table, columns in COLUMNS.items():
            for row in self.writer.execute(f"SELECT {columns} FROM {table}"):
                self._holds(table, row)

    @property
    def num_bytes(self) -> int:
        """Size of SQLite's files."""
        num_bytes = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):  # SQLite creates and removes the last two at any time
                num_bytes += Path(f"{self._path}{suffix}").stat().st_size
        return num_bytes

    def abandon(self) -> None:
        """Close all connections without a checkpoint."""
        self._readers.close()
        self.writer.close()

    def meta(self) -> dict[str, int]:
        """Settings fixed when the store was created, and its high-water marks."""
        with self.reading() as connection:
            rows = connection.execute(f"SELECT {META} FROM meta").fetchall()
        return {row[0]: row[1] for row in rows if self._holds("meta", row)}

    def _holds(self, table: Table, row: Row) -> bool:
        """Whether a row verifies; if not, report damage. The caller then treats the row as missing."""
        if self.macs[table].holds(row):
            return True
        self.damage.found(f"a row of {table}")
        return False

    def block(self, block_hash: BlockHash) -> StoredBlock | None:
        """Where a block is stored; None unless its first part is. About 10 µs."""
        with self.reading() as connection:
            return self._stored(connection, block_hash)

    def _stored(self, connection: sqlite3.Connection, block_hash: bytes) -> StoredBlock | None:
        rows = self._rows(connection, block_hash)
        if not rows:
            return None
        _, _, parent, root, _, _, ids = rows[0][:7]
        stored_ids = np.frombuffer(ids, dtype="<u4").astype(np.uint32)
        identity = BlockIdentity(BlockHash(block_hash), BlockHash(parent), BlockHash(root), stored_ids)
        return StoredBlock(identity, tuple(Place(row[1], row[4], row[7]) for row in rows))

    def _rows(self, connection: sqlite3.Connection, block_hash: bytes) -> list[Row]:
        """A block's rows, one for each stored part; empty unless the first part exists and all verify."""
        rows: list[Row] = connection.execute(_BLOCK, (block_hash,)).fetchall()
        if rows and rows[0][1] != 0:
            self.damage.found("a block without its first part")
            return []
        return rows if all(self._holds("block", row) for row in rows) else []

    def chain(self, hashes: Sequence[BlockHash], parent: BlockHash, ids: TokenIds) -> list[StoredBlock]:
        """The leading blocks of a chain that are stored and hold exactly these ids after `parent`."""
        found: list[StoredBlock] = []
        size = len(ids) // len(hashes) if hashes else 0
        with self.reading() as connection:
            for number, block_hash in enumerate(hashes):
                stored = self._stored(connection, block_hash)
                wanted = ids[number * size : (number + 1) * size]
                if stored is None or stored.identity.parent != parent:
                    break
                if not np.array_equal(stored.identity.ids, wanted):
                    break
                found.append(stored)
                parent = block_hash
        return found

    def nearest_child(self, parent: BlockHash, ids: TokenIds) -> tuple[StoredBlock, int] | None:
        """The child of `parent` that shares the most leading ids (at least one), and their count. O(log n)."""
        asked = id_bytes(ids)
        found: list[tuple[int, StoredBlock]] = []
        with self.reading() as connection:
            for query in _NEIGHBOURS:
                row = connection.execute(query, (parent, asked)).fetchone()
                stored = None if row is None else self._stored(connection, row[0])
                if stored is not None and stored.identity.parent == parent:
                    found.append((common_tokens(id_bytes(stored.identity.ids), asked), stored))
        num_tokens, nearest = max(found, key=itemgetter(0), default=(0, None))
        return (nearest, num_tokens) if nearest is not None and num_tokens else None

    def has_blocks(self) -> bool:
        """Whether the index contains any block."""
        with self.reading() as connection:
            return connection.execute("SELECT 1 FROM block LIMIT 1").fetchone() is not None

    def hashes(self) -> list[BlockHash]:
        """Hashes of all blocks in slot order; reads the whole index."""
        with self.reading() as connection:
            query = f"SELECT {BLOCK} FROM block WHERE part = 0 ORDER BY slot"
            return [BlockHash(row[0]) for row in connection.execute(query) if self._holds("block", row)]

    def parents(self) -> dict[bytes, tuple[bytes, int]]:
        """Block hash -> (parent, tokens) of every block; reads the whole index."""
        with self.reading() as connection:
            rows = connection.execute(f"SELECT {BLOCK} FROM block WHERE part = 0")
            return {row[0]: (row[2], row[5]) for row in rows if self._holds("block", row)}

    def sequences(self, agent: bytes | None = None) -> list[SequenceRecord]:
        """Every branch of every agent, or of the one with this key, without token ids."""
        found = []
        query, values = (_SEQUENCES, ()) if agent is None else (f"{_SEQUENCES} WHERE agent = ?", (agent,))
        with self.reading() as connection:
            for row in connection.execute(query, values):
                owner = row[_SEQUENCE_COLUMNS:]
                if self._holds("sequence", row) and self._holds("agent", owner):
                    _, branch, root, head, num_tokens, canonical, last_use, ends, _ = row[:_SEQUENCE_COLUMNS]
                    ends = unpacked(ends) if ends else ()
                    found.append(
                        SequenceRecord(owner[1], owner[2], branch, root, head, num_tokens, canonical, last_use, ends)
                    )
        return found

    def ids(self, record: SequenceRecord, block_tokens: int) -> TokenIds | None:
        """Token ids of a branch, read by walking up its chain; None if a block is missing."""
        if record.num_tokens == 0:
            return np.empty(0, dtype=np.uint32)
        with self.reading() as connection:
            rows = connection.execute(_CHAIN, (record.head, record.num_tokens // block_tokens + 1)).fetchall()
        if not rows or not all(self._holds("block", row) for row in rows):
            return None
        ids = np.frombuffer(b"".join(row[6] for row in rows), dtype="<u4").astype(np.uint32)
        if rows[0][2] != record.root:
            self.damage.found("a block whose parent is missing")
            return None
        return ids[: record.num_tokens] if len(ids) >= record.num_tokens else None

    def counts(self) -> tuple[int, int]:
        """Numbers of agents and sequences."""
        with self.reading() as connection:
            row = connection.execute("SELECT (SELECT COUNT(*) FROM agent), (SELECT COUNT(*) FROM sequence)").fetchone()
        return row[0], row[1]

    def pins(self, now: float) -> dict[tuple[str, str], float]:
        """(namespace, agent) -> pin expiry, for agents still pinned at `now`."""
        with self.reading() as connection:
            query = f"SELECT {AGENT} FROM agent WHERE pinned_until > 0 AND pinned_until >= ?"
            rows = connection.execute(query, (now,)).fetchall()
        return {(row[1], row[2]): row[3] for row in rows if self._holds("agent", row)}

    def num_pinned_blocks(self, now: float) -> int:
        """Number of blocks in the chains of pinned agents; costs a walk along all of them."""
        with self.reading() as connection:
            return int(connection.execute(_PINNED, (now,)).fetchone()[0])
