"""Which slots of each part are free: the rows of `free`, the high-water marks in `meta`, and their counts in memory.

    slots of a part   0 ........................ num_slots ........     below the mark: in a row of `block` or of `free`

Used only by the ledger, inside its transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from rekindle.store.rows.schema import FreeRow, IndexTables, MetaRow

Slot = tuple[int, int]  # part, slot


class SlotTable:
    """Slot bookkeeping: `num_slots` and `num_free` per part match the rows; `freed` are slots freed since `begin`."""

    def __init__(self, db: sqlite3.Connection, num_parts: int, tables: IndexTables) -> None:
        self._db = db
        self._tables = tables
        self._num_parts = num_parts
        self.num_slots = [0] * num_parts
        self.num_free = [0] * num_parts
        self.freed: list[Slot] = []
        self._before = (self.num_slots, self.num_free)
        self.reload()

    def reload(self) -> None:
        """Reload the counts from the rows; a mark that is missing or does not verify keeps its value."""
        marks = {row.key: row.value for row in self._tables.meta.rows(self._db) if self._tables.meta.holds(row)}
        self.num_slots = [marks.get(f"num_slots.{part}", self.num_slots[part]) for part in range(self._num_parts)]
        free = dict(self._db.execute("SELECT part, COUNT(*) FROM free GROUP BY part"))
        self.num_free = [free.get(part, 0) for part in range(self._num_parts)]

    def begin(self) -> list[Slot]:
        """Begin a transaction; return its new list of freed slots."""
        self.freed = []
        self._before = (list(self.num_slots), list(self.num_free))
        return self.freed

    def roll_back(self) -> None:
        """Restore the counts from `begin`; a mark that had no row yet cannot be reloaded from the rows."""
        self.num_slots, self.num_free = self._before

    def num_used(self, part: int) -> int:
        """Slots of a part that hold a block."""
        return self.num_slots[part] - self.num_free[part]

    def next(self, part: int, count: int) -> list[int]:
        """The slots of a part for the next `count` blocks, lowest first; they must be taken in this order."""
        rows = self._tables.free.verified(self._db, "WHERE part = ? ORDER BY slot LIMIT ?", part, count)
        free = [row.slot for row in rows]
        return free + [self.num_slots[part] + number for number in range(count - len(free))]

    def used(self, part: int) -> set[int]:
        """All slots of a part that hold a block."""
        return {row[0] for row in self._db.execute("SELECT slot FROM block WHERE part = ?", (part,))}

    def extend(self, part: int, num_slots: int) -> None:
        """Raise the mark of a part to `num_slots`; the slots in between become free."""
        for slot in range(self.num_slots[part], num_slots):
            self._put_free(part, slot)
        self._mark(part, max(self.num_slots[part], num_slots))

    def take(self, part: int, slot: int) -> None:
        """Mark a slot as holding a block: a free one, or the first above the mark."""
        if slot < self.num_slots[part]:
            taken = self._db.execute("DELETE FROM free WHERE part = ? AND slot = ?", (part, slot)).rowcount
            assert taken == 1, f"slot {slot} of part {part} was not free"
            self.num_free[part] -= 1
            return
        assert slot == self.num_slots[part], f"slot {slot} of part {part} leaves a gap after {self.num_slots[part]}"
        self._mark(part, slot + 1)

    def free(self, slots: Sequence[Slot]) -> None:
        """Mark slots as free."""
        for part, slot in slots:
            self._put_free(part, slot)
            self.freed.append((part, slot))

    def set_meta(self, values: Mapping[str, int]) -> None:
        """Write settings or marks."""
        self._tables.meta.replace(self._db, *(MetaRow(key, value) for key, value in values.items()))

    def beyond(self, part: int) -> str | None:
        """Describe damage to the mark of a part: a block beyond it would be overwritten. One lookup."""
        (last,) = self._db.execute("SELECT MAX(slot) FROM block WHERE part = ?", (part,)).fetchone()
        is_beyond = last is not None and (not isinstance(last, int) or last >= self.num_slots[part])
        return f"slot {last} of part {part} lies beyond the mark of {self.num_slots[part]}" if is_beyond else None

    def differing(self, part: int) -> str | None:
        """Describe damaged or lost slot rows of a part; None if the numbers add up. One scan."""
        num_slots = self.num_slots[part]
        num_used, used = self._counted("block", part)
        num_free, free = self._counted("free", part)
        if num_used + num_free == num_slots and used + free == num_slots * (num_slots - 1) // 2:
            return None
        return f"{num_used} used and {num_free} free slots of part {part} are not those below {num_slots}"

    def _counted(self, table: str, part: int) -> tuple[int, int]:
        """Number of slots of a part in the table, and their sum."""
        query = f"SELECT COUNT(*), COALESCE(SUM(slot), 0) FROM {table} WHERE part = ?"
        count, total = self._db.execute(query, (part,)).fetchone()
        return count, total

    def _put_free(self, part: int, slot: int) -> None:
        self._tables.free.insert(self._db, FreeRow(part, slot))
        self.num_free[part] += 1

    def _mark(self, part: int, num_slots: int) -> None:
        self.num_slots[part] = num_slots
        self.set_meta({f"num_slots.{part}": num_slots})
