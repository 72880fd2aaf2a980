"""The policy that tries four rules on a sample of the traffic, and follows the one that would have hit most.

Owns the trials, and which keys left of late: a thing that comes back is not new. Does not know who is held or who is
whose parent. All rules go by the last use, and some let a thing count as used earlier than it was:

    recent           nothing does: LRU
    new_earlier      what was never seen before, by as long as things stay here unused: half a chance
    new_first        what was never seen before, by so much that all of it leaves before the rest: documents read once
    strangers_first  what comes in, but for a sixteenth of the time: more things take turns than there is room for, and
                     LRU would keep none until its next turn (Qureshi et al., Adaptive insertion policies, 2007)

A priority is never later than the use, so nothing stays for the sake of a rule that was given up: the things that it
put behind leave first, the rest is LRU. Until something has left, everything is LRU.
A sample errs: where LRU is best it can cost about a hundredth of LRU's hits to follow another rule for a while.
Invariants: the rule followed is that of one of the trials; a key that came in is `known` if it had left and the memory,
2 to 4 keys a slot, has not been overwritten since.
"""

from __future__ import annotations

from array import array

from rekindle.cache.eviction.trial import FAR, Rule, Trial

UNKNOWN = -1  # the key of a slot nobody can recognise
LEAST_SAMPLE, MOST_SAMPLE = 64, 512  # keys in a trial, of a tier of four times as many or more
EPOCH = 250  # sampled uses between two judgements
FORGET = 0.9  # of the scores, at each
LEAD = 1.01  # the factor by which another rule must have hit more
STAY_WEIGHT = 1 / 256  # of the newest departure in the time that things stay unused
MEMORY_FACTOR = 2  # fingerprints a slot, at least
STRETCHES = 128  # in which the door is open or closed, in as many uses as there are slots
MIN_STRETCH = 16  # uses: several of one prompt mostly meet the same door
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


def strangers_first(is_new: bool, is_refused: bool, stay: float) -> float:
    return FAR if is_refused else 0.0


RULES: tuple[Rule, ...] = (recent, new_earlier, new_first, strangers_first)


def mixed(key: int) -> int:
    """Return 64 bits that depend on all bits of the key; the upper ones most."""
    key ^= key >> 32
    return key * _MIX & _MASK


class Memory:
    """Which keys left of late: one fingerprint a place, and the newest takes it."""

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
        """Have at least so many places; growing forgets everything, which is little: it doubles each time."""
        if num_keys > len(self._places):
            self._bits = (num_keys - 1).bit_length()
            self._places = array("I", bytes(4 << self._bits))

    def _find(self, key: int) -> tuple[int, int]:
        bits = mixed(key)
        return bits >> (64 - self._bits), (bits & _FINGERPRINT) or 1


class Adaptive:
    """Priorities by the rule that does best in trials; see the module's header."""

    name = "adaptive"
    remembers = True

    def __init__(self) -> None:
        self.rule: Rule = recent
        self.trials: list[Trial] = []
        self._keys, self._last_use = array("Q"), array("d")  # by slot
        self._states = bytearray()  # by slot: _KNOWN, _HAS_KEY
        self._memory = Memory()
        self._size = 0  # slots there have been, which is how many there are room for once one has left to make room
        self._size_tried = 0  # when the trials began
        self._share = 0  # of the keys that are tried, of 2^64
        self._stay = 0.0
        self._num_uses = self._num_tried = 0
        self._stretch = MIN_STRETCH
        self._is_open = True

    @property
    def nbytes(self) -> int:
        """Bytes of the columns, of the memory and of the trials."""
        return 17 * len(self._states) + self._memory.nbytes + sum(trial.nbytes for trial in self.trials)

    def came(self, slot: int, key: int) -> None:
        """Hear that a slot came in with the content of `key`, 0 to 2^64; UNKNOWN is new each time it comes."""
        if slot >= self._size:
            self._grow(slot + 1)
        if key == UNKNOWN:
            self._states[slot] = 0
            return
        self._keys[slot] = key
        self._states[slot] = _HAS_KEY | _KNOWN if key in self._memory else _HAS_KEY

    def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
        """Return when the slot counts as used: now, or as much earlier as the rule says."""
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
        """Remember what left, and begin the trials when the tier is full for the first time."""
        self._stay += (max(0.0, now - self._last_use[slot]) - self._stay) * STAY_WEIGHT
        if self._states[slot]:
            self._memory.add(self._keys[slot])
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
                trial.score *= FORGET

    def _begin(self) -> None:
        """Begin trials for the size that the tier has; again when it has doubled, with the rule that is followed."""
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
        self._memory.make_room(MEMORY_FACTOR * size)

    def check(self) -> None:
        """Assert what the module's header promises of the trials."""
        assert not self.trials or self.rule in [trial.rule for trial in self.trials], "a rule that nobody tried"
        assert self.trials or self.rule is recent, "a rule without trials"
        for trial in self.trials:
            trial.check()
