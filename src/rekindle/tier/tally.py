"""Figures that several threads add to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Tally:
    """Sums by name, each 0 until something was added. Any thread; none of what is added is lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[str] = Counter()

    def add(self, **numbers: int) -> None:
        """Add to some of the sums."""
        with self._lock:
            for name, number in numbers.items():
                self._sums[name] += number

    def sums(self) -> Mapping[str, int]:
        """Return all of them as they are now, as of one moment."""
        with self._lock:
            return self._sums.copy()
