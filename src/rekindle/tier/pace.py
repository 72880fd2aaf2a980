"""How fast the object store is, as measured: whether loading blocks beats computing them."""

from __future__ import annotations

import threading

SMALL_BYTES = 64 << 10  # up to here an answer shows the latency, above it the bandwidth
WEIGHT = 0.2  # of a new measurement


class Pace:
    """Latency in seconds and bandwidth in bytes per second, moving averages. Any thread.

    Until something was measured: 30 ms and 100 MB/s, an object store in the same data centre, from one thread.
    """

    def __init__(self, *, latency_s: float = 0.03, bytes_per_s: float = 1e8) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()

    def saw(self, num_bytes: int, seconds: float) -> None:
        """Learn from an answer, or from several that were on their way together."""
        with self._lock:
            if num_bytes <= SMALL_BYTES:
                self.latency_s += WEIGHT * (seconds - self.latency_s)
            else:
                moving = max(seconds - self.latency_s, seconds / 10)
                self.bytes_per_s += WEIGHT * (num_bytes / max(moving, 1e-6) - self.bytes_per_s)

    def predict(self, num_bytes: int) -> float:
        """Return the expected seconds until this much has arrived."""
        return self.latency_s + num_bytes / self.bytes_per_s
