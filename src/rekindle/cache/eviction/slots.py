"""Slots in columns: which are present, which are held, and each one's parent and last use.

Owns the columns that the order fills. Slots are small numbers chosen by the owner of a tier, such as a block's index.
Does not know what is evicted next.
Invariant: `_children` of a number counts the present slots whose parent it is, whether it is present or not.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from typing import cast

import numpy as np

HERE, HELD, KEPT, AWAITED, EARLY, DEMOTED = 1, 2, 4, 8, 16, 32  # bits of a state; 0 is not present
NEVER = -math.inf  # the last use of an unused slot


def _level(state: int) -> int:
    """The part of the sort key above the rank, which is below 256."""
    for mark, level in ((DEMOTED, 0), (KEPT, 4), (EARLY, 1), (AWAITED, 3)):
        if state & mark:
            return level << 8
    return 2 << 8


LEVELS = tuple(_level(state) for state in range(64))


def finite(now: float) -> float:
    """Return the time; ValueError for infinity and NaN, which cannot be ordered."""
    if not NEVER < now < math.inf:
        raise ValueError(f"the time is {now}: a clock shows finite numbers")
    return now


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
        self.num_held = 0
        self._len = 0
        self._state, self._rank = bytearray(capacity), bytearray(capacity)
        self._above, self._children = counts(capacity), counts(capacity)  # parent + 1, 0 for none; how many
        self._marks = counts(capacity)  # of the order's queue
        self._turns, self._last_use = _turns_of(capacity), _times(capacity)

    def __len__(self) -> int:
        return self._len

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._state) and bool(self._state[slot])

    @property
    def num_idle(self) -> int:
        """Number of slots not held; those with children present can be evicted only after them."""
        return self._len - self.num_held

    @property
    def nbytes(self) -> int:
        columns = (*self._columns(), self._state, self._rank)
        return sum(sys.getsizeof(column) for column in columns) + self._turns.nbytes + self._last_use.nbytes

    def is_leaf(self, slot: int) -> bool:
        """Return whether no present slot has `slot` as its parent."""
        return slot >= len(self._children) or not self._children[slot]

    def is_held(self, slot: int) -> bool:
        return bool(self._state[slot] & HELD)

    def parent(self, slot: int) -> int:
        """Return the parent, present or not, of a slot that is present or was the last with its number; -1 for none."""
        return self._above[slot] - 1

    def last_use(self, slot: int) -> float | None:
        """Time of the last use; None before the first."""
        last_use = self._last_use[slot]
        return last_use if last_use > NEVER else None

    def hold(self, slot: int) -> None:
        """Protect the slot from eviction; holding twice is one hold."""
        state = self._state[slot]
        assert state, f"slot {slot} is not present"
        if not state & HELD:
            self._state[slot] = state | HELD
            self.num_held += 1

    def check(self) -> None:
        """Assert that the counts match recomputed ones."""
        here = self._all()
        held = sum(self._state[slot] & HELD == HELD for slot in here)
        assert len(here) == self._len, f"{len(here)} slots are present, {self._len} are counted"
        assert held == self.num_held, f"num_held is {self.num_held}, {held} are held"
        children = Counter(self._above[slot] - 1 for slot in here if self._above[slot])
        stored = {slot: num for slot, num in enumerate(self._children) if num}
        assert children == stored, f"children: stored {stored}, recomputed {dict(children)}"

    def _enter(self, slot: int, parent: int) -> None:
        if slot >= len(self._state) or parent >= len(self._state):
            self._grow(max(slot, parent) + 1)
        assert not self._state[slot], f"slot {slot} is already present"
        self._state[slot] = HERE | HELD
        self._len += 1
        self.num_held += 1
        self._above[slot] = parent + 1
        if parent >= 0:
            self._children[parent] += 1

    def _unhold(self, slot: int, state: int, rank: int) -> None:
        if state & HELD:
            self._state[slot] = state & ~HELD
            self.num_held -= 1
        self._rank[slot] = rank

    def _all(self) -> list[int]:
        return [slot for slot, state in enumerate(self._state) if state]

    def _columns(self) -> tuple[array[int] | array[float], ...]:
        return self._above, self._children, self._marks

    def _grow(self, size: int) -> None:
        """Make room for slots below `size`."""
        if size <= len(self._state):
            return
        size = max(size, len(self._state) + len(self._state) // 2)
        turns, times = _turns_of(size), _times(size)
        turns[: len(self._turns)], times[: len(self._turns)] = self._turns, self._last_use
        self._turns, self._last_use = turns, times
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * (size - len(column))))
        self._rank.extend(bytes(size - len(self._rank)))
        self._state.extend(bytes(size - len(self._state)))
