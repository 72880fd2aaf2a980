"""A miniature simulation of a rule: how it would have done on a sample of a real tier's accesses.

Owns the sampled keys that would be cached, and the score. Does not know the real tier, nor what keys mean.
Invariant: never more keys than `most`; the smallest priority is evicted first, and the least recent of equal ones.

A sample of a tenth of the keys in a tenth of the room has about the hit rate of the whole (Waldspurger et al., Cache
modeling and optimization using miniature simulations, ATC 2017). Parents can be ignored: under the rules of `adaptive`
a block's priority is never above its parent's, as every use of a block is also a use of its parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

FAR = 2.0**40  # shifts before every use, in any time unit, yet a time plus FAR is exact to a quarter of a thousandth
STAY_WEIGHT = 1 / 64  # of the newest eviction in the average time that entries stay unused
MIN_SWEEP = 64
KEY_BYTES, ENTRY_BYTES = 300, 72  # about, of a cached key (a dict place, two tuples and their numbers), a stale entry

Rule = Callable[[bool, bool, float], float]
"""Shift of the last use into the past, from (never seen before, added while admission was closed, stay)."""


class Trial:
    """The keys that `rule` would cache, up to `most`, and a `score` of hits."""

    def __init__(self, rule: Rule, most: int) -> None:
        assert most > 0, "a trial of nothing"
        self.rule = rule
        self.most = most
        self.score = 0.0
        self._stay = 0.0  # average idle time of recently evicted keys
        self._here: dict[int, tuple[float, int, float]] = {}  # priority, turn, last use
        self._heap: list[tuple[float, int, int]] = []  # priority, turn, key; stale if it differs from `_here`
        self._turn = 0

    def __len__(self) -> int:
        return len(self._here)

    @property
    def nbytes(self) -> int:
        return KEY_BYTES * len(self._here) + ENTRY_BYTES * len(self._heap)

    def use(self, key: int, now: float, *, is_new: bool, is_open: bool) -> None:
        """Count a hit if the key is cached; otherwise add it, evicting another if full."""
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
        """Assert that the keys fit, and that each can be evicted."""
        assert len(self._here) <= self.most, f"{len(self._here)} keys where {self.most} have room"
        queued = sum(self._here.get(key, (0.0, 0, 0.0))[1] == turn for _, turn, key in self._heap)
        assert queued == len(self._here), f"{len(self._here)} keys are cached, {queued} can be evicted"

    def _make_room(self, now: float) -> None:
        while True:
            _, turn, key = heapq.heappop(self._heap)
            place = self._here.get(key)
            if place is not None and place[1] == turn:
                del self._here[key]
                self._stay += (now - place[2] - self._stay) * STAY_WEIGHT
                return
