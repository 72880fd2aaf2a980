"""Slots in columns: which are present, which are held, and each one's parent and last use.

Owns the columns, which the order reads and writes. Slots are small numbers chosen by the owner of a tier, such as a
block's index. Does not know what is evicted next.
Invariant: `children` of a number counts the present slots whose parent it is, whether it is present or not.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from typing import cast

import numpy as np

HERE, HELD, DEMOTED = 1, 2, 4  # bits of a state; 0 is not present
NEVER = -math.inf  # the last use of an unused slot


def counts(size: int) -> array[int]:
    """A column of zeros up to 2^32 - 1."""
    return array("I", [0]) * size


def _turns_of(size: int) -> memoryview[int]:
    return np.zeros(size, np.uint64).data


def _times(size: int) -> memoryview[float]:
    """Last uses, all NEVER. For a million random reads and writes, numpy takes two thirds of `array`'s time."""
    return cast("memoryview[float]", np.full(size, NEVER, np.float64).data)


class Slots:
    """Columns of `capacity` slots, 30 bytes per slot; they grow by half when a number exceeds them."""

    def __init__(self, capacity: int) -> None:
        self.num_slots = self.num_held = 0
        self.state, self.rank = bytearray(capacity), bytearray(capacity)
        self.above, self.children = counts(capacity), counts(capacity)  # parent + 1, 0 for none; how many
        self.marks = counts(capacity)  # of the order's queue
        self.turns, self.last_use = _turns_of(capacity), _times(capacity)

    @property
    def nbytes(self) -> int:
        columns = (self.above, self.children, self.marks, self.state, self.rank)
        return sum(sys.getsizeof(column) for column in columns) + self.turns.nbytes + self.last_use.nbytes

    def state_of(self, slot: int) -> int:
        """Return the state of a slot that must be present."""
        state = self.state[slot]
        assert state, f"slot {slot} is not present"
        return state

    def all(self) -> list[int]:
        """Return the present slots."""
        return [slot for slot, state in enumerate(self.state) if state]

    def enter(self, slot: int, parent: int) -> None:
        """Add a slot, held; the columns must reach it and its parent."""
        assert not self.state[slot], f"slot {slot} is already present"
        self.state[slot] = HERE | HELD
        self.num_slots += 1
        self.num_held += 1
        self.above[slot] = parent + 1
        if parent >= 0:
            self.children[parent] += 1

    def leave(self, slot: int) -> int:
        """Remove a slot; return its parent if that is present and has no other child, else -1."""
        self.num_held -= self.state_of(slot) & HELD == HELD
        self.num_slots -= 1
        self.state[slot] = self.rank[slot] = self.marks[slot] = 0
        self.last_use[slot] = NEVER
        parent = self.above[slot] - 1
        if parent < 0:
            return -1
        self.children[parent] -= 1
        return parent if self.state[parent] and not self.children[parent] else -1

    def hold(self, slot: int) -> None:
        state = self.state_of(slot)
        if not state & HELD:
            self.state[slot] = state | HELD
            self.num_held += 1

    def unhold(self, slot: int, rank: int) -> bool:
        """Make the slot evictable at this rank; return whether it was queued at a later one."""
        state, before = self.state_of(slot), self.rank[slot]
        if state & HELD:
            self.state[slot] = state & ~HELD
            self.num_held -= 1
        self.rank[slot] = rank
        return rank < before

    def grow(self, size: int) -> None:
        """Make room for slots below `size`."""
        if size <= len(self.state):
            return
        size = max(size, len(self.state) + len(self.state) // 2)
        turns, times = _turns_of(size), _times(size)
        turns[: len(self.turns)], times[: len(self.turns)] = self.turns, self.last_use
        self.turns, self.last_use = turns, times
        for column in (self.above, self.children, self.marks):
            column.frombytes(bytes(column.itemsize * (size - len(column))))
        self.rank.extend(bytes(size - len(self.rank)))
        self.state.extend(bytes(size - len(self.state)))

    def check(self) -> None:
        """Assert that the counts match recomputed ones."""
        here = self.all()
        held = sum(self.state[slot] & HELD == HELD for slot in here)
        assert len(here) == self.num_slots, f"{len(here)} slots are present, {self.num_slots} are counted"
        assert held == self.num_held, f"num_held is {self.num_held}, {held} are held"
        children = Counter(self.above[slot] - 1 for slot in here if self.above[slot])
        stored = {slot: num for slot, num in enumerate(self.children) if num}
        assert children == stored, f"children: stored {stored}, recomputed {dict(children)}"
