"""Soft limits on how much of a tier each group may have: they only decide what is evicted first.

Owns groups of slots, their counts and limits, and a queue for each group with a limit. Invariant: a group is over its
quota exactly when it is in `_over`; the group that exceeded its quota first is evicted from first.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from rekindle.cache.eviction.queue import SlotQueue


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
