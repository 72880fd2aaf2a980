"""Which stored branch a finished request continues: an agent's own, or an unnamed conversation found by its blocks.

Owns the heads of all branches in the store, and their resume points since the start. A request whose chain contains a
branch's head continues that branch; any other begins a new one, and of an agent's branches the one used longest ago
gives its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rekindle.agent_ids import kind_of, new_conversation
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.values import SequenceRecord

MOST_BRANCHES = 8  # of a named agent: a session, its sub-requests with other system prompts, and edits


@dataclass(frozen=True, slots=True)
class Place:
    """A branch of an agent in a namespace."""

    namespace: str
    agent: str
    branch: int


class Branches:
    """The heads of branches, as saved last. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[Place, tuple[BlockHash, float]] = {}
        self._places: dict[BlockHash, set[Place]] = {}
        self._points: dict[Place, frozenset[int]] = {}

    def restore(self, records: Iterable[SequenceRecord]) -> None:
        """Take over the branches of a store that was just opened."""
        with self._lock:
            for record in records:
                self._put(Place(record.namespace, record.agent, record.branch), record.head, record.last_use)

    def place(self, namespace: str, agent: str | None, names: Sequence[BlockHash], now: float) -> Place:
        """Choose the branch of a chain that ends with the last of `names` (at least one), and make that its head."""
        with self._lock:
            continued = self._continued(namespace, agent, names)
            place = continued or self._new(namespace, agent)
            points = self._points.get(place) if continued else None
            self._remove(place)
            self._put(place, names[-1], now)
            if points is not None:
                self._points[place] = points
            return place

    def points(self, place: Place, reached: Iterable[int], worth: Callable[[Collection[int]], set[int]]) -> set[int]:
        """Choose what is `worth` keeping of a branch's resume points, those kept so far and those of its last turn."""
        with self._lock:
            kept = worth(self._points.get(place, frozenset()) | {*reached})
            self._points[place] = frozenset(kept)
            return kept

    def lost(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Forget a branch that was evicted to fewer tokens; a later turn of it begins a new one, sharing its blocks."""
        with self._lock:
            self._remove(Place(namespace, agent, branch))

    def _continued(self, namespace: str, agent: str | None, names: Sequence[BlockHash]) -> Place | None:
        for name in reversed(names):
            for place in sorted(self._places.get(name, ()), key=lambda place: place.branch):
                fits = kind_of(place.agent).continues_unnamed if agent is None else place.agent == agent
                if fits and place.namespace == namespace:
                    return place
        return None

    def _new(self, namespace: str, agent: str | None) -> Place:
        if agent is None:
            return Place(namespace, new_conversation(), 0)
        places = [Place(namespace, agent, branch) for branch in range(MOST_BRANCHES)]
        free = next((place for place in places if place not in self._heads), None)
        return free or min(places, key=lambda place: self._heads[place][1])

    def _put(self, place: Place, head: BlockHash, last_use: float) -> None:
        self._heads[place] = head, last_use
        self._places.setdefault(head, set()).add(place)

    def _remove(self, place: Place) -> None:
        if place in self._heads:
            head, _ = self._heads.pop(place)
            self._places[head].discard(place)
            if not self._places[head]:
                del self._places[head]
        self._points.pop(place, None)

    def check(self) -> None:
        """Assert that both directions agree."""
        with self._lock:
            for place, (head, _) in self._heads.items():
                assert place in self._places[head], f"{place} is not at its head"
            assert sum(map(len, self._places.values())) == len(self._heads), "a head has branches that are not there"
