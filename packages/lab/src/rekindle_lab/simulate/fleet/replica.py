"""One replica: hot memory, and a queue of prefills that are served one after the other in order of arrival.

Owns what a request finds here and how long it takes: the leading blocks that are hot, then those that the tier adds, if
loading them is faster than computing them. Blocks are hot as soon as their request is served: nothing else runs here
before it ends. Replies take no time, since they are decoded in batches next to the prefills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rekindle_lab.simulate.fleet.jobs import Job, Service
from rekindle_lab.simulate.fleet.objects import ObjectTier
from rekindle_lab.simulate.fleet.speeds import STEP_S, Speeds
from rekindle_lab.simulate.tier import Tier
from rekindle_lab.simulate.trace import Trace, TraceRequest


class Replica:
    """Replica `number`; `memory` makes its empty hot memory, now and after a death."""

    def __init__(
        self, number: int, trace: Trace, memory: Callable[[], Tier], objects: ObjectTier, speeds: Speeds
    ) -> None:
        self.number = number
        self.is_live = True
        self.life = 0  # deaths so far: what an earlier life began has no end
        self.busy_s = 0.0  # of requests that were served to their end
        self.num_served = 0
        self._trace = trace
        self._memory = memory
        self._hot = memory()
        self._objects = objects
        self._speeds = speeds
        self._queue: deque[tuple[Job, float]] = deque()  # with the seconds each was expected to take when it came
        self._queued_s = 0.0
        self._running: tuple[Job, Service, float] | None = None  # with its end

    @property
    def num_unfinished(self) -> int:
        """Requests queued or being served."""
        return len(self._queue) + (self._running is not None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being served."""
        return self._running is None

    def queue_s(self, now: float) -> float:
        """Return the seconds until a request that comes now would be served, as far as can be known."""
        left = max(0.0, self._running[2] - now) if self._running else 0.0
        return left + self._queued_s

    def plan(self, request: TraceRequest) -> Service:
        """Return what a request would find and take if it were served now."""
        trace, blocks = self._trace, request.blocks
        hot = self._hot.depth(blocks)
        there = loaded = max(0, self._objects.depth(blocks) - hot)
        hot_tokens = trace.tokens_in(request, hot)
        tier_tokens = trace.tokens_in(request, hot + there) - hot_tokens
        if not self._speeds.is_load_faster(tier_tokens):
            loaded = tier_tokens = 0
        computed = max(1, request.num_tokens - hot_tokens - tier_tokens)  # the last token's logits are never stored
        seconds = STEP_S + self._speeds.compute_s(computed) + self._speeds.load_s(tier_tokens)
        return Service(hot, loaded, there - loaded, hot_tokens, tier_tokens, seconds)

    def enqueue(self, job: Job, expected_s: float) -> None:
        """Append a job to the queue."""
        self._queue.append((job, expected_s))
        self._queued_s += expected_s

    def start(self, now: float) -> float | None:
        """Serve the next job and return its end; None if something is being served, or nothing is queued."""
        if self._running or not self._queue:
            return None
        job, expected_s = self._queue.popleft()
        self._queued_s = self._queued_s - expected_s if self._queue else 0.0  # no rounding is left when it is empty
        service = self.plan(job.request)
        self._hot.hold(job.request.blocks)
        self._hot.add(job.request.stored)
        self._hot.release()
        self._objects.read(service.tier_blocks, service.tier_tokens)
        self._running = (job, service, now + service.seconds)
        return self._running[2]

    def finish(self) -> tuple[Job, Service]:
        """Return the job that was served, and how; its blocks are in the tier from now on."""
        assert self._running is not None, "nothing is being served"
        job, service, _ = self._running
        self._running = None
        self._objects.write(job.request)
        self.busy_s += service.seconds
        self.num_served += 1
        return job, service

    def die(self) -> list[Job]:
        """Lose the hot memory and return the unfinished jobs, the one being served first."""
        lost = [self._running[0]] if self._running else []
        lost += [job for job, _ in self._queue]
        self._running = None
        self._queue.clear()
        self._queued_s = 0.0
        self.is_live = False
        self.life += 1
        self._hot = self._memory()
        return lost

    def revive(self) -> None:
        """Come back with an empty memory."""
        self.is_live = True

    def check(self) -> None:
        """Assert that the memory is whole and the expected seconds are those of the queue."""
        self._hot.check()
        assert abs(self._queued_s - sum(expected for _, expected in self._queue)) < 1e-6, "seconds of the queue"
        assert self.is_live or not self.num_unfinished, "a dead replica has work"
