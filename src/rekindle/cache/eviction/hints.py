"""What a user of a block knows of its future, and what the order makes of announced uses.

Owns the announced next uses of slots, and how long what left of late had been idle. Does not know who is held or where
a slot stands. An announced use is worth waiting for if things stay that long here anyway; of those waited for, the one
used last leaves first, which is the optimum if all came true (Belady 1966).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

SLACK = 0.5  # of the announced time: what is late by more is not waited for
WEIGHT = 1 / 16  # of the newest departure in the idle time of those that left
MIN_SWEEP = 64


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller expects; times in units of the order's clock. They hold until a use brings others.

    `keep`: leaves after everything that is not kept; pinned it is not, and demoted it goes first until its next use.
    `ttl`: a lifetime of its own, from this use and from every later one; infinity outlives the order's.
    `next_use_in`: of this use alone. If what left of late had been idle for at least that long, the slot is kept until
    then and half as long again, after everything that is neither awaited nor kept; if it had not, waiting is vain, and
    the slot leaves before all that were used, the one with the latest next use first. Before anything has left, every
    announced use is awaited. With `keep` it says nothing.
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
    """Slots with a use to come, waited for or not."""

    def __init__(self) -> None:
        self._next: dict[int, tuple[float, float]] = {}  # slot: its next use, and until when it is waited for
        self.waiting: list[tuple[float, int]] = []  # heap; stale where `_next` says otherwise
        self._idle = math.inf  # of those that left

    def expect(self, slot: int, now: float, next_use_in: float) -> bool:
        """Note a use to come; say whether it is worth waiting for."""
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
        """Forget and return the slots that were waited for in vain."""
        found = []
        while self.waiting and self.waiting[0][0] < now:
            until, slot = heapq.heappop(self.waiting)
            if slot in self._next and self._next[slot][1] == until:
                del self._next[slot]
                found.append(slot)
        return found

    def note_left(self, idle: float) -> None:
        """Learn from a departure how long things stay here unused."""
        self._idle = idle if self._idle == math.inf else self._idle + (idle - self._idle) * WEIGHT
