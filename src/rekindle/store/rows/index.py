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
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds, id_bytes
from rekindle.errors import StoreError
from rekindle.store.files.damage import IndexDamage
from rekindle.store.files.keys import StoreKeys
from rekindle.store.files.sqlite_file import (
    checkpoint_at,
    connect,
    connect_writer,
    drop_traces,
    last_trace,
    problem,
    truncate_log,
)
from rekindle.store.files.table import KeyedTable
from rekindle.store.rows.schema import BLOCK, AgentRow, BlockRow, IndexTables, SequenceRow, prepare
from rekindle.store.values import SequenceRecord, StoredBlock

logger = logging.getLogger(__name__)
R = TypeVar("R", bound=NamedTuple)
# A turn changes some twenty pages, most of them for one row of 50 to 400 bytes: by hashes, rows lie anywhere. Smaller
# pages would have no room for the ids of a block (256 bytes) in an index, and put them into pages of their own.
PAGE_BYTES = 2048
# A page that many turns change is copied into the file once for each log.
LOG_BYTES = 8 << 20

_CHAIN = f"""
WITH RECURSIVE chain(depth, {BLOCK.columns}) AS (
    SELECT 1, {BLOCK.columns} FROM block WHERE name = ? AND part = 0
    UNION ALL
    SELECT depth + 1, {", ".join(f"block.{column}" for column in BlockRow._fields)}
    FROM chain JOIN block ON block.name = chain.parent AND block.part = 0 WHERE depth < ?)
SELECT {BLOCK.columns} FROM chain ORDER BY depth DESC
"""
# A block and all that follow it, children before parents.
DESCENDANTS = """
WITH RECURSIVE below(name, depth) AS (
    SELECT name, 1 FROM block WHERE name = ? AND part = 0
    UNION ALL
    SELECT block.name, depth + 1 FROM below JOIN block ON block.parent = below.name AND block.part = 0)
SELECT name FROM below ORDER BY depth DESC
"""
_SEQUENCES = f"""
SELECT {", ".join(f"sequence.{column}" for column in SequenceRow._fields)},
    {", ".join(f"agent.{column}" for column in AgentRow._fields)} FROM sequence LEFT JOIN agent USING(agent)
"""
_WIDTH = len(SequenceRow._fields)
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


class ReadConnections:
    """As many connections as there were readers at once so far, each used by one at a time. Any thread may read.

    A reader that finishes after `close` closes its own. Raises sqlite3.Error if unreadable or closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] | None = []  # None once closed

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for exclusive use inside the `with` block."""
        with self._lock:
            if self._idle is None:
                raise sqlite3.ProgrammingError(f"{self._path} is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = connect(self._path)
            connection.execute("PRAGMA query_only = ON")
        try:
            yield connection
        finally:
            self._give_back(connection)

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if self._idle is None:
                connection.close()
            else:
                self._idle.append(connection)

    def close(self) -> None:
        """Refuse new readers; reads in progress may finish."""
        with self._lock:
            idle, self._idle = self._idle or [], None
        for connection in idle:
            connection.close()


def common_tokens(stored: bytes, asked: bytes) -> int:
    """Count the leading ids that two u32 byte strings share."""
    size = min(len(stored), len(asked)) // 4
    a, b = (np.frombuffer(run, dtype="<u4", count=size) for run in (stored, asked))
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else size


class Index:
    """Queries on the index, from any thread; `damage` records the damage found. Raises sqlite3.Error."""

    def __init__(self, path: Path, num_parts: int, *, keys: StoreKeys, mark_damaged: Callable[[], None]) -> None:
        self.num_parts = num_parts
        self.tables = IndexTables.of(keys)
        self.damage = IndexDamage(mark_damaged)
        self._path = path
        self._readers = ReadConnections(path)
        self.writer = connect_writer(path, page_bytes=PAGE_BYTES)
        try:
            checkpoint_at(self.writer, LOG_BYTES)
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
            truncate_log(self.writer)
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
        if not truncate_log(self.writer):
            raise StoreError(f"the log of {self._path} could not be emptied because it is being read: purge again")

    def last_trace(self) -> int:
        """The note of the last purge that was not proven since; 0: there is none."""
        return last_trace(self.writer)

    def drop_traces(self, last: int) -> None:
        """Note that all purges up to this note are proven."""
        drop_traces(self.writer, last)

    def look_through(self, how: Literal["quick_check", "integrity_check"]) -> None:
        """Have SQLite check its B-trees (`sqlite_file.problem`); report what it finds as damage to repair."""
        if (found := problem(self.writer, how)) is not None:
            self.damage.found(found)

    def verify_rows(self) -> None:
        """Verify every row's MAC; one second for 300,000 rows."""
        for table in self.tables.all:
            for row in table.rows(self.writer):
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
            return {row.key: row.value for row in self._whole(self.tables.meta, connection)}

    def _whole(self, table: KeyedTable[R], connection: sqlite3.Connection, rest: str = "", *values: Any) -> Iterator[R]:
        return (row for row in table.rows(connection, rest, *values) if self._holds(table, row))

    def _holds(self, table: KeyedTable[R], row: R) -> bool:
        """Whether a row verifies; if not, report damage. The caller then treats the row as missing."""
        if table.holds(row):
            return True
        self.damage.found(f"a row of {table.name}")
        return False

    def block(self, block_hash: BlockHash) -> StoredBlock | None:
        """Where a block is stored; None unless its first part is. About 10 µs."""
        with self.reading() as connection:
            return self._stored(connection, block_hash)

    def _stored(self, connection: sqlite3.Connection, block_hash: bytes) -> StoredBlock | None:
        """A block, if its first part exists and the rows of all parts verify."""
        rows = list(self.tables.block.rows(connection, "WHERE name = ? ORDER BY part", block_hash))
        if rows and rows[0].part != 0:
            self.damage.found("a block without its first part")
            return None
        is_whole = rows and all(self._holds(self.tables.block, row) for row in rows)
        return self.tables.ids.block(rows) if is_whole else None

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
        sought = self.tables.ids.sought(parent, asked)
        found: list[tuple[int, StoredBlock]] = []
        with self.reading() as connection:
            for query in _NEIGHBOURS:
                row = connection.execute(query, (parent, sought)).fetchone()
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
            rows = self._whole(self.tables.block, connection, "WHERE part = 0 ORDER BY slot")
            return [row.name for row in rows]

    def parents(self) -> dict[bytes, tuple[bytes, int]]:
        """Block hash -> (parent, tokens) of every block; reads the whole index."""
        with self.reading() as connection:
            rows = self._whole(self.tables.block, connection, "WHERE part = 0")
            return {row.name: (row.parent, row.num_tokens) for row in rows}

    def sequences(self, agent: bytes | None = None) -> list[SequenceRecord]:
        """Every branch of every agent, or of the one with this key, without token ids."""
        which, values = ("", ()) if agent is None else ("WHERE agent = ?", (agent,))
        with self.reading() as connection:
            rows = connection.execute(f"{_SEQUENCES} {which}", values).fetchall()
        found = [(SequenceRow._make(row[:_WIDTH]), self.tables.agent.opened(row[_WIDTH:])) for row in rows]
        return [
            sequence.record(owner)
            for sequence, owner in found
            if self._holds(self.tables.sequence, sequence) and self._holds(self.tables.agent, owner)
        ]

    def ids(self, record: SequenceRecord, block_tokens: int) -> TokenIds | None:
        """Token ids of a branch, read by walking up its chain; None if a block is missing."""
        if record.num_tokens == 0:
            return np.empty(0, dtype=np.uint32)
        with self.reading() as connection:
            found = connection.execute(_CHAIN, (record.head, record.num_tokens // block_tokens + 1))
            rows = list(map(BlockRow._make, found))
        if not rows or not all(self._holds(self.tables.block, row) for row in rows):
            return None
        ids = np.concatenate([self.tables.ids.opened(row)[0] for row in rows])
        if rows[0].parent != record.root:
            self.damage.found("a block whose parent is missing")
            return None
        return ids[: record.num_tokens] if len(ids) >= record.num_tokens else None

    def descendants(self, block_hash: BlockHash) -> list[BlockHash]:
        """A block and all that follow it."""
        with self.reading() as connection:
            return [BlockHash(name) for (name,) in connection.execute(DESCENDANTS, (block_hash,))]

    def row_of(self, block_hash: BlockHash) -> int:
        """The number of a block's row, 0 if there is none; later rows have higher ones."""
        with self.reading() as connection:
            row = connection.execute("SELECT id FROM block WHERE name = ? AND part = 0", (block_hash,)).fetchone()
        return 0 if row is None else int(row[0])

    def chain_to(self, head: BlockHash, most: int) -> list[BlockIdentity]:
        """The chain that ends in a block, in order, `most` blocks at most: those after the last one that is missing."""
        with self.reading() as connection:
            rows = list(map(BlockRow._make, connection.execute(_CHAIN, (head, most))))
        good = list(takewhile(lambda row: self._holds(self.tables.block, row), reversed(rows)))
        return [BlockIdentity(row.name, row.parent, row.root, self.tables.ids.opened(row)[0]) for row in reversed(good)]

    def counts(self) -> tuple[int, int]:
        """Numbers of agents and sequences."""
        with self.reading() as connection:
            row = connection.execute("SELECT (SELECT COUNT(*) FROM agent), (SELECT COUNT(*) FROM sequence)").fetchone()
        return row[0], row[1]

    def pins(self, now: float) -> dict[tuple[str, str], float]:
        """(namespace, agent) -> pin expiry, for agents still pinned at `now`."""
        pinned = "WHERE pinned_until > 0 AND pinned_until >= ?"
        with self.reading() as connection:
            rows = self._whole(self.tables.agent, connection, pinned, now)
            return {(row.namespace, row.id): row.pinned_until for row in rows}

    def num_pinned_blocks(self, now: float) -> int:
        """Number of blocks in the chains of pinned agents; costs a walk along all of them."""
        with self.reading() as connection:
            return int(connection.execute(_PINNED, (now,)).fetchone()[0])
