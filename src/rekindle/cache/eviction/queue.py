"""A lazy priority queue of slots, and quotas of groups, which have one each.

The keys of slots mostly grow: a slot is repositioned only when it reaches the front.

Owns at most one valid entry per slot, marked in `marks`; queues may share `marks` if each slot is in only one of them.
Does not know what a key means: it calls `key_of`.
Invariants: a valid entry is not greater than its slot's key; code that lowers a key calls `drop` and `put`. The run is
sorted.

An entry is a single int, key above and slot below (48 bytes). Entries that arrive in order are appended to the run, all
others go to a heap: uses in time order never touch the heap, and evicting a chain from its end finds it nearly empty. A
use of a queued slot costs nothing here; `take` pays for all of them at once.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import pairwise
from struct import Struct

SLOT_BITS = 32
MIN_SWEEP = 16  # small: there is a queue for each group with a quota
ENTRY_BYTES = 48  # of an int of 150 to 180 bits
_SLOT, _MARK = (1 << SLOT_BITS) - 1, (1 << 32) - 1
_UNSIGNED = ((1 << 63) - 1) << 96  # mask of the priority's bits in a key, without the sign
_pack = Struct(">HdQI").pack  # one call and one int: a third of the time of shifting


def sort_key(rank: int, priority: float, turn: int, slot: int) -> int:
    """Return an int that sorts as (rank, priority, turn, slot): rank < 2^16, turn odd and < 2^64, slot < 2^32.

    The bits of a float grow with its magnitude, with the sign on top: the bits of the negated priority sort correctly
    for positive priorities, and with all but the sign inverted for negative ones.
    """
    key = int.from_bytes(_pack(rank, -(priority + 0.0), turn, slot), "big")  # -0.0 is treated as 0.0
    return key if priority >= 0.0 else key ^ _UNSIGNED


class SlotQueue:
    """Slots by `key_of(slot)`; None means not evictable now, and the slot is put again when it is."""

    def __init__(self, key_of: Callable[[int], int | None], marks: array[int]) -> None:
        self._key_of = key_of
        self._marks = marks  # by slot: low bits of its entry's turn, which is odd; 0 without an entry
        self._run: deque[int] = deque()
        self._heap: list[int] = []

    def __len__(self) -> int:
        """Number of entries, including invalid ones."""
        return len(self._run) + len(self._heap)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries; `marks` belong to the owner."""
        return sys.getsizeof(self._run) + sys.getsizeof(self._heap) + ENTRY_BYTES * len(self)

    def put(self, slot: int) -> None:
        """Queue an evictable slot; no effect if it is queued or not evictable."""
        if not self._marks[slot]:
            entry = self._key_of(slot)
            if entry is not None:
                self._insert(slot, entry)

    def drop(self, slot: int) -> None:
        """Invalidate the slot's entry."""
        self._marks[slot] = 0

    def first(self) -> int | None:
        """Return the slot with the smallest key without removing it; None if no slot is evictable."""
        entry = self._take_first()
        if entry is None:
            return None
        self._run.appendleft(entry)  # it is smaller than all others
        return entry & _SLOT

    def take(self) -> int | None:
        """Remove and return the slot with the smallest key; None if no slot is evictable."""
        entry = self._take_first()
        if entry is None:
            return None
        slot = entry & _SLOT
        self._marks[slot] = 0
        return slot

    def sweep(self, num_slots: int) -> None:
        """Remove invalid entries once they outnumber half the slots."""
        if len(self._run) + len(self._heap) > MIN_SWEEP + num_slots + num_slots // 2:
            self._run = deque(entry for entry in self._run if self._counts(entry))
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)

    def check(self, free: set[int]) -> None:
        """Assert that each evictable slot in `free` has a valid entry not above its key."""
        least: dict[int, int] = {}
        for entry in (*self._run, *self._heap):
            if self._counts(entry):
                slot = entry & _SLOT
                least[slot] = min(entry, least.get(slot, entry))
        missing = sorted(free - set(least))
        assert not missing, f"slots {missing[:5]} are evictable and not queued"
        for slot in free:
            now = self._key_of(slot)
            assert now is not None and least[slot] <= now, f"slot {slot} is queued after its key"
        assert all(first < second for first, second in pairwise(self._run)), "the run is not sorted"

    def _take_first(self) -> int | None:
        """Reposition front entries until one equals its slot's key; remove and return it, keeping its mark."""
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


# Soft limits on how much of a tier each group may have: they only decide what is evicted first.
#
# Owns groups of slots, their counts and limits, and a queue for each group with a limit. Invariant: a group is over its
# quota exactly when it is in `_over`; the group that exceeded its quota first is evicted from first.


class Quotas:
    """Groups by number. Of the slots below `size`, `num_slots` are already present, all in group 0."""

    def __init__(self, key_of: Callable[[int], int | None], size: int, num_slots: int) -> None:
        self._key_of = key_of
        self._group = array("i")  # by slot
        self._marks = array("I")  # by slot; of its group's queue
        self._num = Counter({0: num_slots})
        self._most: dict[int, int] = {}
        self._queues: dict[int, SlotQueue] = {}
        self._over: dict[int, None] = {}  # in the order in which they exceeded their quotas
        self.grow(size)

    @property
    def nbytes(self) -> int:
        columns = (self._group.itemsize + self._marks.itemsize) * len(self._group)
        return columns + sum(queue.nbytes for queue in self._queues.values())

    def grow(self, size: int) -> None:
        for column in (self._group, self._marks):
            column.frombytes(bytes(column.itemsize * (size - len(column))))

    def group(self, slot: int) -> int:
        return self._group[slot]

    def add(self, slot: int, group: int) -> None:
        self._group[slot] = group
        self._num[group] += 1
        self._weigh(group)

    def remove(self, slot: int) -> None:
        group = self._group[slot]
        self._num[group] -= 1
        self.drop(slot)
        self._group[slot] = 0
        self._weigh(group)

    def limit(self, group: int, most: int | None, slots: Callable[[], Iterable[int]]) -> None:
        """Set or lift the quota of a group; `slots()`, all slots of the order, is called only if the group has some."""
        if most is None:
            self._most.pop(group, None)
            if self._queues.pop(group, None) is not None:
                for slot in self._members(group, slots):
                    self._marks[slot] = 0
        else:
            self._most[group] = most
            if group not in self._queues:
                self._queues[group] = SlotQueue(self._key_of, self._marks)
                for slot in self._members(group, slots):
                    self.put(slot)
        self._weigh(group)

    def put(self, slot: int) -> None:
        queue = self._queues.get(self._group[slot])
        if queue is not None:
            queue.put(slot)

    def drop(self, slot: int) -> None:
        """Invalidate the slot's entry; only its own group's queue may then need a sweep."""
        self._marks[slot] = 0
        group = self._group[slot]
        queue = self._queues.get(group)
        if queue is not None:
            queue.sweep(self._num[group])

    def first(self) -> int | None:
        """Return the slot to evict first from a group over its quota; None if there is none."""
        for group in self._over:
            slot = self._queues[group].first()
            if slot is not None:
                return slot
        return None

    def check(self, slots: Iterable[int], free: set[int]) -> None:
        num = Counter(self._group[slot] for slot in slots)
        assert num == +self._num, f"groups of {dict(num)} slots are counted as {dict(self._num)}"
        over = {group for group, most in self._most.items() if num[group] > most}
        assert over == set(self._over), f"groups {over} are over their quotas, {set(self._over)} are noted"
        for group, queue in self._queues.items():
            queue.check({slot for slot in free if self._group[slot] == group})

    def _members(self, group: int, slots: Callable[[], Iterable[int]]) -> list[int]:
        return [slot for slot in slots() if self._group[slot] == group] if self._num[group] else []

    def _weigh(self, group: int) -> None:
        if group in self._most and self._num[group] > self._most[group]:
            self._over.setdefault(group)
        else:
            self._over.pop(group, None)
