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

from array import array

from rekindle.cache.eviction.trial import FAR, Rule, Trial

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
