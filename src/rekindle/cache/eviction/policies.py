"""Eviction policies: each gives a slot a priority at every use, and the smallest is evicted first.

A policy knows slots by number and their events, not which are held or have children: `order` handles that. Ties are
broken by the order of uses. `POLICIES` lists all names, for choices on the command line.
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
    remembers: bool  # evicted keys, so that it needs `came` calls

    def came(self, slot: int, key: int) -> None:
        """Note that a slot was added, before its first use; `key` identifies its content, -1 if unknown."""
        ...

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        """Return the priority after this use, the `num_uses`-th since it was added, `idle` after the previous one.

        `idle` is 0.0 at the first. Must not return NaN.
        """
        ...

    def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
        """Note that a slot was evicted to make room; not called for removed or expired slots."""
        ...

    @property
    def nbytes(self) -> int:
        """Approximate bytes of its state."""
        ...

    def check(self) -> None:
        """Assert that its state is consistent; part of the order's `check`."""
        ...


class Forgetful:
    """Base of policies that know a slot only while it is present; most of them keep no state at all."""

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
    """First in, first out: the time of the first use, unchanged by later ones."""

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
    """Fewest uses since added first; ties go to the least recent use. Counts are lost with the slot."""

    name = "lfu"

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        return float(num_uses)


class AgedLFU(Forgetful):
    """Uses on top of the age, the priority of the last evicted slot, so that old counts lose weight.

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
    """Soonest to expire first: the order, which knows the lifetimes, uses deadlines as priorities."""

    name = "ttl"


_MAKERS: dict[str, Callable[..., Policy]] = {
    policy.name: policy for policy in (LRU, FIFO, LFU, AgedLFU, EarliestDeadline, Adaptive)
}
POLICIES = tuple(_MAKERS)


def make_policy(name: str, **options: float) -> Policy:
    """Return a policy for one order, by its name; ValueError for an unknown name."""
    if name not in _MAKERS:
        raise ValueError(f"no eviction policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _MAKERS[name](**options)
