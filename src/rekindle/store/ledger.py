"""All changes of the index: slots handed out, rows added, sequences moved, what nobody uses any more freed.

Owns the writing connection and the free slots; only the writer thread calls it. Every change happens inside one
`transaction`, which either is durable as a whole or never was.

A block is in use while it has a child or is the head of a sequence. Whoever takes the last use away frees the block and
goes on with its parent, so counts are never stored and a shared prefix is freed with its last user.

    slots of a part   0 ........................ num_slots ........     below the mark: in a row of `block` or of `free`
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rekindle.cache.hashing import BlockHash, TokenIds, id_bytes
from rekindle.store.index import Index, agent_key, packed
from rekindle.store.values import SequenceRecord

Slot = tuple[int, int]  # part, slot


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

    def __init__(self, index: Index, secret: bytes) -> None:
        self._db = index.writer
        self._secret = secret
        self._num_parts = index.num_parts
        self.num_slots = [0] * self._num_parts
        self.num_free = [0] * self._num_parts
        self._freed: list[Slot] = []
        self._reload()

    def _reload(self) -> None:
        marks = dict(self._db.execute("SELECT key, value FROM meta"))
        self.num_slots = [marks.get(f"num_slots.{part}", 0) for part in range(self._num_parts)]
        if not all(isinstance(mark, int) for mark in self.num_slots):
            raise ValueError(f"marks of slots are {self.num_slots}")
        free = dict(self._db.execute("SELECT part, COUNT(*) FROM free GROUP BY part"))
        self.num_free = [free.get(part, 0) for part in range(self._num_parts)]

    def num_used(self, part: int) -> int:
        """Slots of a part that hold a block."""
        return self.num_slots[part] - self.num_free[part]

    @contextmanager
    def transaction(self) -> Iterator[list[Slot]]:
        """One durable change. Yields the list of slots it frees, to be punched and reused only after it."""
        self._freed = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._freed
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._reload()
            raise

    def set_meta(self, values: Mapping[str, int]) -> None:
        """Write settings or marks."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def has(self, name: BlockHash) -> bool:
        """Whether the block is there with all its parts."""
        row = self._db.execute("SELECT COUNT(*) FROM block WHERE name = ?", (name,)).fetchone()
        return bool(row[0] == self._num_parts)

    def slots(self, part: int, count: int) -> list[int]:
        """The slots of a part that the next `count` blocks go to, lowest first. `add` takes them, in this order."""
        query = "SELECT slot FROM free WHERE part = ? ORDER BY slot LIMIT ?"
        free = [row[0] for row in self._db.execute(query, (part, count))]
        return free + [self.num_slots[part] + number for number in range(count - len(free))]

    def extend(self, part: int, num_slots: int) -> None:
        """Raise the mark of a part to `num_slots`; the slots it passes are free."""
        for slot in range(self.num_slots[part], num_slots):
            self._db.execute("INSERT INTO free VALUES (?, ?)", (part, slot))
            self.num_free[part] += 1
        self._mark(part, max(self.num_slots[part], num_slots))

    def add(self, rows: Iterable[BlockRow], now: float) -> None:
        """Take the slots of these blocks and enter them; a block that is there already moves to its new slots."""
        for row in rows:
            before = self._db.execute("SELECT part, slot FROM block WHERE name = ?", (row.name,)).fetchall()
            self._db.execute("DELETE FROM block WHERE name = ?", (row.name,))
            for part, (slot, crc) in enumerate(zip(row.slots, row.crcs, strict=True)):
                self._take(part, slot)
                self._db.execute(
                    "INSERT INTO block(name, part, parent, root, slot, num_tokens, ids, crc, last_use)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (row.name, part, row.parent, row.root, slot, len(row.ids), id_bytes(row.ids), crc, now),
                )
            self._free(before)

    def move(self, records: Sequence[SequenceRecord]) -> None:
        """Let each branch end in its new head, then free what only their old heads used."""
        heads = []
        for record in records:
            agent = agent_key(record.namespace, record.agent, self._secret)
            heads += self._heads(agent, record.branch)
            self._db.execute("INSERT OR IGNORE INTO agent VALUES (?, ?, ?)", (agent, record.namespace, record.agent))
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
        self._db.execute(
            "DELETE FROM agent WHERE agent = ?1 AND NOT EXISTS (SELECT 1 FROM sequence WHERE agent = ?1)", (key,)
        )
        return self._release(heads)

    def _heads(self, agent: bytes, branch: int | None) -> list[bytes]:
        query = "SELECT head FROM sequence WHERE agent = ?1 AND (?2 IS NULL OR branch = ?2)"
        return [row[0] for row in self._db.execute(query, (agent, branch))]

    def _release(self, heads: Iterable[bytes]) -> int:
        """Free blocks from these heads upwards as long as nobody uses them; return the slots freed."""
        before = len(self._freed)
        for name in heads:
            while not self._in_use(name):
                rows = self._db.execute("SELECT part, slot, parent FROM block WHERE name = ?", (name,)).fetchall()
                if not rows:
                    break
                self._db.execute("DELETE FROM block WHERE name = ?", (name,))
                self._free([row[:2] for row in rows])
                name = rows[0][2]
        return len(self._freed) - before

    def _in_use(self, name: bytes) -> bool:
        row = self._db.execute(
            "SELECT EXISTS (SELECT 1 FROM block WHERE part = 0 AND parent = ?1)"
            " OR EXISTS (SELECT 1 FROM sequence WHERE head = ?1)",
            (name,),
        ).fetchone()
        return bool(row[0])

    def _take(self, part: int, slot: int) -> None:
        if slot < self.num_slots[part]:
            taken = self._db.execute("DELETE FROM free WHERE part = ? AND slot = ?", (part, slot)).rowcount
            assert taken == 1, f"slot {slot} of part {part} was not free"
            self.num_free[part] -= 1
            return
        assert slot == self.num_slots[part], f"slot {slot} of part {part} leaves a gap after {self.num_slots[part]}"
        self._mark(part, slot + 1)

    def _mark(self, part: int, num_slots: int) -> None:
        self.num_slots[part] = num_slots
        self.set_meta({f"num_slots.{part}": num_slots})

    def _free(self, slots: Sequence[Slot]) -> None:
        for part, slot in slots:
            self._db.execute("INSERT INTO free VALUES (?, ?)", (part, slot))
            self.num_free[part] += 1
            self._freed.append((part, slot))
