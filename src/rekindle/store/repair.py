"""Repair index rows that do not verify: drop them with their dependents, or rewrite them from known data.

    damaged rows dropped  →  file checked, its key B-trees rebuilt if they differ  →  slots that no row accounts for
    read: blocks recovered  →  blocks without parents, branches without heads dropped  →  free slots recomputed

Runs inside a ledger transaction. Reads every row, which takes seconds for a million blocks, and only those records
whose slots no row accounts for. An agent's row whose key still matches its agent loses only its pin.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.store.record_rows import whole_rows, with_parents
from rekindle.store.schema import AGENT, BLOCK, COLUMNS, IndexMacs, Table, block_rows, is_agent
from rekindle.store.shards import Shards
from rekindle.store.values import Shortened

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

    def __init__(self, db: sqlite3.Connection, macs: IndexMacs, secret: bytes, shards: Shards, now: float) -> None:
        self._db = db
        self._macs = macs
        self._secret = secret
        self._shards = shards
        self._now = now
        self._parts = range(len(shards.formats))

    def run(self) -> Repaired:
        """Leave only rows that verify and agree. sqlite3.DatabaseError if the file is damaged beyond its rows."""
        num_rows = self._drop_agents() + self._drop_blocks()
        known = self._branches()
        num_rows += self._drop("meta") + self._drop("free") + self._drop("sequence") + self._drop("cover")
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
        self._put("meta", marks.items())
        left = self._branches()
        lost = tuple(Shortened(*owner, key[1], 0) for key, owner in known.items() if key not in left)
        return Repaired(num_rows, lost, tuple(freed))

    def _drop_blocks(self) -> int:
        """Delete damaged block rows; return how many."""
        holds = self._macs["block"].holds
        rows = self._db.execute(f"SELECT {BLOCK}, id FROM block")
        damaged = [(row[-1],) for row in rows if not holds(row)]
        self._db.executemany("DELETE FROM block WHERE id = ?", damaged)
        return len(damaged)

    def _drop_agents(self) -> int:
        """Delete damaged agent rows, keeping the columns covered by the keyed hash; return how many."""
        rows = self._db.execute(f"SELECT {AGENT} FROM agent").fetchall()
        whole = [row for row in rows if self._macs["agent"].holds(row)]
        if len(whole) < len(rows):
            proven = [(*row[:3], 0.0) for row in rows if is_agent(row, self._secret)]
            kept = {row[0]: row[:4] for row in (*proven, *whole)}
            self._db.execute("DELETE FROM agent")
            self._put("agent", kept.values())
        return len(rows) - len(whole)

    def _drop(self, table: Table) -> int:
        """Delete damaged rows of a table whose keys may be damaged too; return how many."""
        rows = self._db.execute(f"SELECT {COLUMNS[table]} FROM {table}").fetchall()
        whole = [row[:-1] for row in rows if self._macs[table].holds(row)]
        if len(whole) < len(rows):
            self._db.execute(f"DELETE FROM {table}")
            self._put(table, whole)
        return len(rows) - len(whole)

    def _put(self, table: Table, rows: Iterable[tuple[object, ...]]) -> None:
        marks = ", ".join("?" * (COLUMNS[table].count(",") + 1))
        change = f"INSERT OR REPLACE INTO {table}({COLUMNS[table]}) VALUES ({marks})"
        self._db.executemany(change, [(*row, self._macs[table].of(row)) for row in rows])

    def _check_file(self) -> None:
        for attempt in ("as it is", "with its indexes rebuilt"):
            (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
            if found == "ok":
                return
            if attempt == "as it is":
                try:
                    self._db.execute("REINDEX")
                except sqlite3.IntegrityError as error:
                    raise sqlite3.DatabaseError(f"two rows have one key: {error}") from error
        raise sqlite3.DatabaseError(found)

    def _branches(self) -> dict[tuple[bytes, int], tuple[str, str]]:
        """(agent key, branch) -> (namespace, agent), for known agents."""
        query = "SELECT sequence.agent, branch, namespace, id FROM sequence JOIN agent USING(agent)"
        return {(key, branch): (space, agent) for key, branch, space, agent in self._db.execute(query)}

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
            self._put("block", block_rows(block, self._now))

    def _restate_free(self, part: int, num_slots: int) -> list[int]:
        """Make exactly the slots without a block free; return those that were not."""
        before, used = self._slots("free", part), self._slots("block", part)
        free = set(range(num_slots)) - used
        self._db.executemany("DELETE FROM free WHERE part = ? AND slot = ?", [(part, slot) for slot in before - free])
        freed = sorted(free - before)
        self._put("free", [(part, slot) for slot in freed])
        return freed
