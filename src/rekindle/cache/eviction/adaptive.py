"""The policy that tries four rules on a sample of the traffic and follows the one that would have hit most.

Owns the trials, and the recently evicted keys: an entry that returns is not new. Does not know which slots are held or
are parents. All rules order by last use; some shift the last use of certain entries into the past:

    recent       none: LRU
    new_earlier  entries never seen before, by the time entries stay unused before eviction: about half a chance
    new_first    entries never seen before, by so much that all are evicted before the rest: documents read once
    bimodal      every added entry except in a sixteenth of the time: for working sets that cycle through more entries
                 than fit, where LRU would hit none (Qureshi et al., Adaptive insertion policies, 2007)

A priority is never later than the use, so an abandoned rule protects nothing: entries it shifted are evicted first, the
rest is LRU. Until the first eviction, everything is LRU.
Sampling errs: where LRU is best, following another rule for a while can cost about a hundredth of LRU's hits.
Invariants: the current rule belongs to one of the trials; an added key is `known` if it was evicted before and its
place in the memory of evicted keys, 2 to 4 per slot, has not been overwritten since.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable

UNKNOWN = -1  # the key of a slot that cannot be recognised
LEAST_SAMPLE, MOST_SAMPLE = 64, 512  # keys in a trial, of a tier of four times as many or more
EPOCH = 250  # sampled uses between two comparisons
DECAY = 0.9  # of the scores, at each
LEAD = 1.01  # the factor by which another rule must have hit more
STAY_WEIGHT = 1 / 256  # of the newest eviction in the average time that entries stay unused
MEMORY_FACTOR = 2  # fingerprints per slot, at least
STRETCHES = 128  # per as many uses as there are slots; `bimodal` admits or refuses for a whole stretch
MIN_STRETCH = 16  # uses: those of one prompt mostly fall in the same stretch
OPEN_ONE_IN = 16
_KNOWN, _HAS_KEY = 1, 2
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1  # 2^64 over the golden ratio (Knuth, vol. 3, 6.4)
_FINGERPRINT = (1 << 32) - 1
FAR = 2.0**40  # shifts before every use, in any time unit, yet a time plus FAR is exact to a quarter of a thousandth
STAY_WEIGHT = 1 / 64  # of the newest eviction in the average time that entries stay unused
MIN_SWEEP = 64
KEY_BYTES, ENTRY_BYTES = 300, 72  # about, of a cached key (a dict place, two tuples and their numbers), a stale entry

Rule = Callable[[bool, bool, float], float]
"""Shift of the last use into the past, from (never seen before, added while admission was closed, stay)."""


# A miniature simulation of a rule: how it would have done on a sample of a real tier's accesses.
#
# Owns the sampled keys that would be cached, and the score. Does not know the real tier, nor what keys mean.
# Invariant: never more keys than `most`; the smallest priority is evicted first, and the least recent of equal ones.
#
# A sample of a tenth of the keys in a tenth of the room has about the hit rate of the whole (Waldspurger et al., Cache
# modeling and optimization using miniature simulations, ATC 2017). Parents can be ignored: under `adaptive`'s rules
# a block's priority is never above its parent's, as every use of a block is also a use of its parent.


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


def recent(is_new: bool, is_refused: bool, stay: float) -> float:
    return 0.0


def new_earlier(is_new: bool, is_refused: bool, stay: float) -> float:
    return stay if is_new else 0.0


def new_first(is_new: bool, is_refused: bool, stay: float) -> float:
    return FAR if is_new else 0.0


def bimodal(is_new: bool, is_refused: bool, stay: float) -> float:
    return FAR if is_refused else 0.0


RULES: tuple[Rule, ...] = (recent, new_earlier, new_first, bimodal)


def mixed(key: int) -> int:
    """Return 64 bits that depend on all bits of the key, the upper ones most."""
    key ^= key >> 32
    return key * _MIX & _MASK


class EvictedKeys:
    """Recently evicted keys: one fingerprint per place, overwritten by the newest."""

    def __init__(self) -> None:
        self._bits = 6
        self._places = array("I", bytes(4 << self._bits))

    def __contains__(self, key: int) -> bool:
        place, fingerprint = self._find(key)
        return self._places[place] == fingerprint

    @property
    def nbytes(self) -> int:
        return 4 * len(self._places)

    def add(self, key: int) -> None:
        place, fingerprint = self._find(key)
        self._places[place] = fingerprint

    def make_room(self, num_keys: int) -> None:
        """Grow to at least `num_keys` places, forgetting everything; rare, as the size doubles each time."""
        if num_keys > len(self._places):
            self._bits = (num_keys - 1).bit_length()
            self._places = array("I", bytes(4 << self._bits))

    def _find(self, key: int) -> tuple[int, int]:
        bits = mixed(key)
        return bits >> (64 - self._bits), (bits & _FINGERPRINT) or 1


class Adaptive:
    """Priorities by the rule that does best in trials; see the module docstring."""

    name = "adaptive"
    remembers = True

    def __init__(self) -> None:
        self.rule: Rule = recent
        self.trials: list[Trial] = []
        self._keys, self._last_use = array("Q"), array("d")  # by slot
        self._states = bytearray()  # by slot: _KNOWN, _HAS_KEY
        self._evicted = EvictedKeys()
        self._size = 0  # slots seen so far, which equals the capacity once one has been evicted
        self._size_tried = 0  # `_size` when the trials began
        self._share = 0  # of sampled keys, of 2^64
        self._stay = 0.0
        self._num_uses = self._num_tried = 0
        self._stretch = MIN_STRETCH
        self._is_open = True

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, the evicted keys and the trials."""
        return 17 * len(self._states) + self._evicted.nbytes + sum(trial.nbytes for trial in self.trials)

    def came(self, slot: int, key: int) -> None:
        """Note that a slot was added with the content of `key`, 0 to 2^64; UNKNOWN is new every time."""
        if slot >= self._size:
            self._grow(slot + 1)
        if key == UNKNOWN:
            self._states[slot] = 0
            return
        self._keys[slot] = key
        self._states[slot] = _HAS_KEY | _KNOWN if key in self._evicted else _HAS_KEY

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        """Return when the slot counts as used: now, or earlier by the rule's shift."""
        self._num_uses += 1
        if self._num_uses % self._stretch == 0:
            self._is_open = mixed(mixed(self._num_uses // self._stretch)) * OPEN_ONE_IN < 1 << 64
        self._last_use[slot] = now
        state = self._states[slot]
        is_new = num_uses == 1 and not state & _KNOWN
        if state and self.trials:
            key = self._keys[slot]
            if mixed(key) < self._share:
                self._try(key, now, is_new)
        return now - self.rule(is_new, num_uses == 1 and not self._is_open, self._stay)

    def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
        """Remember the evicted key, and start the trials when the tier is full for the first time."""
        self._stay += (max(0.0, now - self._last_use[slot]) - self._stay) * STAY_WEIGHT
        if self._states[slot]:
            self._evicted.add(self._keys[slot])
        if self._size >= 2 * self._size_tried:
            self._begin()

    def _try(self, key: int, now: float, is_new: bool) -> None:
        for trial in self.trials:
            trial.use(key, now, is_new=is_new, is_open=self._is_open)
        self._num_tried += 1
        if self._num_tried % EPOCH == 0:
            best = max(self.trials, key=lambda trial: trial.score)
            followed = next(trial for trial in self.trials if trial.rule is self.rule)
            if best.score > LEAD * followed.score:
                self.rule = best.rule
            for trial in self.trials:
                trial.score *= DECAY

    def _begin(self) -> None:
        """Start trials for the current tier size; restarted when it has doubled, keeping the current rule."""
        self._size_tried = size = self._size
        most = min(size, max(LEAST_SAMPLE, min(MOST_SAMPLE, size // 4)))
        self._share = (most << 64) // size
        self._stretch = max(MIN_STRETCH, size // STRETCHES)
        self.trials = [Trial(rule, most) for rule in RULES]

    def _grow(self, size: int) -> None:
        self._size = size
        more = max(size, 64, len(self._states) * 5 // 4) - len(self._states)
        if size > len(self._states):
            self._keys.frombytes(bytes(8 * more))
            self._last_use.frombytes(bytes(8 * more))
            self._states.extend(bytes(more))
        self._evicted.make_room(MEMORY_FACTOR * size)

    def check(self) -> None:
        """Assert the invariants of the trials."""
        assert not self.trials or self.rule in [trial.rule for trial in self.trials], "a rule without its trial"
        assert self.trials or self.rule is recent, "a rule without trials"
        for trial in self.trials:
            trial.check()
