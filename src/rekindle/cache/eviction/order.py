"""The eviction order of a tier: least recently used first, and a parent only after its children.

Owns which of its slots is evicted next. Does not know what a slot represents, nor the time: `now` is passed in, in any
unit.
Invariants: only a slot that is neither held nor a parent is evicted; when its last child is gone, a slot takes the
position of its own last use. Evictable slots are ordered by these classes, and by last use within a class:

    expired · in a group over its quota · demoted · ranks from 0 up

Slots are small numbers chosen by the owner of a tier, such as a block's index. State is in arrays; an operation costs
about a microsecond, O(log n) at most, amortised over the repositioning in `queue`.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from typing import cast

import numpy as np

from rekindle.cache.eviction.queue import Quotas, SlotQueue, sort_key

_USED = 1 << 8  # above the rank in the sort key of a slot that is not demoted
HERE, HELD, DEMOTED = 1, 2, 4  # bits of a state; 0 is not present
_INF = math.inf
NEVER = -_INF  # the last use of an unused slot


# Slots in columns: which are present, which are held, and each one's parent and last use.
#
# Does not know what is evicted next. Invariant: `children` of a number counts the present slots whose parent it is,
# whether it is present or not.


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


class EvictionOrder:
    """Slots of one tier with their parents; starts with room for `capacity` and grows as needed.

    `ttl`: time after its last use when a slot expires; None is never. One thread owns an order.
    """

    def __init__(self, *, capacity: int = 0, ttl: float | None = None) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is {ttl}: a lifetime is more than 0; leave it out for none")
        self._slots = Slots(capacity)
        self._ttl = ttl
        self._turn = 1  # odd, see `queue`
        self._now = -math.inf  # the latest time seen
        self._queue = SlotQueue(self._key_of, self._slots.marks)
        self._age_marks = counts(0 if ttl is None else capacity)
        self._by_age = None if ttl is None else SlotQueue(self._age_of, self._age_marks)
        self._quotas: Quotas | None = None

    def __len__(self) -> int:
        return self._slots.num_slots

    def __contains__(self, slot: int) -> bool:
        state = self._slots.state
        return slot < len(state) and bool(state[slot])

    @property
    def num_held(self) -> int:
        return self._slots.num_held

    @property
    def num_idle(self) -> int:
        """Number of slots not held; those with children present can be evicted only after them."""
        return self._slots.num_slots - self._slots.num_held

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and the queues."""
        parts = self._slots, self._queue, self._by_age, self._quotas
        ages = self._age_marks.itemsize * len(self._age_marks)
        return ages + sum(part.nbytes for part in parts if part is not None)

    def is_leaf(self, slot: int) -> bool:
        """Return whether no present slot has `slot` as its parent."""
        children = self._slots.children
        return slot >= len(children) or not children[slot]

    def is_held(self, slot: int) -> bool:
        return bool(self._slots.state[slot] & HELD)

    def is_expired(self, slot: int, now: float) -> bool:
        """Return whether a slot that is not held has expired."""
        state = self._slots.state[slot]
        return self._ttl is not None and state & (HERE | HELD) == HERE and self._slots.last_use[slot] + self._ttl <= now

    def parent(self, slot: int) -> int:
        """Return the parent, present or not, of a slot that is present or was the last with its number; -1 for none."""
        return self._slots.above[slot] - 1

    def group(self, slot: int) -> int:
        """Return the group whose quota the slot counts against; 0 unless it was added with another."""
        return 0 if self._quotas is None else self._quotas.group(slot)

    def last_use(self, slot: int) -> float | None:
        """Time of the last use; None before the first."""
        last_use = self._slots.last_use[slot]
        return last_use if last_use > NEVER else None

    def add(self, slot: int, parent: int = -1, *, group: int = 0) -> None:
        """Add a new slot, held: it cannot be evicted before `release`."""
        slots = self._slots
        if slot >= len(slots.state) or parent >= len(slots.state):
            self._grow(max(slot, parent) + 1)
        if group and self._quotas is None:
            self._quotas = Quotas(self._key_of, len(slots.state), slots.num_slots)
        slots.enter(slot, parent)
        if self._quotas is not None:
            self._quotas.add(slot, group)

    def hold(self, slot: int) -> None:
        """Protect the slot from eviction; holding twice is one hold."""
        self._slots.hold(slot)

    def release(self, slot: int, now: float, *, rank: int = 0) -> None:
        """Make the slot evictable, as used at `now`; 0 <= `rank` <= 255."""
        if not -_INF < now < _INF:
            raise _not_finite(now)
        self._use(slot, now, is_earlier=self._slots.unhold(slot, rank))

    def touch(self, slot: int, now: float) -> None:
        """Record a use without holding."""
        if not -_INF < now < _INF:
            raise _not_finite(now)
        assert self._slots.state[slot], f"slot {slot} is not present"
        self._use(slot, now, is_earlier=False)

    def settle(self, slot: int, *, rank: int = 0) -> None:
        """Make the slot evictable without a new use, at the position of its last one, which must exist."""
        slots = self._slots
        assert slots.state[slot] and slots.last_use[slot] > NEVER, f"slot {slot} is not present, or was never used"
        if slots.unhold(slot, rank):
            self._lower(slot)
        self._put(slot)

    def demote(self, slot: int) -> bool:
        """Move an idle slot ahead of all used ones in the eviction order, until its next use; False if it is held.

        Among demoted slots of one rank, the first demoted is evicted first. One with children follows right after them.
        """
        slots = self._slots
        if slots.state_of(slot) & HELD:
            return False
        slots.state[slot] = HERE | DEMOTED
        self._turn += 2
        slots.turns[slot] = self._turn
        self._lower(slot)
        self._put(slot)
        return True

    def remove(self, slot: int) -> None:
        """Remove a slot that has no children present, held or not."""
        has_children = self._slots.children[slot]
        assert not has_children, f"slot {slot} has children: the next slot with its number would inherit them"
        self.vacate(slot)

    def vacate(self, slot: int) -> None:
        """Remove the slot, held or not; its children keep it as their parent, so its number must not be reused."""
        self._take_out(slot)
        self._queue.sweep(len(self))

    def pop(self, now: float | None = None) -> int | None:
        """Evict and return an idle leaf; None if every leaf is held.

        Without `now`, uses the time of the latest use.
        """
        if now is not None:
            if not -_INF < now < _INF:
                raise _not_finite(now)
            self._now = max(self._now, now)
        if self._by_age is not None and (expired := self.pop_expired(self._now)) is not None:
            return expired
        evicted = None if self._quotas is None else self._quotas.first()
        if evicted is None:
            evicted = self._queue.take()
        if evicted is None:
            return None
        self._take_out(evicted)
        if self._quotas is not None:  # it may not have come from the front of the queue
            self._queue.sweep(len(self))
        return evicted

    def pop_expired(self, now: float) -> int | None:
        """Remove and return an expired idle leaf; None if there is none.

        A slot that expires before its children is removed after them.
        """
        slot = None if self._by_age is None else self._by_age.first()
        if slot is None or not self.is_expired(slot, now):
            return None
        self.vacate(slot)
        return slot

    def set_quota(self, group: int, most: int | None) -> None:
        """Evict first from a group that has more than `most` slots, held ones included; None lifts the quota."""
        if self._quotas is None:
            self._quotas = Quotas(self._key_of, len(self._slots.state), len(self))
        self._quotas.limit(group, most, self._slots.all)

    def check(self) -> None:
        """Assert that the counts are right and every evictable slot is in the queues."""
        slots = self._slots
        slots.check()
        here = slots.all()
        free = {slot for slot in here if not slots.state[slot] & HELD and not slots.children[slot]}
        self._queue.check(free)
        if self._quotas is not None:
            self._quotas.check(here, free)
        if self._by_age is not None:
            self._by_age.check(free)

    def _use(self, slot: int, now: float, *, is_earlier: bool) -> None:
        """Reposition a slot after a use; `is_earlier`: its rank is now lower than where it is queued."""
        slots = self._slots
        if now < slots.last_use[slot]:  # the clock went back
            is_earlier = True
            self._drop_age(slot)
        if slots.state[slot] & DEMOTED:
            slots.state[slot] &= ~DEMOTED
        slots.last_use[slot] = now
        slots.turns[slot] = self._turn = self._turn + 2
        if now > self._now:
            self._now = now
        if is_earlier:
            self._lower(slot)
        if not slots.marks[slot] or self._by_age is not None or self._quotas is not None:
            self._put(slot)

    def _take_out(self, slot: int) -> None:
        parent = self._slots.leave(slot)
        self._drop_age(slot)
        if self._quotas is not None:
            self._quotas.remove(slot)
        if parent >= 0:
            self._put(parent)

    def _put(self, slot: int) -> None:
        self._queue.put(slot)
        if self._by_age is not None:
            self._by_age.put(slot)
        if self._quotas is not None:
            self._quotas.put(slot)

    def _lower(self, slot: int) -> None:
        self._queue.drop(slot)
        self._queue.sweep(len(self))
        if self._quotas is not None:
            self._quotas.drop(slot)

    def _drop_age(self, slot: int) -> None:
        if self._by_age is not None:
            self._by_age.drop(slot)
            self._by_age.sweep(len(self))

    def _key_of(self, slot: int) -> int | None:
        slots = self._slots
        state = slots.state[slot]
        if state & HELD or slots.children[slot]:
            return None
        if state & DEMOTED:
            return sort_key(slots.rank[slot], 0.0, slots.turns[slot], slot)
        return sort_key(_USED | slots.rank[slot], slots.last_use[slot], slots.turns[slot], slot)

    def _age_of(self, slot: int) -> int | None:
        slots = self._slots
        if slots.state[slot] & HELD or slots.children[slot]:
            return None
        return sort_key(0, slots.last_use[slot], slots.turns[slot], slot)

    def _grow(self, size: int) -> None:
        self._slots.grow(size)
        size = len(self._slots.state)
        if self._by_age is not None:
            self._age_marks.frombytes(bytes(self._age_marks.itemsize * (size - len(self._age_marks))))
        if self._quotas is not None:
            self._quotas.grow(size)


def _not_finite(now: float) -> ValueError:
    """Infinity and NaN cannot be ordered."""
    return ValueError(f"the time is {now}: a clock shows finite numbers")
