"""An eviction order over keys of any kind instead of small numbers, such as the blocks on disk.

Owns the mapping from keys to numbers of an `EvictionOrder`, which does everything else. Does not know what a key means.
Invariant: a number is in use exactly while its key is present or is the parent of one that is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from rekindle.cache.eviction.order import EvictionOrder

K = TypeVar("K", bound=Hashable)


class KeyedOrder(Generic[K]):
    """`EvictionOrder` by key. A parent need not be present before or after its children; None is no parent."""

    def __init__(self, *, ttl: float | None = None) -> None:
        self._order = EvictionOrder(ttl=ttl)
        self._numbers: dict[K, int] = {}  # also of parents that are not present
        self._keys: list[K | None] = []  # by number
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: K) -> bool:
        number = self._numbers.get(key)
        return number is not None and number in self._order

    def __iter__(self) -> Iterator[K]:
        """Iterate over the present keys, in the order they first appeared."""
        return (key for key, number in self._numbers.items() if number in self._order)

    @property
    def num_held(self) -> int:
        return self._order.num_held

    @property
    def num_idle(self) -> int:
        """Number of keys not held; those with children present can be evicted only after them."""
        return self._order.num_idle

    def is_leaf(self, key: K) -> bool:
        """Return whether no present key has `key` as its parent."""
        number = self._numbers.get(key)
        return number is None or self._order.is_leaf(number)

    def is_held(self, key: K) -> bool:
        return self._order.is_held(self._numbers[key])

    def is_expired(self, key: K, now: float) -> bool:
        """Return whether a key that is not held has expired."""
        return self._order.is_expired(self._numbers[key], now)

    def last_use(self, key: K) -> float | None:
        """Time of the last use; None before the first."""
        return self._order.last_use(self._numbers[key])

    def add(self, key: K, parent: K | None = None, *, group: int = 0) -> None:
        """Add a new key, held: it cannot be evicted before `release`."""
        number = self._number(key)
        above = -1 if parent is None else self._number(parent)
        self._order.add(number, above, group=group)

    def hold(self, key: K) -> None:
        """Protect the key from eviction; holding twice is one hold."""
        self._order.hold(self._numbers[key])

    def release(self, key: K, now: float, *, rank: int = 0) -> None:
        """Make the key evictable, as used at `now`; see `EvictionOrder.release`."""
        self._order.release(self._numbers[key], now, rank=rank)

    def settle(self, key: K, *, rank: int = 0) -> None:
        """Make the key evictable without a new use, at the position of its last one, which must exist."""
        self._order.settle(self._numbers[key], rank=rank)

    def touch(self, key: K, now: float) -> None:
        """Record a use without holding."""
        self._order.touch(self._numbers[key], now)

    def demote(self, key: K) -> bool:
        """Move an idle key ahead of all used ones in the eviction order, until its next use; False if it is held."""
        return self._order.demote(self._numbers[key])

    def remove(self, key: K) -> None:
        """Remove the key, held or not; its children stay, and it is their parent again if it is re-added."""
        number = self._numbers[key]
        self._order.vacate(number)
        self._free_number(number)

    def pop(self, now: float | None = None) -> K | None:
        """Evict and return an idle leaf; None if every leaf is held."""
        number = self._order.pop(now)
        return None if number is None else self._free_number(number)

    def pop_expired(self, now: float) -> K | None:
        """Remove and return an expired idle leaf; None if there is none."""
        number = self._order.pop_expired(now)
        return None if number is None else self._free_number(number)

    def set_quota(self, group: int, most: int | None) -> None:
        """Evict first from a group that has more than `most` keys, held ones included; None lifts the quota."""
        self._order.set_quota(group, most)

    def check(self) -> None:
        """Assert that numbers and keys agree, and that every number is needed."""
        self._order.check()
        for key, number in self._numbers.items():
            assert self._keys[number] == key, f"number {number} is {key!r} and {self._keys[number]!r}"
            is_needed = number in self._order or not self._order.is_leaf(number)
            assert is_needed, f"{key!r} is neither present nor a parent"
        assert len(self._numbers) + len(self._unused) == len(self._keys), "a number is lost"

    def _number(self, key: K) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._unused.pop() if self._unused else len(self._keys)
            if number == len(self._keys):
                self._keys.append(key)
            self._keys[number] = key
            self._numbers[key] = number
        return number

    def _free_number(self, number: int) -> K:
        """Return the key of a removed number; free it and its parent's number if they are no longer needed."""
        key = self._keys[number]
        assert key is not None
        parent = self._order.parent(number)
        for candidate in (number, parent):
            if candidate >= 0 and candidate not in self._order and self._order.is_leaf(candidate):
                unneeded = self._keys[candidate]
                assert unneeded is not None
                del self._numbers[unneeded]
                self._keys[candidate] = None
                self._unused.append(candidate)
        return key
