"""How long slots live unused, and which is the next to expire.

Owns lifetimes that differ from the order's, and a queue of deadlines. A deadline is the last use plus the lifetime;
when it has come the slot is expired. Does not know the uses: `key_of` puts the deadline on top.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from rekindle.cache.eviction.queue import SlotQueue


class Lifetimes:
    """`ttl` for every slot that was given none of its own; infinity is for ever."""

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
        """Let the slot's entry count no more, because its deadline comes earlier; `num_slots` are here."""
        self.queue.drop(slot)
        self.queue.sweep(num_slots)

    def remove(self, slot: int, num_slots: int) -> None:
        self._own[slot] = 0.0
        self.drop(slot, num_slots)
