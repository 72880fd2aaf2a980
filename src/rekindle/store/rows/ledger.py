"""All changes to the index: add blocks, move sequences, free unused blocks, evict.

Owns the write connection; only the writer thread calls it. Every change runs inside one `transaction`, which is durable
as a whole or has no effect. A change that meets a row that does not verify raises DamagedRow and has no effect; it can
be retried after `repair`.

A block is in use while it has a child or is the head of a sequence. Removing the last use frees the block and continues
with its parent, so reference counts are never stored and a shared prefix is freed with its last user. A window part is
in use while a branch covers it (see `covers`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.parts import EndingPart
from rekindle.store.files.damage import DamagedRow
from rekindle.store.files.shards import Shards
from rekindle.store.files.sqlite_file import note_traces, transaction
from rekindle.store.rows.covers import Covers, PartKey
from rekindle.store.rows.index import DESCENDANTS, Index
from rekindle.store.rows.repair import Repaired, RowRepair
from rekindle.store.rows.retention import StoreEvictionOrder
from rekindle.store.rows.schema import AgentRow, BlockRow, SequenceRow, agent_key
from rekindle.store.rows.slots import Slot, SlotTable
from rekindle.store.values import SequenceRecord, Shortened, StoredBlock

# A last use in the future is reset to this long before now, so that a use now is more recent.
JUST_BEFORE_S = 0.01
BranchKey = tuple[str, str, int]  # namespace, agent, branch
# Every block in the chains of an agent, once.
_AGENT_BLOCKS = """
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
    """A purged agent: its key, the hashes of the blocks freed with it, and how many of its blocks others still use.

    `seals`: in an encrypted store, what the index had of the keys of these blocks' records.
    """

    key: bytes
    hashes: tuple[bytes, ...]
    num_shared: int
    seals: tuple[bytes, ...] = ()


class Ledger:
    """The write side of an `Index`. `ending`: the parts that end, with the kind of each."""

    def __init__(self, index: Index, secret: bytes, block_tokens: int, ending: Mapping[int, EndingPart]) -> None:
        self._db = index.writer
        self._block_tokens = block_tokens
        self._order = StoreEvictionOrder(self._db, index.tables)
        self._secret = secret
        self._num_parts = index.num_parts
        self._tables = index.tables
        self.damage = index.damage
        self.slots = SlotTable(self._db, self._num_parts, index.tables)
        self._covers = Covers(self._db, index.tables, ending, block_tokens)

    @contextmanager
    def transaction(self) -> Iterator[list[Slot]]:
        """Make one durable change. Yields the list of slots it frees, which may be punched and reused only after it."""
        freed = self.slots.begin()
        try:
            with transaction(self._db):
                yield freed
        except BaseException:
            self.slots.roll_back()
            self._order.forget()
            raise

    def has(self, block_hash: BlockHash) -> bool:
        """Whether the block is in the index."""
        return bool(self._block(block_hash))

    def parts(self, block_hash: BlockHash) -> set[int]:
        """Return the parts of a block that are in the index."""
        return {row.part for row in self._block(block_hash)}

    def add(self, blocks: Iterable[StoredBlock], now: float, *, damaged: Collection[bytes] = ()) -> None:
        """Insert these blocks and take their slots; a part already in the index moves to its new slot.

        A block without its first part must be in the index with it. A `damaged` one loses what it had with its first.
        """
        for block in blocks:
            identity = block.identity
            before = self._block(identity.hash)
            assert before or 0 in block.parts, "a block is added without its first part"
            if not before:
                self._order.add(identity.hash, identity.parent, identity.root)
            is_anew = 0 in block.parts and identity.hash in damaged
            moved = [row for row in before if row.part in block.parts or is_anew]
            for row in moved:
                self._db.execute("DELETE FROM block WHERE name = ? AND part = ?", (row.name, row.part))
                if row.part not in block.parts:
                    self._covers.drop_part(identity.hash, row.part)
            for place in block.places:
                self.slots.take(place.part, place.slot)
            self._tables.block.insert(self._db, *self._tables.ids.rows(block, now))
            self.slots.free([(row.part, row.slot) for row in moved])

    def move(self, records: Sequence[SequenceRecord]) -> None:
        """Set each branch's new head and cover, then free what only the old ones used."""
        heads, covered = list[bytes](), list[PartKey]()
        for record in records:
            agent = agent_key(record.namespace, record.agent, self._secret)
            old = self._heads(agent, record.branch)
            heads += old
            self._order.restate([record.head])
            if self._agent(agent) is None:
                self._tables.agent.replace(self._db, AgentRow(agent, record.namespace, record.agent, 0.0))
            self._tables.sequence.replace(self._db, SequenceRow.of(agent, record))
            if self._covers:
                covered += self._covers.of(agent, record.branch)
                self._cover(agent, record)
                covered += self._parts_since(old, record.head) if record.is_rolling else []
        self._free_uncovered(covered)
        self._release(heads)

    def _cover(self, agent: bytes, record: SequenceRecord) -> None:
        """Cover the end of a branch and its resume points."""
        points = {at for at in record.resume_points if at <= record.num_tokens}
        self._put_cover(agent, record.branch, record.head, record.num_tokens, points)

    def _put_cover(self, agent: bytes, branch: int, head: bytes, num_tokens: int, points: Collection[int] = ()) -> None:
        """Cover these points and the end; and where the next token is, as an engine of whole blocks resumes there."""
        positions = ({*points, num_tokens, num_tokens + 1} - {0}) if num_tokens else set[int]()
        self._covers.put(agent, branch, head, num_tokens, positions, self._parent)

    def _parts_since(self, old: Collection[bytes], head: bytes) -> list[PartKey]:
        """The parts that end of a chain's blocks from its head back to one of the old heads, or to its root."""
        found: list[PartKey] = []
        while head not in old and (rows := self._block(head)):
            found += [(head, row.part) for row in rows if row.part]
            head = rows[0].parent
        return found

    def _parent(self, block_hash: bytes) -> bytes | None:
        rows = self._block(block_hash)
        return rows[0].parent if rows else None

    def _free_uncovered(self, parts: Iterable[PartKey]) -> None:
        """Free those of these window parts that no branch covers."""
        for block_hash, part in self._covers.uncovered(parts):
            found = [row for row in self._block(block_hash) if row.part == part]
            self._db.execute("DELETE FROM block WHERE name = ? AND part = ?", (block_hash, part))
            self.slots.free([(part, row.slot) for row in found])

    def settle_covers(self) -> None:
        """Cover the end of every branch that covers nothing, and free all window parts that none covers."""
        if not self._covers:
            return
        for row in self._tables.sequence.verified(self._db):
            if row.num_tokens and not self._covers.of(row.agent, row.branch):
                self._put_cover(row.agent, row.branch, row.head, row.num_tokens)
        self._free_uncovered(self._covers.all_uncovered())

    def delete(self, namespace: str, agent: str, branch: int | None) -> int:
        """Delete a branch, or a whole agent (None); return the number of slots freed."""
        key = agent_key(namespace, agent, self._secret)
        heads, covered, before = self._heads(key, branch), self._covers.of(key, branch), len(self.slots.freed)
        self._db.execute("DELETE FROM sequence WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)", (key, branch))
        self._covers.drop(key, branch)
        self._forget_empty(key)
        self._free_uncovered(covered)
        self._release(heads)
        return len(self.slots.freed) - before

    def _forget_empty(self, key: bytes) -> None:
        self._db.execute(
            "DELETE FROM agent WHERE agent = ?1 AND NOT EXISTS (SELECT 1 FROM sequence WHERE agent = ?1)", (key,)
        )

    def purge(self, namespace: str, agent: str) -> Forgotten:
        """Delete an agent and every block without a sequence; return what was freed and what others still use.

        Blocks that cancelled or running requests left without a sequence have no known owner and may be the agent's, so
        they are freed too; an agent that still needs them stages them again. A row that does not verify may also be the
        agent's: it raises DamagedRow, so that it is repaired first. Reads all rows.
        """
        self._verify_all()
        note_traces(self._db)
        key = agent_key(namespace, agent, self._secret)
        hashes = [row[0] for row in self._db.execute(_AGENT_BLOCKS, (key,))]
        seals = {block_hash: self._tables.ids.sealed(self._block(block_hash)) for block_hash in hashes}
        self.delete(namespace, agent, None)
        self._release([row[0] for row in self._db.execute(_ORPHANS).fetchall()])
        gone = tuple(block_hash for block_hash in hashes if not self._block(block_hash))
        return Forgotten(key, gone, len(hashes) - len(gone), tuple(seal for each in gone for seal in seals[each]))

    def has_left(self, forgotten: Forgotten) -> str | None:
        """Describe the rows still left of a purged agent; None if there are none."""
        counts = {
            "its agent": "SELECT COUNT(*) FROM agent WHERE agent = ?",
            "its sequences": "SELECT COUNT(*) FROM sequence WHERE agent = ?",
            "its covers": "SELECT COUNT(*) FROM cover WHERE agent = ?",
        }
        left = [what for what, query in counts.items() if self._db.execute(query, (forgotten.key,)).fetchone()[0]]
        left += ["a block"] * any(self._block(block_hash) for block_hash in forgotten.hashes)
        left += ["blocks without a sequence"] * bool(self._db.execute(f"{_ORPHANS} LIMIT 1").fetchall())
        left += ["free pages"] * bool(self._db.execute("PRAGMA freelist_count").fetchone()[0])
        return ", ".join(left) or None

    def pin(self, namespace: str, agent: str, until: float) -> bool:
        """Keep the agent's blocks until that wall time; False if the agent is unknown."""
        key = agent_key(namespace, agent, self._secret)
        self._order.restate(self._heads(key, None))
        known = self._agent(key) is not None
        if known:
            self._tables.agent.replace(self._db, AgentRow(key, namespace, agent, until))
        return known

    def touch(self, uses: Mapping[BranchKey, float], now: float) -> None:
        """Record when branches were used; a later recorded use is kept unless it lies in the future."""
        for (namespace, agent, branch), last_use in uses.items():
            key = agent_key(namespace, agent, self._secret)
            for row in self._sequences(key, branch):
                if not last_use <= row.last_use <= now:
                    self._tables.sequence.replace(self._db, row._replace(last_use=last_use))
            self._order.restate(self._heads(key, branch))

    def clamp_future_uses(self, now: float) -> None:
        """Reset last uses that lie in the future, after a clock went back, to just before `now`."""
        with self.transaction():
            self._clamp_future_uses(now)

    def _clamp_future_uses(self, now: float) -> None:
        for row in self._tables.sequence.verified(self._db, "WHERE last_use > ?", now):
            self._tables.sequence.replace(self._db, row._replace(last_use=max(0.0, now - JUST_BEFORE_S)))

    def limit_namespaces(self, share: float) -> None:
        """Evict first from a namespace that has more than this share of the blocks."""
        self._order.limit_namespaces(share)

    def evict(self, is_short: Callable[[], bool], keep: Iterable[bytes], now: float) -> list[Shortened]:
        """Evict blocks while room `is_short`, children before parents, never one of `keep`; return shortened branches.

        A sequence that ended in an evicted block then ends in its parent.
        """
        shortened: dict[BranchKey, Shortened] = {}
        if self._order.is_outdated(now):
            self._clamp_future_uses(now)
        with self._order.holding(keep):
            while is_short():
                block_hash = self._order.next(now)
                if block_hash is None:
                    break
                rows = self._block(block_hash)
                if not rows:
                    raise DamagedRow("a block that is to be evicted has lost its rows")
                for cut in self._step_back(rows[0]):
                    shortened[cut.namespace, cut.agent, cut.branch] = cut
                self._remove(block_hash, rows)
        return list(shortened.values())

    def drop(self, block_hash: bytes) -> list[Shortened]:
        """Remove a block with all that follow it, in use or not; return the branches that end before it now."""
        shortened: dict[BranchKey, Shortened] = {}
        for (name,) in self._db.execute(DESCENDANTS, (block_hash,)).fetchall():
            rows = self._block(name)
            for cut in self._step_back(rows[0]):
                shortened[cut.namespace, cut.agent, cut.branch] = cut
            self._remove(name, rows)
        return list(shortened.values())

    def computed_from(self, by: int) -> int:
        """Note what computes blocks from now on, a number from 1 up; return the first row of a block that is its own.

        Rows are numbered upwards. A row that a repair brings back counts as new.
        """
        marks = {row.key: row.value for row in self._tables.meta.verified(self._db)}
        if marks.get("computed_by") == by and "computed_from" in marks:
            return marks["computed_from"]
        (last,) = self._db.execute("SELECT COALESCE(MAX(id), 0) FROM block").fetchone()
        with self.transaction():
            self.slots.set_meta({"computed_by": by, "computed_from": last + 1})
        return int(last) + 1

    def _step_back(self, block: BlockRow) -> list[Shortened]:
        """Move the sequences that end in a block to its parent; delete them if it has none."""
        shortened = []
        for row in self._tables.sequence.verified(self._db, "WHERE head = ?", block.name):
            owner = self._agent(row.agent)
            if owner is None:
                raise DamagedRow("the agent of a branch is missing")
            size = self._block_tokens
            left = (row.num_tokens - 1) // size * size if block.parent != block.root else 0
            if left:
                self._tables.sequence.replace(self._db, row.cut(block.parent, left))
            else:
                self._db.execute("DELETE FROM sequence WHERE agent = ? AND branch = ?", (row.agent, row.branch))
                self._covers.drop(row.agent, row.branch)
                self._forget_empty(row.agent)
            shortened.append(Shortened(owner.namespace, owner.id, row.branch, left))
        return shortened

    def repair(self, shards: Shards, now: float) -> Repaired:
        """Drop rows that do not verify and their dependents; recover blocks from their records. Needs a transaction.

        sqlite3.DatabaseError if the file itself is damaged.
        """
        done = RowRepair(self._db, self._tables, self._secret, shards, now).run()
        self.slots.freed += done.freed
        self.slots.reload()
        self.settle_covers()
        self._order.forget()
        self.damage.repaired(done.num_rows)
        return done

    def heads(self, records: Iterable[SequenceRecord]) -> list[bytes]:
        """Current head blocks of these branches."""
        keys = [(agent_key(record.namespace, record.agent, self._secret), record.branch) for record in records]
        return [head for key, branch in keys for head in self._heads(key, branch)]

    def check(self) -> None:
        """Assert that the order in memory matches the rows; the ledger must be idle."""
        self._order.check()

    def _heads(self, agent: bytes, branch: int | None) -> list[BlockHash]:
        return [row.head for row in self._sequences(agent, branch)]

    def _sequences(self, agent: bytes, branch: int | None) -> list[SequenceRow]:
        which, values = ("", ()) if branch is None else ("AND branch = ?", (branch,))
        return self._tables.sequence.verified(self._db, f"WHERE agent = ? {which}", agent, *values)

    def _agent(self, key: bytes) -> AgentRow | None:
        return next(iter(self._tables.agent.verified(self._db, "WHERE agent = ?", key)), None)

    def _block(self, block_hash: bytes) -> list[BlockRow]:
        return self._tables.block.verified(self._db, "WHERE name = ? ORDER BY part", block_hash)

    def _verify_all(self) -> None:
        """Raise DamagedRow unless every row that may concern an agent verifies; 3 s for a million blocks."""
        for table in self._tables.all:
            if not all(map(table.holds, table.rows(self._db))):
                raise DamagedRow(f"a row of {table.name}")
        for part in range(self._num_parts):
            if (problem := self.slots.differing(part)) is not None:
                raise DamagedRow(problem)

    def _release(self, heads: Iterable[bytes]) -> int:
        """Free unused blocks from these heads upwards; return the number of slots freed."""
        before = len(self.slots.freed)
        for block_hash in heads:
            while not self._in_use(block_hash):
                rows = self._block(block_hash)
                if not rows:
                    break
                self._remove(block_hash, rows)
                block_hash = rows[0].parent
            self._order.restate([block_hash])
        return len(self.slots.freed) - before

    def _remove(self, block_hash: bytes, rows: Sequence[BlockRow]) -> None:
        self._covers.drop_block(block_hash)
        self._db.execute("DELETE FROM block WHERE name = ?", (block_hash,))
        self.slots.free([(row.part, row.slot) for row in rows])
        self._order.remove(block_hash, rows[0].parent)

    def _in_use(self, block_hash: bytes) -> bool:
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM block WHERE part = 0 AND parent = ?1)"
            " OR EXISTS (SELECT 1 FROM sequence WHERE head = ?1)",
            (block_hash,),
        ).fetchone()
        return bool(row[0])
