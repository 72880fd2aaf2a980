"""The order in which a tier gives things up: least recently used first, and a parent only after its children.

Owns, per key, its parent, its last use and whether it is held; the pool keeps block names here, the disk its slots'.
Does not know what a key stands for, nor the time: uses come in as numbers that grow, from 0.
Invariants: only a key that is neither held nor a parent in this tier is given up; when its last child leaves, a key
takes the place that its own last use gives it.

The order is a heap with stale entries: an entry counts only while its key still carries the entry's turn and is free to
go. Everything is O(log n), amortised over the rebuilding that keeps the heap within a factor of the keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

STALE_FACTOR = 4  # heap entries per key before the stale ones are swept
MIN_SWEEP = 64
DEMOTED = -(2.0**52)  # before every use (uses are not negative); still exact when demotions are counted on top


@dataclass(slots=True)
class _Place(Generic[K]):
    parent: K | None
    last_use: float
    turn: int  # of the heap entry that counts; ties in last use go by turn
    is_held: bool


class LeafLRU(Generic[K]):
    """Keys of one tier with their parents; `pop` gives up the one that may go and was used longest ago.

    A parent need not be in the tier, before or after its children: it counts them by key. `None` is no parent.
    """

    def __init__(self) -> None:
        self._places: dict[K, _Place[K]] = {}
        self._num_children: dict[K, int] = {}  # also of parents that are not here
        self._queue: list[tuple[float, int, K]] = []
        self._turn = 0
        self._num_demoted = 0
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: K) -> bool:
        return key in self._places

    @property
    def num_idle(self) -> int:
        """Keys nobody holds; those with children here can still go, after them."""
        return len(self._places) - self.num_held

    def is_leaf(self, key: K) -> bool:
        """Say whether no key of this tier has `key` as its parent."""
        return key not in self._num_children

    def add(self, key: K, parent: K | None) -> None:
        """Take a new key in, held: it cannot leave before `release`."""
        assert key not in self._places, f"{key!r} is here already"
        self._places[key] = _Place(parent, 0.0, 0, is_held=True)
        self.num_held += 1
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def hold(self, key: K) -> None:
        """Keep the key from leaving; holding twice is one hold."""
        place = self._places[key]
        self.num_held += not place.is_held
        place.is_held = True

    def release(self, key: K, last_use: float) -> None:
        """Let the key go when its turn comes, as used at `last_use`."""
        place = self._places[key]
        self.num_held -= place.is_held
        place.is_held = False
        self._set_use(key, place, last_use)

    def touch(self, key: K, last_use: float) -> None:
        """Note a use without holding."""
        self._set_use(key, self._places[key], last_use)

    def demote(self, key: K) -> bool:
        """Put an idle key before all that were used, until its next use; False when it is held.

        Among demoted keys the first demoted goes first. One with children goes as soon as they have left.
        """
        place = self._places[key]
        if not place.is_held:
            self._num_demoted += 1
            self._set_use(key, place, DEMOTED + self._num_demoted)
        return not place.is_held

    def remove(self, key: K) -> None:
        """Take the key out, held or not; its children stay and become nobody's concern but their own."""
        place = self._places.pop(key)
        self.num_held -= place.is_held
        parent = place.parent
        if parent is None:
            return
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        if parent in self._places:
            self._enqueue(parent, self._places[parent])

    def pop(self) -> K | None:
        """Remove and return the idle leaf used longest ago; None when every leaf is held."""
        while self._queue:
            _, turn, key = heapq.heappop(self._queue)
            if self._may_go(key, turn):
                self.remove(key)
                return key
        return None

    def check(self) -> None:
        """Derive the counts anew, and assert that every key free to go stands in the heap once."""
        counts: dict[K, int] = {}
        for place in self._places.values():
            if place.parent is not None:
                counts[place.parent] = counts.get(place.parent, 0) + 1
        assert counts == self._num_children, f"children: kept {self._num_children}, derived {counts}"
        num_held = sum(place.is_held for place in self._places.values())
        assert num_held == self.num_held, f"num_held is {self.num_held}, {num_held} are held"
        queued = [(last_use, key) for last_use, turn, key in self._queue if self._may_go(key, turn)]
        free = {key: p.last_use for key, p in self._places.items() if not p.is_held and self.is_leaf(key)}
        assert len(queued) == len(free), f"{len(free)} keys may go, {len(queued)} are queued"
        for last_use, key in queued:
            assert free[key] == last_use, f"{key!r} is queued at {last_use}, last used at {free[key]}"

    def _set_use(self, key: K, place: _Place[K], last_use: float) -> None:
        place.last_use = last_use
        self._enqueue(key, place)

    def _enqueue(self, key: K, place: _Place[K]) -> None:
        self._turn += 1
        place.turn = self._turn
        if not place.is_held and self.is_leaf(key):
            heapq.heappush(self._queue, (place.last_use, place.turn, key))
            if len(self._queue) > MIN_SWEEP + STALE_FACTOR * len(self._places):
                self._queue = [entry for entry in self._queue if self._may_go(entry[2], entry[1])]
                heapq.heapify(self._queue)

    def _may_go(self, key: K, turn: int) -> bool:
        place = self._places.get(key)
        return place is not None and place.turn == turn and not place.is_held and self.is_leaf(key)
