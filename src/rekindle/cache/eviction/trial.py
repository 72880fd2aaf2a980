"""A small tier that only counts: how a rule would have done with a sample of what a real tier was asked for.

Owns the sampled keys that would be here, and the score. Does not know the real tier, nor what keys stand for.
Invariant: never more keys than `most`; the one with the smallest priority has left first, of equals the least recent.

A sample of a tenth of the keys in a tenth of the room has about the hit rate of the whole (Waldspurger et al., Cache
modeling and optimization using miniature simulations, ATC 2017). Parents need no care here: under the rules of
`adaptive` a block's priority is never above its parent's, as whoever uses the block uses the parent too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

FAR = 2.0**40  # before every use, in any unit of time, and still exact to a quarter of a thousandth when added to one
STAY_WEIGHT = 1 / 64  # of the newest departure in the time that things stay unused
MIN_SWEEP = 64
KEY_BYTES, ENTRY_BYTES = 300, 72  # of a key that is here, about: a place in a dict, two tuples and their numbers; stale

Rule = Callable[[bool, bool, float], float]
"""How long before its use a thing counts as used: of (never seen before, came in while the door was closed, stay)."""


class Trial:
    """What `rule` would hold, up to `most` keys, and a `score` of hits."""

    def __init__(self, rule: Rule, most: int) -> None:
        assert most > 0, "a trial of nothing"
        self.rule = rule
        self.most = most
        self.score = 0.0
        self._stay = 0.0  # how long what left of late had been unused
        self._here: dict[int, tuple[float, int, float]] = {}  # priority, turn, last use
        self._heap: list[tuple[float, int, int]] = []  # with the key; stale where `_here` says otherwise
        self._turn = 0

    def __len__(self) -> int:
        return len(self._here)

    @property
    def nbytes(self) -> int:
        return KEY_BYTES * len(self._here) + ENTRY_BYTES * len(self._heap)

    def use(self, key: int, now: float, *, is_new: bool, is_open: bool) -> None:
        """Count a hit if the key is here, and take it in if not; others leave for it."""
        is_here = key in self._here
        self.score += is_here
        if not is_here and len(self._here) >= self.most:
            self._make_room(now)
        priority = now - self.rule(is_new, not is_here and not is_open, self._stay)
        self._turn += 1
        self._here[key] = (priority, self._turn, now)
        heapq.heappush(self._heap, (priority, self._turn, key))
        if len(self._heap) > MIN_SWEEP + 3 * len(self._here):
            self._heap = [(priority, turn, key) for key, (priority, turn, _) in self._here.items()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that there is room for what is here, and that all of it can leave."""
        assert len(self._here) <= self.most, f"{len(self._here)} keys where {self.most} have room"
        queued = sum(self._here.get(key, (0.0, 0, 0.0))[1] == turn for _, turn, key in self._heap)
        assert queued == len(self._here), f"{len(self._here)} keys are here, {queued} can leave"

    def _make_room(self, now: float) -> None:
        while True:
            _, turn, key = heapq.heappop(self._heap)
            place = self._here.get(key)
            if place is not None and place[1] == turn:
                del self._here[key]
                self._stay += (now - place[2] - self._stay) * STAY_WEIGHT
                return
