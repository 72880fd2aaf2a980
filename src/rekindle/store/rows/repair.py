"""Repair index rows that do not verify: drop them with their dependents, or rewrite them from known data.

    damaged rows dropped  →  file checked, its key B-trees rebuilt if they differ  →  slots that no row accounts for
    read: blocks recovered  →  blocks without parents, branches without heads dropped  →  free slots recomputed

Runs inside a ledger transaction. Reads every row, which takes seconds for a million blocks, and only those records
whose slots no row accounts for. An agent's row whose key still matches its agent loses only its pin. `rebuild` recovers
blocks from all records in the same way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rekindle.cache.blocks.hashing import block_hash, tail_hash
from rekindle.store.files.records import PAGE, BadRecord
from rekindle.store.files.shards import Shards, read_record
from rekindle.store.files.sqlite_file import problem
from rekindle.store.files.table import KeyedTable
from rekindle.store.rows.schema import BLOCK, BlockRow, FreeRow, IndexTables, MetaRow
from rekindle.store.values import Bytes, Place, Shortened, StoredBlock

_INCOMPLETE = "DELETE FROM block WHERE part > 0 AND name NOT IN (SELECT name FROM block WHERE part = 0)"
_UNREACHABLE = """
WITH RECURSIVE reached(name, root) AS (
    SELECT name, root FROM block WHERE part = 0 AND parent = root
    UNION
    SELECT block.name, block.root FROM reached JOIN block INDEXED BY block_child
        ON block.parent = reached.name AND block.part = 0 AND block.root = reached.root)
DELETE FROM block WHERE name NOT IN (SELECT name FROM reached)
"""
_HEADLESS = """
DELETE FROM sequence WHERE agent NOT IN (SELECT agent FROM agent)
    OR head != root AND NOT EXISTS (SELECT 1 FROM block WHERE name = head AND part = 0 AND block.root = sequence.root)
"""


Known = Mapping[tuple[int, int], StoredBlock]  # by part and slot: what a readable row says of one record


def whole_rows(
    shards: Shards, slots: Sequence[Iterable[int]], known: Known | None = None
) -> tuple[int, list[StoredBlock]]:
    """Count the non-empty ones of these slots (per part) and return the intact blocks in them, unordered.

    A block needs its first part, and has those of windows that are there. If it is stored twice, the later slot wins.
    Records of an encrypted store say nothing by themselves: intact are those that are `known`.
    """
    num_found, by_part = [], []
    for part, of_part in enumerate(slots):
        found = list(_records(shards, part, of_part, known or {}))
        num_found.append(len(found))
        by_part.append({row.identity.hash: row for row in found if row is not None})
    rows = []
    for digest, row in by_part[0].items():
        places = tuple(place for found in by_part if digest in found for place in found[digest].places)
        rows.append(StoredBlock(row.identity, places))
    return max(num_found), rows


def with_parents(rows: Iterable[StoredBlock], known: Iterable[tuple[bytes, bytes]] = ()) -> list[StoredBlock]:
    """The rows whose ancestors up to the root are among them or in `known` (hash, root); parents first."""
    children: dict[bytes, list[StoredBlock]] = {}
    for row in rows:
        children.setdefault(row.identity.parent, []).append(row)
    reached = [row for found in children.values() for row in found if row.identity.parent == row.identity.root]
    reached += [row for digest, root in known for row in children.get(digest, ()) if row.identity.root == root]
    whole: list[StoredBlock] = []
    while reached:
        row = reached.pop()
        whole.append(row)
        own = row.identity
        reached += [child for child in children.get(own.hash, ()) if child.identity.root == own.root]
    return whole


def _records(shards: Shards, part: int, slots: Iterable[int], known: Known) -> Iterator[StoredBlock | None]:
    """Yield the records of a part as single-part rows, None for each that does not verify."""
    record_format = shards.formats[part]
    buffer = np.empty(record_format.record_bytes, dtype=np.uint8)
    for slot in slots:
        try:
            shards.read(part, slot, buffer[:PAGE])
            if not buffer[:PAGE].any():
                continue
            if shards.are_sealed:
                yield _opened(shards, known.get((part, slot)), buffer)
                continue
            shards.read(part, slot, buffer)
            stated = record_format.decode(buffer)
        except BadRecord:
            yield None
            continue
        hash_fn = block_hash if stated.num_tokens == record_format.block_tokens else tail_hash
        if hash_fn(stated.parent, stated.ids) == stated.hash:
            yield StoredBlock(stated, (Place(part, slot, record_format.payload_crc(buffer)),))
        else:
            yield None


def _opened(shards: Shards, block: StoredBlock | None, buffer: Bytes) -> StoredBlock | None:
    """A block of one part whose record is as its row says; None if there is no row, or it is not."""
    if block is None:
        return None
    read_record(shards, block, block.places[0], buffer)
    return block


@dataclass(frozen=True, slots=True)
class Repaired:
    """Number of rows that did not verify, the branches lost with them, and the (part, slot) that are now free."""

    num_rows: int
    lost: tuple[Shortened, ...]
    freed: tuple[tuple[int, int], ...]

    def summary(self) -> str:
        """One human-readable sentence."""
        return f"{self.num_rows} rows did not verify, {len(self.lost)} branches were lost with them"


class RowRepair:
    """One repair of the index in `db`, whose records are in `shards`."""

    def __init__(self, db: sqlite3.Connection, tables: IndexTables, secret: bytes, shards: Shards, now: float) -> None:
        self._db = db
        self._tables = tables
        self._secret = secret
        self._shards = shards
        self._now = now
        self._parts = range(len(shards.formats))

    def run(self) -> Repaired:
        """Leave only rows that verify and agree. sqlite3.DatabaseError if the file is damaged beyond its rows."""
        tables = self._tables
        num_rows = self._drop_agents() + self._drop_blocks()
        known = self._branches()
        num_rows += sum(self._drop(table) for table in tables.all if table.name not in ("agent", "block"))
        self._check_file()
        self._db.execute(_INCOMPLETE)
        num_slots = [self._num_slots(part) for part in self._parts]
        unknown = [self._unknown(part, num_slots[part]) for part in self._parts]
        self._bring_back(unknown)
        self._db.execute(_UNREACHABLE)
        self._db.execute(_HEADLESS)
        self._db.execute("DELETE FROM agent WHERE agent NOT IN (SELECT agent FROM sequence)")
        freed = [(part, slot) for part in self._parts for slot in self._restate_free(part, num_slots[part])]
        marks = {f"num_slots.{part}": num_slots[part] for part in self._parts}
        marks |= {f"slots_per_shard.{part}": self._shards.slots_per_shard[part] for part in self._parts}
        tables.meta.replace(self._db, *(MetaRow(key, value) for key, value in marks.items()))
        left = self._branches()
        lost = tuple(Shortened(*owner, key[1], 0) for key, owner in known.items() if key not in left)
        return Repaired(num_rows, lost, tuple(freed))

    def _drop_blocks(self) -> int:
        """Delete damaged block rows; return how many."""
        rows = self._db.execute(f"SELECT id, {BLOCK.columns} FROM block")
        damaged = [(number,) for number, *row in rows if not self._tables.block.holds(BlockRow._make(row))]
        self._db.executemany("DELETE FROM block WHERE id = ?", damaged)
        return len(damaged)

    def _drop_agents(self) -> int:
        """Delete damaged agent rows, keeping the columns covered by the keyed hash; return how many."""
        agent = self._tables.agent
        rows = list(agent.rows(self._db))
        whole = list(filter(agent.holds, rows))
        if len(whole) < len(rows):
            proven = [row._replace(pinned_until=0.0) for row in rows if row.is_named(self._secret)]
            kept = {row.agent: row for row in (*proven, *whole)}
            self._db.execute("DELETE FROM agent")
            agent.replace(self._db, *kept.values())
        return len(rows) - len(whole)

    def _drop(self, table: KeyedTable[Any]) -> int:
        """Delete damaged rows of a table whose keys may be damaged too; return how many."""
        rows = list(table.rows(self._db))
        whole = list(filter(table.holds, rows))
        if len(whole) < len(rows):
            self._db.execute(f"DELETE FROM {table.name}")
            table.replace(self._db, *whole)
        return len(rows) - len(whole)

    def _check_file(self) -> None:
        if problem(self._db, "integrity_check") is not None:
            try:
                self._db.execute("REINDEX")
            except sqlite3.IntegrityError as error:
                raise sqlite3.DatabaseError(f"two rows have one key: {error}") from error
            if (found := problem(self._db, "integrity_check")) is not None:
                raise sqlite3.DatabaseError(found)

    def _branches(self) -> dict[tuple[bytes, int], tuple[str, str]]:
        """(agent key, branch) -> (namespace, agent), for known agents."""
        query = "SELECT sequence.agent, branch, namespace, id FROM sequence JOIN agent USING(agent)"
        says = self._tables.agent.says
        return {
            (key, branch): (says("namespace", space), says("id", agent))
            for key, branch, space, agent in self._db.execute(query)
        }

    def _num_slots(self, part: int) -> int:
        """High-water mark of a part; if it is lost, derived from the slots inside its files."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (f"num_slots.{part}",)).fetchone()
        mark = row[0] if row is not None else max(self._shards.slots(part), default=-1) + 1
        return max(mark, max(self._slots("block", part), default=-1) + 1)

    def _slots(self, table: str, part: int) -> set[int]:
        return {row[0] for row in self._db.execute(f"SELECT slot FROM {table} WHERE part = ?", (part,))}

    def _unknown(self, part: int, num_slots: int) -> list[int]:
        return sorted(set(range(num_slots)) - self._slots("block", part) - self._slots("free", part))

    def _bring_back(self, slots: list[list[int]]) -> None:
        """Insert the blocks whose records are in slots that no row accounts for."""
        if not any(slots):
            return
        _, found = whole_rows(self._shards, slots)
        known = self._db.execute("SELECT name, root FROM block WHERE part = 0").fetchall()
        hashes = {block_hash for block_hash, _ in known}
        for block in with_parents((block for block in found if block.identity.hash not in hashes), known):
            self._tables.block.replace(self._db, *self._tables.ids.rows(block, self._now))

    def _restate_free(self, part: int, num_slots: int) -> list[int]:
        """Make exactly the slots without a block free; return those that were not."""
        before, used = self._slots("free", part), self._slots("block", part)
        free = set(range(num_slots)) - used
        self._db.executemany("DELETE FROM free WHERE part = ? AND slot = ?", [(part, slot) for slot in before - free])
        freed = sorted(free - before)
        self._tables.free.replace(self._db, *(FreeRow(part, slot) for slot in freed))
        return freed
