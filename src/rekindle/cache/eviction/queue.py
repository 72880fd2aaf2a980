"""Slots in the order of their keys, which mostly grow: a use moves nothing, a slot is put right when it comes first.

Owns at most one entry a slot that counts, marked in `marks`; several queues share them if each slot is in one of them
only. Does not know what a key means: it asks for it.
Invariants: the entry that counts is not greater than the slot's key; whoever lowers a key calls `drop` and `put`. The
run is sorted.

An entry is one int, key above and slot below, and nothing else (48 bytes). What comes in order is appended to the run,
all else goes to a heap: uses in the order of time never touch the heap, and what leaves a chain from its end finds it
nearly empty. A use of a slot that is queued costs nothing here; taking pays for all of them at once.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from struct import Struct

SLOT_BITS = 32
MIN_SWEEP = 16  # few: there is a queue for each group with a quota
ENTRY_BYTES = 48  # of an int of 150 to 180 bits
_SLOT, _MARK = (1 << SLOT_BITS) - 1, (1 << 32) - 1
_UNSIGNED = ((1 << 63) - 1) << 96  # of the priority, where it stands in a key
_pack = Struct(">HdQI").pack  # one call and one int: a third of the time that shifts take


def sort_key(rank: int, priority: float, turn: int, slot: int) -> int:
    """Return an int that sorts as (rank, priority, turn, slot): rank < 2^16, turn odd and < 2^64, slot < 2^32.

    The bits of a float grow with its size and have the sign on top: those of the negative sort as positive priorities
    should, and inverted as negative ones.
    """
    key = int.from_bytes(_pack(rank, -(priority + 0.0), turn, slot), "big")  # -0.0 is as 0.0
    return key if priority >= 0.0 else key ^ _UNSIGNED


class SlotQueue:
    """Slots by `key_of(slot)`; None stands for a slot that may not leave now and is put again when it may."""

    def __init__(self, key_of: Callable[[int], int | None], marks: array[int]) -> None:
        self._key_of = key_of
        self._marks = marks  # by slot: low bits of its entry's turn, which is odd; 0 without an entry
        self._run: deque[int] = deque()
        self._heap: list[int] = []

    def __len__(self) -> int:
        """Entries, with those that do not count."""
        return len(self._run) + len(self._heap)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries; `marks` are the owner's."""
        return sys.getsizeof(self._run) + sys.getsizeof(self._heap) + ENTRY_BYTES * len(self)

    def put(self, slot: int) -> None:
        """Queue a slot that may leave; nothing happens to one that is queued or may not."""
        if not self._marks[slot]:
            entry = self._key_of(slot)
            if entry is not None:
                self._insert(slot, entry)

    def drop(self, slot: int) -> None:
        """Let the slot's entry count no more."""
        self._marks[slot] = 0

    def first(self) -> int | None:
        """Return the slot with the smallest key, which stays; None when no slot may leave."""
        entry = self._take_first()
        if entry is None:
            return None
        self._run.appendleft(entry)  # it is smaller than all others
        return entry & _SLOT

    def take(self) -> int | None:
        """Take out and return the slot with the smallest key; None when no slot may leave."""
        entry = self._take_first()
        if entry is None:
            return None
        slot = entry & _SLOT
        self._marks[slot] = 0
        return slot

    def sweep(self, num_slots: int) -> None:
        """Take out the entries that do not count, once they outnumber half the slots."""
        if len(self._run) + len(self._heap) > MIN_SWEEP + num_slots + num_slots // 2:
            self._run = deque(entry for entry in self._run if self._counts(entry))
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def check(self, free: set[int]) -> None:
        """Assert that each of `free`, which may leave, has an entry that counts and is not above its key."""
        least: dict[int, int] = {}
        for entry in (*self._run, *self._heap):
            if self._counts(entry):
                slot = entry & _SLOT
                least[slot] = min(entry, least.get(slot, entry))
        missing = sorted(free - set(least))
        assert not missing, f"slots {missing[:5]} may leave and are not queued"
        for slot in free:
            now = self._key_of(slot)
            assert now is not None and least[slot] <= now, f"slot {slot} is queued behind its key"
        assert all(first < second for first, second in pairwise(self._run)), "the run is not sorted"

    def _take_first(self) -> int | None:
        """Put right what comes first until that is a key, take this entry out and return it; its mark stays."""
        run, heap, marks = self._run, self._heap, self._marks
        while run or heap:
            entry = heapq.heappop(heap) if heap and not (run and run[0] <= heap[0]) else run.popleft()
            slot = entry & _SLOT
            if marks[slot] != entry >> SLOT_BITS & _MARK:
                continue
            now = self._key_of(slot)
            if now == entry:
                return entry
            if now is None:
                marks[slot] = 0
            else:
                self._insert(slot, now)
        return None

    def _insert(self, slot: int, entry: int) -> None:
        self._marks[slot] = entry >> SLOT_BITS & _MARK
        if not self._run or entry > self._run[-1]:
            self._run.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def _counts(self, entry: int) -> bool:
        return self._marks[entry & _SLOT] == entry >> SLOT_BITS & _MARK
