"""How fast the object store is, as measured: whether loading blocks beats computing them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

SMALL_BYTES = 64 << 10  # up to here an answer shows the latency, above it the bandwidth
WEIGHT = 0.2  # of a new measurement
OLD_S = 60.0  # after that a bandwidth says nothing about now


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
