"""How long one request waits for the object store, so that whatever comes of it costs at most a twelfth of computing.

A request could give up at any moment and compute the rest. Its first token is then later than without a tier by what
it has waited, and earlier by what computing the blocks that have come would have taken: that is its loss. It goes on
while its loss is at most the slack above the smallest one so far. So silence costs the slack, blocks that come more
slowly than they are computed cost the slack, whenever they begin to, and blocks that come faster are all waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# The slack, of what computing would take. Waiting must not cost more than a tenth (docs/fleet.md), and what is expected
# of computing is a guess.
SILENT_SHARE = 1 / 16
MOST_SHARE = 1 / 12  # where a head has come, so that its blocks are waited for longer than an answer usually takes


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
