"""All changes of the index: rows added, sequences moved, what nobody uses any more freed, what must leave evicted.

Owns the writing connection; only the writer thread calls it. Every change happens inside one
`transaction`, which either is durable as a whole or never was.

A block is in use while it has a child or is the head of a sequence. Whoever takes the last use away frees the block and
goes on with its parent, so counts are never stored and a shared prefix is freed with its last user.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.cache.hashing import BlockHash, TokenIds, id_bytes
from rekindle.store.index import Index, agent_key, packed, unpacked
from rekindle.store.retention import LeavingOrder
from rekindle.store.slots import Slot, SlotTable
from rekindle.store.values import SequenceRecord, Shortened

# How long ago the future counts as: what is used now comes after it.
JUST_BEFORE_S = 0.01
BranchKey = tuple[str, str, int]  # namespace, agent, branch
BlockParts = tuple[int, int, bytes, bytes]  # part, slot, parent, root
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


@dataclass(frozen=True, slots=True, eq=False)
class BlockRow:
    """A block whose records are durable: a slot and a payload checksum per part."""

    name: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds
    slots: tuple[int, ...]
    crcs: tuple[int, ...]


class Ledger:
    """The writing side of an `Index`."""

    def __init__(self, index: Index, secret: bytes, block_tokens: int) -> None:
        self._db = index.writer
        self._block_tokens = block_tokens
        self._order = LeavingOrder(self._db)
        self._secret = secret
        self._num_parts = index.num_parts
        self.slots = SlotTable(self._db, self._num_parts)

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
            self.slots.reload()
            self._order.forget()
            raise

    def has(self, name: BlockHash) -> bool:
        """Whether the block is there with all its parts."""
        row = self._db.execute("SELECT COUNT(*) FROM block WHERE name = ?", (name,)).fetchone()
        return bool(row[0] == self._num_parts)

    def add(self, rows: Iterable[BlockRow], now: float) -> None:
        """Take the slots of these blocks and enter them; a block that is there already moves to its new slots."""
        for row in rows:
            before = self._db.execute("SELECT part, slot FROM block WHERE name = ?", (row.name,)).fetchall()
            self._db.execute("DELETE FROM block WHERE name = ?", (row.name,))
            if not before:
                self._order.add(row.name, row.parent, row.root)
            for part, (slot, crc) in enumerate(zip(row.slots, row.crcs, strict=True)):
                self.slots.take(part, slot)
                self._db.execute(
                    "INSERT INTO block(name, part, parent, root, slot, num_tokens, ids, crc, last_use)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (row.name, part, row.parent, row.root, slot, len(row.ids), id_bytes(row.ids), crc, now),
                )
            self.slots.free(before)

    def move(self, records: Sequence[SequenceRecord]) -> None:
        """Let each branch end in its new head, then free what only their old heads used."""
        heads = []
        for record in records:
            agent = agent_key(record.namespace, record.agent, self._secret)
            heads += self._heads(agent, record.branch)
            self._order.restate([record.head])
            self._db.execute(
                "INSERT OR IGNORE INTO agent(agent, namespace, id) VALUES (?, ?, ?)",
                (agent, record.namespace, record.agent),
            )
            self._db.execute(
                "INSERT OR REPLACE INTO sequence VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    agent,
                    record.branch,
                    record.root,
                    record.head,
                    record.num_tokens,
                    record.canonical_tokens,
                    record.last_use,
                    packed(record.turn_ends),
                ),
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

    def purge(self, namespace: str, agent: str) -> int:
        """Forget an agent and every block no sequence stands on any more; return how many of its own others keep.

        What cancelled or running requests left without a sequence belongs to nobody known, so it may be the agent's:
        it goes, too. Whoever still needs it stages it again.
        """
        key = agent_key(namespace, agent, self._secret)
        names = [row[0] for row in self._db.execute(_STOOD_ON, (key,))]
        self.delete(namespace, agent, None)
        self._release([row[0] for row in self._db.execute(_ORPHANS).fetchall()])
        return sum(bool(self._block(name)) for name in names)

    def pin(self, namespace: str, agent: str, until: float) -> bool:
        """Let the agent's blocks stay until that wall time; False if it is not known."""
        key = agent_key(namespace, agent, self._secret)
        self._order.restate(self._heads(key, None))
        return self._db.execute("UPDATE agent SET pinned_until = ? WHERE agent = ?", (until, key)).rowcount == 1

    def touch(self, uses: Mapping[BranchKey, float], now: float) -> None:
        """Note when branches were used; a later use that is noted already stays, unless it lies in the future."""
        for (namespace, agent, branch), last_use in uses.items():
            key = agent_key(namespace, agent, self._secret)
            self._db.execute(
                "UPDATE sequence SET last_use = ?1 WHERE agent = ?2 AND branch = ?3 AND NOT last_use BETWEEN ?1 AND ?4",
                (last_use, key, branch, now),
            )
            self._order.restate(self._heads(key, branch))

    def mend_future(self, now: float) -> None:
        """Let what was used in the future, by a clock that has gone back since, count as used a moment ago."""
        with self.transaction():
            self._mend_future(now)

    def _mend_future(self, now: float) -> None:
        query = "UPDATE sequence SET last_use = ?1 WHERE last_use > ?2"
        self._db.execute(query, (max(0.0, now - JUST_BEFORE_S), now))

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
                parent, root = rows[0][2:]
                for cut in self._step_back(name, parent, root):
                    shortened[cut.namespace, cut.agent, cut.branch] = cut
                self._remove(name, rows)
        return list(shortened.values())

    def _step_back(self, name: bytes, parent: bytes, root: bytes) -> list[Shortened]:
        """Let the sequences that end in a block end in its parent; without a parent they are gone."""
        shortened = []
        query = (
            "SELECT agent, branch, num_tokens, turn_ends, namespace, id FROM sequence JOIN agent USING(agent)"
            " WHERE head = ?"
        )
        for key, branch, num_tokens, turn_ends, namespace, agent in self._db.execute(query, (name,)).fetchall():
            try:
                left = (num_tokens - 1) // self._block_tokens * self._block_tokens if parent != root else 0
                ends = packed(tuple(end for end in unpacked(turn_ends) if end <= left))
            except (TypeError, ValueError):
                left, ends = 0, b""  # a damaged row: nothing says where the branch ends
            if left:
                self._db.execute(
                    "UPDATE sequence SET head = ?3, num_tokens = ?4, canonical_tokens = MIN(canonical_tokens, ?4),"
                    " turn_ends = ?5 WHERE agent = ?1 AND branch = ?2",
                    (key, branch, parent, left, ends),
                )
            else:
                self._db.execute("DELETE FROM sequence WHERE agent = ? AND branch = ?", (key, branch))
                self._forget_empty(key)
            shortened.append(Shortened(namespace, agent, branch, left))
        return shortened

    def heads(self, records: Iterable[SequenceRecord]) -> list[bytes]:
        """Where these branches end now."""
        keys = [(agent_key(record.namespace, record.agent, self._secret), record.branch) for record in records]
        return [head for key, branch in keys for head in self._heads(key, branch)]

    def check(self) -> None:
        """Assert that the order in memory is that of the rows; for a ledger nobody is using."""
        self._order.check()

    def _heads(self, agent: bytes, branch: int | None) -> list[bytes]:
        query = "SELECT head FROM sequence WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)"
        return [row[0] for row in self._db.execute(query, (agent, branch))]

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

    def _block(self, name: bytes) -> list[BlockParts]:
        query = "SELECT part, slot, parent, root FROM block WHERE name = ? ORDER BY part"
        return self._db.execute(query, (name,)).fetchall()

    def _remove(self, name: bytes, rows: Sequence[BlockParts]) -> None:
        self._db.execute("DELETE FROM block WHERE name = ?", (name,))
        self.slots.free([row[:2] for row in rows])
        self._order.remove(name, rows[0][2])

    def _in_use(self, name: bytes) -> bool:
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM block WHERE part = 0 AND parent = ?1)"
            " OR EXISTS (SELECT 1 FROM sequence WHERE head = ?1)",
            (name,),
        ).fetchone()
        return bool(row[0])
