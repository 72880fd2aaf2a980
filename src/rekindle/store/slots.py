"""Which slots of each part are free: the rows of `free`, the marks in `meta`, and their counts in memory.

    slots of a part   0 ........................ num_slots ........     below the mark: in a row of `block` or of `free`

Used by the ledger alone, inside its transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

Slot = tuple[int, int]  # part, slot


class SlotTable:
    """`num_slots` and `num_free` per part are those of the rows; `freed` are the slots freed since `begin`."""

    def __init__(self, db: sqlite3.Connection, num_parts: int) -> None:
        self._db = db
        self._num_parts = num_parts
        self.num_slots = [0] * num_parts
        self.num_free = [0] * num_parts
        self.freed: list[Slot] = []
        self.reload()

    def reload(self) -> None:
        """Take the counts from the rows."""
        marks = dict(self._db.execute("SELECT key, value FROM meta"))
        self.num_slots = [marks.get(f"num_slots.{part}", 0) for part in range(self._num_parts)]
        if not all(isinstance(mark, int) for mark in self.num_slots):
            raise ValueError(f"marks of slots are {self.num_slots}")
        free = dict(self._db.execute("SELECT part, COUNT(*) FROM free GROUP BY part"))
        self.num_free = [free.get(part, 0) for part in range(self._num_parts)]

    def begin(self) -> list[Slot]:
        """Begin a new list of freed slots."""
        self.freed = []
        return self.freed

    def num_used(self, part: int) -> int:
        """Slots of a part that hold a block."""
        return self.num_slots[part] - self.num_free[part]

    def next(self, part: int, count: int) -> list[int]:
        """The slots of a part that the next `count` blocks go to, lowest first; they are to be taken in this order."""
        query = "SELECT slot FROM free WHERE part = ? ORDER BY slot LIMIT ?"
        free = [row[0] for row in self._db.execute(query, (part, count))]
        return free + [self.num_slots[part] + number for number in range(count - len(free))]

    def used(self, part: int) -> set[int]:
        """All slots of a part that hold a block."""
        return {row[0] for row in self._db.execute("SELECT slot FROM block WHERE part = ?", (part,))}

    def extend(self, part: int, num_slots: int) -> None:
        """Raise the mark of a part to `num_slots`; the slots it passes are free."""
        for slot in range(self.num_slots[part], num_slots):
            self._db.execute("INSERT INTO free VALUES (?, ?)", (part, slot))
            self.num_free[part] += 1
        self._mark(part, max(self.num_slots[part], num_slots))

    def take(self, part: int, slot: int) -> None:
        """A block goes there."""
        if slot < self.num_slots[part]:
            taken = self._db.execute("DELETE FROM free WHERE part = ? AND slot = ?", (part, slot)).rowcount
            assert taken == 1, f"slot {slot} of part {part} was not free"
            self.num_free[part] -= 1
            return
        assert slot == self.num_slots[part], f"slot {slot} of part {part} leaves a gap after {self.num_slots[part]}"
        self._mark(part, slot + 1)

    def free(self, slots: Sequence[Slot]) -> None:
        """Blocks left these."""
        for part, slot in slots:
            self._db.execute("INSERT INTO free VALUES (?, ?)", (part, slot))
            self.num_free[part] += 1
            self.freed.append((part, slot))

    def set_meta(self, values: Mapping[str, int]) -> None:
        """Write settings or marks."""
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def _mark(self, part: int, num_slots: int) -> None:
        self.num_slots[part] = num_slots
        self.set_meta({f"num_slots.{part}": num_slots})
