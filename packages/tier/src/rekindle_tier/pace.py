"""How fast the object store is, as measured: whether loading beats computing, whether to ask, and how long to wait."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

SMALL_BYTES = 64 << 10  # up to here an answer shows the latency, above it the bandwidth
WEIGHT = 0.2  # of a new measurement
OLD_S = 60.0  # after that a bandwidth says nothing about now
FAILURES = 2  # in a row, before it opens
FIRST_S, LONGEST_S = 1.0, 60.0  # how long it stays open; twice as long after each failed attempt
# The slack, of what computing would take. Waiting must not cost more than a tenth (docs/fleet.md), and what is expected
# of computing is a guess.
SILENT_SHARE = 1 / 16
MOST_SHARE = 1 / 12  # where a head has come, so that its blocks are waited for longer than an answer usually takes


class Pace:
    """Latency in seconds and bandwidth in bytes per second, moving averages. Any thread; `clock` is monotonic.

    The bandwidth's average is geometric: an import that crawls at a thousandth of it quarters it, and one that is as
    much faster gives that back.
    Until something was measured: 30 ms and 100 MB/s, an object store in the same data centre, from one thread.
    """

    def __init__(
        self, *, latency_s: float = 0.03, bytes_per_s: float = 1e8, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._hoped = bytes_per_s
        self._clock = clock
        self._seen = clock()
        self._lock = threading.Lock()

    def saw(self, num_bytes: int, seconds: float) -> None:
        """Learn from an answer, or from several that were on their way together."""
        with self._lock:
            if num_bytes <= SMALL_BYTES:
                self.latency_s += WEIGHT * (seconds - self.latency_s)
            else:
                self._learn(num_bytes, seconds)

    def missed(self, num_bytes: int, seconds: float) -> None:
        """Learn that this much had not come after so long: as if it came after twice the time, if that is news."""
        if 2 * seconds > self.predict(num_bytes):
            self.saw(num_bytes, 2 * seconds)

    def crawled(self, num_bytes: int, seconds: float) -> None:
        """Learn from an import that was given up, of which this much had come, however little it is."""
        with self._lock:
            self._learn(num_bytes, seconds)

    def predict(self, num_bytes: int) -> float:
        """Return the expected seconds until this much has arrived.

        A bandwidth that nobody has measured for a minute keeps nobody from trying: then at least 100 MB/s are expected.
        """
        is_old = self._clock() > self._seen + OLD_S
        return self.latency_s + num_bytes / (max(self.bytes_per_s, self._hoped) if is_old else self.bytes_per_s)

    def _learn(self, num_bytes: int, seconds: float) -> None:
        moving = max(seconds - self.latency_s, seconds / 10, 1e-6)
        now = self._clock()
        measured, is_old = num_bytes / moving, now > self._seen + OLD_S
        if is_old and measured > self.bytes_per_s:
            self.bytes_per_s = measured
        elif measured > 0:
            self.bytes_per_s *= math.exp(WEIGHT * math.log(measured / self.bytes_per_s))
        self._seen = now


class Breaker:
    """Says whether the object store may be asked. Any thread; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float], *, failures: int = FAILURES) -> None:
        self._clock = clock
        self._most_failures = failures
        self._lock = threading.Lock()
        self._num_failures = 0
        self._until = 0.0
        self.reason: str | None = None  # of the last failure, None after a success

    @property
    def is_open(self) -> bool:
        """Whether failures in a row have opened it, and no success has closed it since."""
        return self._num_failures >= self._most_failures

    def allows(self) -> bool:
        """Whether to ask now. Open, it lets one caller through when its time is over, and waits for that outcome."""
        with self._lock:
            if not self.is_open:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause()
            return True

    def succeeded(self) -> None:
        """Note an answer."""
        with self._lock:
            self._num_failures, self.reason = 0, None

    def failed(self, reason: str) -> None:
        """Note a failure, or that no answer came in time."""
        with self._lock:
            self._num_failures += 1
            self.reason = reason
            self._until = self._clock() + self._pause()

    def _pause(self) -> float:
        return min(LONGEST_S, FIRST_S * 2.0 ** (min(self._num_failures, 32) - self._most_failures))


# How long one request waits for the object store, so that whatever comes of it costs at most a twelfth of computing.
#
# A request could give up at any moment and compute the rest. Its first token is then later than without a tier by what
# it has waited, and earlier by what computing the blocks that have come would have taken: that is its loss. It goes on
# while its loss is at most the slack above the smallest one so far. So silence costs the slack, blocks that come more
# slowly than they are computed cost the slack, whenever they begin to, and blocks that come faster are all waited for.


def head_s(compute_s: float, *, wait_s: float) -> float:
    """Return how long a head is waited for, in seconds, if the rest takes `compute_s` to compute."""
    return max(wait_s, SILENT_SHARE * compute_s)


def can_ask(latency_s: float, compute_s: float, *, wait_s: float) -> bool:
    """Whether there is time for two answers, of a head and of its blocks, both as slow as usual."""
    return latency_s <= max(wait_s, MOST_SHARE / 2 * compute_s)


class Patience:
    """Of one request, from now on: it has waited for `waited_before_s` before, and may wait for `wait_s` anyway."""

    def __init__(
        self,
        compute_s: float,
        *,
        wait_s: float,
        waited_before_s: float = 0.0,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_s = max(wait_s, compute_s)
        self._compute_s = compute_s
        self._slack_s = max(
            waited_before_s + wait_s,
            SILENT_SHARE * compute_s,
            min(waited_before_s + 2 * latency_s, MOST_SHARE * compute_s),
        )
        self._clock = clock
        self._began = clock()
        self._waited_before_s = waited_before_s
        self._saved_s = self._least_loss_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds from the beginning until now."""
        return self._clock() - self._began

    def left_to_compute(self, seconds: float) -> None:
        """Note that, with what has come, the rest would take so long to compute."""
        self._saved_s = self._compute_s - seconds
        self._least_loss_s = min(self._least_loss_s, self._loss_s())

    def seconds_left(self) -> float:
        """Return how long to wait for the next object; not positive: give up."""
        return min(self._slack_s - (self._loss_s() - self._least_loss_s), self.most_s - self.waited_s)

    def _loss_s(self) -> float:
        return self._waited_before_s + self.waited_s - self._saved_s
