"""All changes of the index: rows added, sequences moved, what nobody uses any more freed, what must leave evicted.

Owns the writing connection; only the writer thread calls it. Every change happens inside one
`transaction`, which either is durable as a whole or never was. A change that meets a row that does not verify raises
DamagedRow and happens not at all; after `repair` it can.

A block is in use while it has a child or is the head of a sequence. Whoever takes the last use away frees the block and
goes on with its parent, so counts are never stored and a shared prefix is freed with its last user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.damage import DamagedRow
from rekindle.store.index import Index, packed, unpacked
from rekindle.store.repair import Repaired, RowRepair
from rekindle.store.retention import StoreEvictionOrder
from rekindle.store.schema import AGENT, BLOCK, COLUMNS, SEQUENCE, Row, Table, agent_key, block_rows
from rekindle.store.shards import Shards
from rekindle.store.slots import Slot, SlotTable
from rekindle.store.values import SequenceRecord, Shortened, StoredBlock

# How long ago the future counts as: what is used now comes after it.
JUST_BEFORE_S = 0.01
BranchKey = tuple[str, str, int]  # namespace, agent, branch
# Every block that an agent stands on, once.
_STOOD_ON = """
WITH RECURSIVE chain(name, parent) AS (
    SELECT name, parent FROM block WHERE part = 0 AND name IN (SELECT head FROM sequence WHERE agent = ?)
    UNION
    SELECT block.name, block.parent FROM chain JOIN block ON block.name = chain.parent AND part = 0)
SELECT name FROM chain
"""
# Blocks without a child in which no sequence ends.
_ORPHANS = """
SELECT name FROM block AS leaf WHERE part = 0 AND NOT EXISTS (SELECT 1 FROM sequence WHERE head = leaf.name)
    AND NOT EXISTS (SELECT 1 FROM block INDEXED BY block_child WHERE part = 0 AND parent = leaf.name)
"""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A purged agent: its key, the names of blocks that went with it, and how many of its blocks others keep."""

    key: bytes
    names: tuple[bytes, ...]
    num_shared: int


class Ledger:
    """The writing side of an `Index`."""

    def __init__(self, index: Index, secret: bytes, block_tokens: int) -> None:
        self._db = index.writer
        self._block_tokens = block_tokens
        self._order = StoreEvictionOrder(self._db)
        self._secret = secret
        self._num_parts = index.num_parts
        self._macs = index.macs
        self.damage = index.damage
        self.slots = SlotTable(self._db, self._num_parts, index.macs)

    @contextmanager
    def transaction(self) -> Iterator[list[Slot]]:
        """One durable change. Yields the list of slots it frees, to be punched and reused only after it."""
        freed = self.slots.begin()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield freed
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self.slots.roll_back()
            self._order.forget()
            raise

    def has(self, name: BlockHash) -> bool:
        """Whether the block is there with all its parts."""
        return len(self._block(name)) == self._num_parts

    def add(self, blocks: Iterable[StoredBlock], now: float) -> None:
        """Take the slots of these blocks and enter them; a block that is there already moves to its new slots."""
        for block in blocks:
            identity = block.identity
            before = self._block(identity.hash)
            self._db.execute("DELETE FROM block WHERE name = ?", (identity.hash,))
            if not before:
                self._order.add(identity.hash, identity.parent, identity.root)
            for part, slot in enumerate(block.slots):
                self.slots.take(part, slot)
            for row in block_rows(block, now):
                self._put_block(row)
            self.slots.free([(part, slot) for _, part, _, _, slot, *_ in before])

    def _put_block(self, row: Row) -> None:
        query = f"INSERT INTO block({BLOCK}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._db.execute(query, (*row, self._macs["block"].of(row)))

    def move(self, records: Sequence[SequenceRecord]) -> None:
        """Let each branch end in its new head, then free what only their old heads used."""
        heads = []
        for record in records:
            agent = agent_key(record.namespace, record.agent, self._secret)
            heads += self._heads(agent, record.branch)
            self._order.restate([record.head])
            if self._agent(agent) is None:
                self._put_agent(agent, record.namespace, record.agent, 0.0)
            self._put_sequence(
                (
                    agent,
                    record.branch,
                    record.root,
                    record.head,
                    record.num_tokens,
                    record.canonical_tokens,
                    record.last_use,
                    packed(record.turn_ends),
                )
            )
        self._release(heads)

    def delete(self, namespace: str, agent: str, branch: int | None) -> int:
        """Forget a branch, or all of an agent; return the slots freed."""
        key = agent_key(namespace, agent, self._secret)
        heads = self._heads(key, branch)
        self._db.execute("DELETE FROM sequence WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)", (key, branch))
        self._forget_empty(key)
        return self._release(heads)

    def _forget_empty(self, key: bytes) -> None:
        self._db.execute(
            "DELETE FROM agent WHERE agent = ?1 AND NOT EXISTS (SELECT 1 FROM sequence WHERE agent = ?1)", (key,)
        )

    def purge(self, namespace: str, agent: str) -> Forgotten:
        """Forget an agent and every block no sequence stands on any more; return what went and what others keep.

        What cancelled or running requests left without a sequence belongs to nobody known, so it may be the agent's:
        it goes, too. An agent that still needs it stages it again. A row that does not verify may be the agent's as
        well: DamagedRow, so that it is repaired first. Reads all rows.
        """
        self._verify_all()
        key = agent_key(namespace, agent, self._secret)
        names = [row[0] for row in self._db.execute(_STOOD_ON, (key,))]
        self.delete(namespace, agent, None)
        self._release([row[0] for row in self._db.execute(_ORPHANS).fetchall()])
        gone = tuple(name for name in names if not self._block(name))
        return Forgotten(key, gone, len(names) - len(gone))

    def has_left(self, forgotten: Forgotten) -> str | None:
        """What rows there still are of a purged agent, in words; None: none."""
        counts = {
            "its agent": "SELECT COUNT(*) FROM agent WHERE agent = ?",
            "its sequences": "SELECT COUNT(*) FROM sequence WHERE agent = ?",
        }
        left = [what for what, query in counts.items() if self._db.execute(query, (forgotten.key,)).fetchone()[0]]
        left += ["a block"] * any(self._block(name) for name in forgotten.names)
        left += ["blocks that no sequence stands on"] * bool(self._db.execute(f"{_ORPHANS} LIMIT 1").fetchall())
        left += ["free pages"] * bool(self._db.execute("PRAGMA freelist_count").fetchone()[0])
        return ", ".join(left) or None

    def pin(self, namespace: str, agent: str, until: float) -> bool:
        """Let the agent's blocks stay until that wall time; False if it is not known."""
        key = agent_key(namespace, agent, self._secret)
        self._order.restate(self._heads(key, None))
        known = self._agent(key) is not None
        if known:
            self._put_agent(key, namespace, agent, until)
        return known

    def touch(self, uses: Mapping[BranchKey, float], now: float) -> None:
        """Note when branches were used; a later use that is noted already stays, unless it lies in the future."""
        for (namespace, agent, branch), last_use in uses.items():
            key = agent_key(namespace, agent, self._secret)
            for row in self._sequences(key, branch):
                if not last_use <= row[6] <= now:
                    self._put_sequence((*row[:6], last_use, row[7]))
            self._order.restate(self._heads(key, branch))

    def mend_future(self, now: float) -> None:
        """Let what was used in the future, by a clock that has gone back since, count as used a moment ago."""
        with self.transaction():
            self._mend_future(now)

    def _mend_future(self, now: float) -> None:
        for row in self._verified("sequence", "last_use > ?", now):
            self._put_sequence((*row[:6], max(0.0, now - JUST_BEFORE_S), row[7]))

    def limit_namespaces(self, share: float) -> None:
        """Let a namespace with more than this share of the blocks give way before others."""
        self._order.limit_namespaces(share)

    def evict(self, num_blocks: int, keep: Iterable[bytes], now: float) -> list[Shortened]:
        """Free so many blocks, or all that may go, leaves first; never one of `keep`. Return what became of branches.

        A sequence that ended in an evicted block ends in its parent now.
        """
        shortened: dict[BranchKey, Shortened] = {}
        if self._order.is_outdated(now):
            self._mend_future(now)
        with self._order.holding(keep):
            for _ in range(num_blocks):
                name = self._order.next(now)
                if name is None:
                    break
                rows = self._block(name)
                if not rows:
                    raise DamagedRow("a block that is to be evicted has lost its rows")
                parent, root = rows[0][2:4]
                for cut in self._step_back(name, parent, root):
                    shortened[cut.namespace, cut.agent, cut.branch] = cut
                self._remove(name, rows)
        return list(shortened.values())

    def _step_back(self, name: bytes, parent: bytes, root: bytes) -> list[Shortened]:
        """Let the sequences that end in a block end in its parent; without a parent they are gone."""
        shortened = []
        for row in self._verified("sequence", "head = ?", name):
            key, branch, _, _, num_tokens, canonical, last_use, turn_ends = row[:8]
            owner = self._agent(key)
            if owner is None:
                raise DamagedRow("the agent of a branch is missing")
            left = (num_tokens - 1) // self._block_tokens * self._block_tokens if parent != root else 0
            if left:
                ends = packed(tuple(end for end in unpacked(turn_ends) if end <= left))
                self._put_sequence((key, branch, root, parent, left, min(canonical, left), last_use, ends))
            else:
                self._db.execute("DELETE FROM sequence WHERE agent = ? AND branch = ?", (key, branch))
                self._forget_empty(key)
            shortened.append(Shortened(owner[1], owner[2], branch, left))
        return shortened

    def repair(self, shards: Shards, now: float) -> Repaired:
        """Drop what does not verify, and what hangs on it; blocks come back from their records. Takes a transaction.

        sqlite3.DatabaseError where the file itself is damaged.
        """
        done = RowRepair(self._db, self._macs, self._secret, shards, now).run()
        self.slots.freed += done.freed
        self.slots.reload()
        self._order.forget()
        self.damage.repaired(done.num_rows)
        return done

    def heads(self, records: Iterable[SequenceRecord]) -> list[bytes]:
        """Where these branches end now."""
        keys = [(agent_key(record.namespace, record.agent, self._secret), record.branch) for record in records]
        return [head for key, branch in keys for head in self._heads(key, branch)]

    def check(self) -> None:
        """Assert that the order in memory is that of the rows; for a ledger nobody is using."""
        self._order.check()

    def _heads(self, agent: bytes, branch: int | None) -> list[bytes]:
        return [row[3] for row in self._sequences(agent, branch)]

    def _sequences(self, agent: bytes, branch: int | None) -> list[Row]:
        if branch is None:
            return self._verified("sequence", "agent = ?", agent)
        return self._verified("sequence", "agent = ? AND branch = ?", agent, branch)

    def _agent(self, key: bytes) -> Row | None:
        rows = self._verified("agent", "agent = ?", key)
        return rows[0] if rows else None

    def _block(self, name: bytes) -> list[Row]:
        return self._verified("block", "name = ? ORDER BY part", name)

    def _verified(self, table: Table, where: str, *values: Any) -> list[Row]:
        """These rows; DamagedRow where one does not verify."""
        query = f"SELECT {COLUMNS[table]} FROM {table} WHERE {where}"
        rows: list[Row] = self._db.execute(query, values).fetchall()
        if not all(map(self._macs[table].holds, rows)):
            raise DamagedRow(f"a row of {table}")
        return rows

    def _verify_all(self) -> None:
        """DamagedRow unless every row that may say something of an agent verifies; 3 s for a million blocks."""
        for table, mac in self._macs.items():
            if not all(map(mac.holds, self._db.execute(f"SELECT {COLUMNS[table]} FROM {table}"))):
                raise DamagedRow(f"a row of {table}")
        for part in range(self._num_parts):
            if (said := self.slots.differing(part)) is not None:
                raise DamagedRow(said)

    def _put_agent(self, *row: Any) -> None:
        query = f"INSERT OR REPLACE INTO agent({AGENT}) VALUES (?, ?, ?, ?, ?)"
        self._db.execute(query, (*row, self._macs["agent"].of(row)))

    def _put_sequence(self, row: Row) -> None:
        query = f"INSERT OR REPLACE INTO sequence({SEQUENCE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._db.execute(query, (*row, self._macs["sequence"].of(row)))

    def _release(self, heads: Iterable[bytes]) -> int:
        """Free blocks from these heads upwards as long as nobody uses them; return the slots freed."""
        before = len(self.slots.freed)
        for name in heads:
            while not self._in_use(name):
                rows = self._block(name)
                if not rows:
                    break
                self._remove(name, rows)
                name = rows[0][2]
            self._order.restate([name])
        return len(self.slots.freed) - before

    def _remove(self, name: bytes, rows: Sequence[Row]) -> None:
        self._db.execute("DELETE FROM block WHERE name = ?", (name,))
        self.slots.free([(row[1], row[4]) for row in rows])
        self._order.remove(name, rows[0][2])

    def _in_use(self, name: bytes) -> bool:
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM block WHERE part = 0 AND parent = ?1)"
            " OR EXISTS (SELECT 1 FROM sequence WHERE head = ?1)",
            (name,),
        ).fetchone()
        return bool(row[0])
