"""A breaker: after failures in a row nobody waits for the object store for a while, then one tries again."""

from __future__ import annotations

import threading
from collections.abc import Callable

FAILURES = 2  # in a row, before it opens
FIRST_S, LONGEST_S = 1.0, 60.0  # how long it stays open; twice as long after each failed attempt


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
