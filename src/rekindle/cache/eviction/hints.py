"""Hints about the future use of a block, and how the order treats announced uses.

Owns the announced next uses of slots, and the average idle time of recently evicted ones. Does not know which slots are
held or their position. An announced use is worth waiting for if slots stay that long anyway; among awaited slots, the
one with the latest next use is evicted first, which is optimal if all announcements hold (Belady 1966).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

SLACK = 0.5  # of the announced time: a slot overdue by more is no longer awaited
WEIGHT = 1 / 16  # of the newest eviction in the average idle time
MIN_SWEEP = 64


@dataclass(frozen=True, slots=True)
class Hints:
    """The caller's expectations; times in units of the order's clock. They hold until a use gives new hints.

    `keep`: evicted after everything that is not kept. It is not a pin, and after `demote` it is evicted first until its
    next use.
    `ttl`: an individual lifetime, from this use and every later one; infinity outlives the order's.
    `next_use_in`: for this use alone. If recently evicted slots had been idle for at least that long, the slot is
    awaited for that time and half as long again: evicted after everything that is neither awaited nor kept. Otherwise
    waiting is not worthwhile, and the slot is evicted before all used ones, the latest next use first. Before the first
    eviction, every announced use is awaited. Ignored with `keep`.
    """

    keep: bool = False
    next_use_in: float | None = None
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.ttl is not None and not self.ttl > 0:
            raise ValueError(f"ttl is {self.ttl}: a lifetime is more than 0; leave it out for none")
        if self.next_use_in is not None and not self.next_use_in >= 0:
            raise ValueError(f"next_use_in is {self.next_use_in}: it counts from now, so from 0 up")


class Announced:
    """Slots with an announced use, awaited or not."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[float, float]] = {}  # slot: its next use, and until when it is awaited
        self.waiting: list[tuple[float, int]] = []  # heap; stale if it differs from `_next`
        self._idle = math.inf  # average of evicted slots

    def expect(self, slot: int, now: float, next_use_in: float) -> bool:
        """Record an announced use; return whether it is worth waiting for."""
        is_awaited = next_use_in <= self._idle
        until = now + (1 + SLACK) * next_use_in if is_awaited else math.inf
        self._next[slot] = (now + next_use_in, until)
        if is_awaited:
            heapq.heappush(self.waiting, (until, slot))
            if len(self.waiting) > MIN_SWEEP + 2 * len(self._next):
                self.waiting = [(when, slot) for slot, (_, when) in self._next.items() if when < math.inf]
                heapq.heapify(self.waiting)
        return is_awaited

    def forget(self, slot: int) -> None:
        self._next.pop(slot, None)

    def slots(self) -> set[int]:
        return set(self._next)

    def next_use(self, slot: int) -> float:
        return self._next[slot][0]

    def overdue(self, now: float) -> list[int]:
        """Remove and return the awaited slots whose use is overdue."""
        found = []
        while self.waiting and self.waiting[0][0] < now:
            until, slot = heapq.heappop(self.waiting)
            if slot in self._next and self._next[slot][1] == until:
                del self._next[slot]
                found.append(slot)
        return found

    def note_eviction(self, idle: float) -> None:
        """Update the average idle time from an eviction."""
        self._idle = idle if self._idle == math.inf else self._idle + (idle - self._idle) * WEIGHT
