"""How long slots live unused, and which expires next.

Owns lifetimes that differ from the order's, and a queue of deadlines. A deadline is the last use plus the lifetime; a
slot is expired from then on. Does not know the uses: `key_of` puts the deadline in the sort key.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from rekindle.cache.eviction.queue import SlotQueue


class Lifetimes:
    """`ttl` for every slot without an individual one; infinity never expires."""

    def __init__(self, ttl: float, key_of: Callable[[int], int | None], size: int) -> None:
        self._ttl = ttl
        self._own = array("d")  # by slot; 0.0 for none
        self._marks = array("I")
        self.queue = SlotQueue(key_of, self._marks)
        self.grow(size)

    @property
    def nbytes(self) -> int:
        return (self._own.itemsize + self._marks.itemsize) * len(self._own) + self.queue.nbytes

    def grow(self, size: int) -> None:
        for column in (self._own, self._marks):
            column.frombytes(bytes(column.itemsize * (size - len(column))))

    def ttl(self, slot: int) -> float:
        return self._own[slot] or self._ttl

    def set_own(self, slot: int, ttl: float | None) -> None:
        self._own[slot] = ttl or 0.0

    def drop(self, slot: int, num_slots: int) -> None:
        """Invalidate the slot's entry because its deadline moved earlier; `num_slots` are present."""
        self.queue.drop(slot)
        self.queue.sweep(num_slots)

    def remove(self, slot: int, num_slots: int) -> None:
        self._own[slot] = 0.0
        self.drop(slot, num_slots)
