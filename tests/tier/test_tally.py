"""Sums to which several threads add."""

from __future__ import annotations

import threading

from rekindle_tier.imports import Tally


class Slow(int):
    """A number in whose addition other threads get their turn, as they may in any."""

    other: threading.Thread

    def __radd__(self, sum_: int) -> int:
        self.other.start()
        self.other.join(0.05)
        return sum_ + int(self)


def test_nothing_that_threads_add_at_once_is_lost() -> None:
    tally, slow = Tally(), Slow(2)
    tally.add(bytes=1)
    slow.other = threading.Thread(target=lambda: tally.add(bytes=3, objects=1))
    tally.add(bytes=slow)
    slow.other.join()
    assert tally.sums() == {"bytes": 6, "objects": 1} and tally.sums()["missing"] == 0
