"""The eviction order of a tier: by its policy, and a parent only after its children.

Owns which of the `slots` is evicted next. Does not know what a slot represents, nor the time: `now` is passed in, in
any unit.
Invariants: only a slot that is neither held nor a parent is evicted; when its last child is gone, a slot takes the
position of its own last use. Evictable slots are ordered by these classes, and by the policy within a class:

    expired · in a group over its quota · demoted · announced too far ahead · ranks from 0 up · awaited · kept

State is in arrays; an operation costs about a microsecond, O(log n) at most, amortised over the repositioning in
`queue`.
"""

from __future__ import annotations

import math

from rekindle.cache.eviction.hints import Announced, Hints
from rekindle.cache.eviction.lifetimes import Lifetimes
from rekindle.cache.eviction.policies import LRU, EarliestDeadline, Policy, make_policy
from rekindle.cache.eviction.queue import SlotQueue, sort_key
from rekindle.cache.eviction.quotas import Quotas
from rekindle.cache.eviction.slots import AWAITED, DEMOTED, EARLY, HELD, HERE, KEPT, LEVELS, NEVER, Slots, finite
from rekindle.cache.eviction.weights import Weights

_MARKED = AWAITED | EARLY | DEMOTED
_INF = math.inf


class EvictionOrder(Slots):
    """Slots of one tier with their parents; starts with room for `capacity` and grows as needed.

    `ttl`: time after its last use when a slot expires; None is never. One thread owns an order.
    """

    def __init__(self, policy: Policy | str = "lru", *, capacity: int = 0, ttl: float | None = None) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is {ttl}: a lifetime is more than 0; leave it out for none")
        super().__init__(capacity)
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self._weights = None if type(self.policy) is LRU else Weights(self.policy, capacity)
        self._priority = self._last_use if self._weights is None else self._weights.priority
        self.ttl = ttl
        self._is_by_deadline = isinstance(self.policy, EarliestDeadline)
        self._turn = 1  # odd, see `queue`
        self._now = -math.inf  # the latest time seen
        self._queue = SlotQueue(self._key_of, self._marks)
        self._announced = Announced()
        self._lives = None if ttl is None else Lifetimes(ttl, self._expiry_of, capacity)
        self._quotas: Quotas | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, the queues and the policy's state."""
        parts = self.policy, self._lives, self._quotas, self._weights
        return super().nbytes + self._queue.nbytes + sum(part.nbytes for part in parts if part is not None)

    def is_expired(self, slot: int, now: float) -> bool:
        """Return whether a slot that is not held has expired."""
        if self._lives is None or not self._state[slot] or self._state[slot] & HELD:
            return False
        return self._last_use[slot] + self._lives.ttl(slot) <= now

    def group(self, slot: int) -> int:
        """Return the group whose quota the slot counts against; 0 unless it was added with another."""
        return 0 if self._quotas is None else self._quotas.group(slot)

    def add(self, slot: int, parent: int = -1, *, group: int = 0, key: int = -1) -> None:
        """Add a new slot, held: it cannot be evicted before `release`.

        `key`, from 0 up, is the same whenever the same content is added, for policies that recognise it; -1: unknown.
        """
        self._enter(slot, parent)
        if self._weights is not None:
            self._weights.came(slot, key)
        if group and self._quotas is None:
            self._quotas = Quotas(self._key_of, len(self._state), self._len - 1)
        if self._quotas is not None:
            self._quotas.add(slot, group)

    def release(self, slot: int, now: float, *, rank: int = 0, hints: Hints | None = None) -> None:
        """Make the slot evictable, as used at `now`; 0 <= `rank` <= 255.

        Without `hints`, earlier hints stay in force, except an announced use, which this use fulfils.
        """
        state = self._state[slot]
        assert state, f"slot {slot} is not present"
        finite(now)
        before = LEVELS[state] | self._rank[slot]
        self._unhold(slot, state, rank)
        self._use(slot, now, before, hints)

    def touch(self, slot: int, now: float) -> None:
        """Record a use without holding."""
        state = self._state[slot]
        assert state, f"slot {slot} is not present"
        if self._weights is None and not state & _MARKED and self._last_use[slot] <= now < _INF:  # inlined `_use`
            self._last_use[slot] = now
            self._turns[slot] = self._turn = self._turn + 2
            self._now = now if now > self._now else self._now
        else:
            self._use(slot, finite(now), LEVELS[state] | self._rank[slot], None)

    def settle(self, slot: int, *, rank: int = 0) -> None:
        """Make the slot evictable without a new use, at the position of its last one, which must exist."""
        state = self._state[slot]
        assert state and self._last_use[slot] > NEVER, f"slot {slot} is not present, or was never used"
        before = LEVELS[state] | self._rank[slot]
        self._unhold(slot, state, rank)
        if LEVELS[state] | rank < before:
            self._lower(slot)
        self._put(slot)

    def demote(self, slot: int) -> bool:
        """Move an idle slot ahead of all used ones in the eviction order, until its next use; False if it is held.

        Among demoted slots of one rank, the first demoted is evicted first. One with children follows right after them.
        An announced use is cancelled; a kept slot is kept again from its next use.
        """
        state = self._state[slot]
        assert state, f"slot {slot} is not present"
        if state & HELD:
            return False
        self._announced.forget(slot)
        self._state[slot] = HERE | DEMOTED | state & KEPT
        self._turn += 2
        self._turns[slot] = self._turn
        self._lower(slot)
        self._put(slot)
        return True

    def remove(self, slot: int) -> None:
        """Remove a slot that has no children present, held or not."""
        assert not self._children[slot], f"slot {slot} has children: the next slot with its number would inherit them"
        self.vacate(slot)

    def vacate(self, slot: int) -> None:
        """Remove the slot, held or not; its children keep it as their parent, so its number must not be reused."""
        self._take_out(slot)
        self._queue.sweep(self._len)

    def pop(self, now: float | None = None) -> int | None:
        """Evict and return an idle leaf; None if every leaf is held.

        Without `now`, uses the time of the latest use.
        """
        self._now = now = self._now if now is None else max(self._now, finite(now))
        if self._lives is not None and (expired := self.pop_expired(now)) is not None:
            return expired
        if self._announced.waiting:
            for slot in self._announced.overdue(now):
                self._state[slot] &= ~AWAITED
                self._lower(slot)
                self._put(slot)
        evicted = None if self._quotas is None else self._quotas.first()
        if evicted is None:
            evicted = self._queue.take()
        if evicted is None:
            return None
        if not self._state[evicted] & (_MARKED | KEPT):
            self._announced.note_eviction(now - self._last_use[evicted])
        if self._weights is not None:
            self._weights.made_room(evicted, now)
        self._take_out(evicted)
        if self._quotas is not None:  # it may not have come from the front of the queue
            self._queue.sweep(self._len)
        return evicted

    def pop_expired(self, now: float) -> int | None:
        """Remove and return an expired idle leaf; None if there is none.

        A slot that expires before its children is removed after them.
        """
        slot = None if self._lives is None else self._lives.queue.first()
        if slot is None or not self.is_expired(slot, now):
            return None
        self.vacate(slot)
        return slot

    def set_quota(self, group: int, most: int | None) -> None:
        """Evict first from a group that has more than `most` slots, held ones included; None lifts the quota."""
        if self._quotas is None:
            self._quotas = Quotas(self._key_of, len(self._state), self._len)
        self._quotas.limit(group, most, self._all)

    def check(self) -> None:
        """Assert that the counts are right and every evictable slot is in the queues."""
        super().check()
        self.policy.check()
        here = self._all()
        announced = {slot for slot in here if self._state[slot] & (AWAITED | EARLY)}
        assert announced == self._announced.slots(), "slots marked as announced differ from those announced"
        free = {slot for slot in here if not self._state[slot] & HELD and not self._children[slot]}
        self._queue.check(free)
        if self._quotas is not None:
            self._quotas.check(here, free)
        if self._lives is not None:
            self._lives.queue.check({slot for slot in free if self._lives.ttl(slot) < math.inf})

    def _use(self, slot: int, now: float, before: int, hints: Hints | None) -> None:
        """Reposition a slot after a use; `before`: its previous level and rank."""
        state = self._state[slot]
        if state & _MARKED:
            self._announced.forget(slot)
            self._state[slot] = state & ~_MARKED
        last_use = self._last_use[slot]
        if now < last_use and self._lives is not None:  # the clock went back, and the deadline with it
            self._lives.drop(slot, self._len)
        was = self._priority[slot]
        self._last_use[slot] = now
        self._turn += 2
        self._turns[slot] = self._turn
        if now > self._now:
            self._now = now
        if hints is not None:
            self._heed(slot, now, hints)
        if self._weights is not None:
            self._weights.used(slot, now, max(0.0, now - last_use) if last_use > NEVER else 0.0)
        if self._is_by_deadline:
            self._priority[slot] = self._deadline(slot)
        state = self._state[slot]
        if self._priority[slot] < was or state & _MARKED or LEVELS[state] | self._rank[slot] < before:
            self._lower(slot)
        if not self._marks[slot] or self._lives is not None or self._quotas is not None:
            self._put(slot)

    def _heed(self, slot: int, now: float, hints: Hints) -> None:
        state = self._state[slot] & ~KEPT
        if hints.keep:
            state |= KEPT
        elif hints.next_use_in is not None:
            state |= AWAITED if self._announced.expect(slot, now, hints.next_use_in) else EARLY
        self._state[slot] = state
        if hints.ttl is not None and self._lives is None:
            self._lives = Lifetimes(math.inf, self._expiry_of, len(self._state))
        if self._lives is not None:
            self._lives.set_own(slot, hints.ttl)
            self._lives.drop(slot, self._len)

    def _take_out(self, slot: int) -> None:
        state = self._state[slot]
        assert state, f"slot {slot} is not present"
        self._len -= 1
        self.num_held -= state & HELD == HELD
        if state & _MARKED:
            self._announced.forget(slot)
        self._state[slot] = self._rank[slot] = self._marks[slot] = 0
        self._last_use[slot] = NEVER
        if self._lives is not None:
            self._lives.remove(slot, self._len)
        if self._quotas is not None:
            self._quotas.remove(slot)
        above = self._above[slot]
        if above:
            left = self._children[above - 1] - 1
            self._children[above - 1] = left
            if not left and self._state[above - 1]:
                self._put(above - 1)

    def _put(self, slot: int) -> None:
        self._queue.put(slot)
        if self._lives is not None:
            self._lives.queue.put(slot)
        if self._quotas is not None:
            self._quotas.put(slot)

    def _lower(self, slot: int) -> None:
        self._queue.drop(slot)
        self._queue.sweep(self._len)
        if self._quotas is not None:
            self._quotas.drop(slot)

    def _deadline(self, slot: int) -> float:
        return self._last_use[slot] + (math.inf if self._lives is None else self._lives.ttl(slot))

    def _key_of(self, slot: int) -> int | None:
        state = self._state[slot]
        if state & HELD or self._children[slot]:
            return None
        if not state & _MARKED:
            priority = self._priority[slot]
        else:
            priority = 0.0 if state & DEMOTED else -self._announced.next_use(slot)
        return sort_key(LEVELS[state] | self._rank[slot], priority, self._turns[slot], slot)

    def _expiry_of(self, slot: int) -> int | None:
        if self._state[slot] & HELD or self._children[slot]:
            return None
        deadline = self._deadline(slot)
        return sort_key(0, deadline, self._turns[slot], slot) if deadline < math.inf else None

    def _grow(self, size: int) -> None:
        super()._grow(size)
        if self._weights is None:
            self._priority = self._last_use
        for part in (self._lives, self._quotas, self._weights):
            if part is not None:
                part.grow(len(self._state))
