"""Each slot's priority under a policy, and its number of uses since it was added.

Owns these two columns. LRU needs neither: it orders by last use directly.
"""

from __future__ import annotations

from array import array

from rekindle.cache.eviction.policies import Policy
from rekindle.cache.eviction.slots import counts

MAX_USES = (1 << 32) - 1


class Weights:
    """Columns of `size` slots, 12 bytes per slot."""

    def __init__(self, policy: Policy, size: int) -> None:
        self._policy = policy
        self._uses = counts(size)
        self.priority = array("d", [0.0]) * size

    @property
    def nbytes(self) -> int:
        return self._uses.itemsize * len(self._uses) + self.priority.itemsize * len(self.priority)

    def grow(self, size: int) -> None:
        for column in (self._uses, self.priority):
            column.frombytes(bytes(column.itemsize * (size - len(column))))

    def came(self, slot: int, key: int) -> None:
        """Start counting the uses of an added slot with the content of `key`."""
        self._uses[slot] = 0
        if self._policy.remembers:
            self._policy.came(slot, key)

    def used(self, slot: int, now: float, idle: float) -> None:
        """Count a use, `idle` after the previous one, and update the priority."""
        uses = min(self._uses[slot] + 1, MAX_USES)
        self._uses[slot] = uses
        self.priority[slot] = self._policy.used(slot, now, uses, idle)

    def made_room(self, slot: int, now: float) -> None:
        """Notify the policy of a slot evicted to make room."""
        self._policy.left(slot, self.priority[slot], now, self._uses[slot])
