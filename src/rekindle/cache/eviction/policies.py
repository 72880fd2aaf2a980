"""What a use is worth: each policy gives a slot a priority at its use, and the smallest leaves first.

A policy knows slots by number and what happens to them, not who is held or has children: `order` sees to that. Equal
priorities go by the order of their uses. `POLICIES` names all, for choices on the command line.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Protocol

from rekindle.cache.eviction.adaptive import Adaptive


class Policy(Protocol):
    """Priorities of the slots of one order."""

    name: str
    remembers: bool  # what left, so that it wants to hear who came

    def came(self, slot: int, key: int) -> None:
        """Hear that a slot came in, before its first use; `key` is its content's, -1 if unknown."""
        ...

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        """Return the priority after this use, the `num_uses`-th since the slot came in, `idle` after the last one.

        `idle` is 0.0 at the first. Not NaN.
        """
        ...

    def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
        """Hear of a slot that left to make room; one that was taken out or expired is not told of."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of what it keeps, about."""
        ...

    def check(self) -> None:
        """Assert that what it keeps agrees with itself; part of the order's `check`."""
        ...


class Forgetful:
    """What policies share that know of a slot only while it is here, most of them nothing."""

    remembers = False

    @property
    def nbytes(self) -> int:
        return 0

    def came(self, slot: int, key: int) -> None:
        pass

    def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
        pass

    def check(self) -> None:
        pass


class LRU(Forgetful):
    """Least recently used first."""

    name = "lru"

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        return now


class FIFO(Forgetful):
    """First come, first to leave: the time of the first use, whatever comes after."""

    name = "fifo"

    def __init__(self) -> None:
        self._first = array("d")

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self._first)

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        if num_uses == 1:
            if slot >= len(self._first):
                self._first.extend(array("d", [0.0]) * (slot + 1))
            self._first[slot] = now
        return self._first[slot]


class LFU(Forgetful):
    """Fewest uses since it came in first; of as many, the least recent use. Counts are lost with the slot."""

    name = "lfu"

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        return float(num_uses)


class AgedLFU(Forgetful):
    """Uses on top of the age, which is the priority of the last that left, so that old fame fades.

    LFU with dynamic aging: Arlitt et al., Evaluating content management techniques for web proxy caches (2000).
    """

    name = "aged-lfu"

    def __init__(self) -> None:
        self._age = 0.0

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        return self._age + num_uses

    def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
        self._age = max(self._age, priority)


class EarliestDeadline(LRU):
    """Soonest to expire first: the order, which knows the lifetimes, puts deadlines in the place of priorities."""

    name = "ttl"


_MAKERS: dict[str, Callable[..., Policy]] = {
    policy.name: policy for policy in (LRU, FIFO, LFU, AgedLFU, EarliestDeadline, Adaptive)
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, **options: float) -> Policy:
    """Return a policy for one order, by its name; ValueError for one that nobody knows."""
    if name not in _MAKERS:
        raise ValueError(f"no eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _MAKERS[name](**options)
