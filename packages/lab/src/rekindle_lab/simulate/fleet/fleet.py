"""A run of a trace through a fleet: arrivals, queues, a shared tier, and a death.

Owns the order of events. At the same moment ends come before a return, a return before a death, a death before
arrivals. Requests arrive as in the trace, however long earlier ones take. What a dead replica had not finished is sent
again at once, and waits from its first arrival. All is determined by trace, plan and seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle_lab.simulate.fleet.jobs import Job, Service
from rekindle_lab.simulate.fleet.objects import ObjectTier, Traffic
from rekindle_lab.simulate.fleet.replica import Replica
from rekindle_lab.simulate.fleet.routes import Route, chooser_of
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.tier import Tier
from rekindle_lab.simulate.trace import Trace, TraceRequest

END, RETURN, DEATH, ARRIVAL = range(4)  # what comes first of events at the same moment
Event = Callable[[float], None]  # is passed the time
MAX_BRANCHES = 32  # a block that more different ones follow belongs to no session; 13 do at most in Mooncake's trace


# Which requests of a trace belong together: what a client would have named by a session header.
#
# A recorded day or a log says so. Hashed blocks do not: there a request continues the session in which the last of its
# known blocks appeared first, unless that block is common to many, as a system prompt is. Knows no replica.


def sessions_of(trace: Trace) -> list[int]:
    """Return the session of each request, numbered from 0 in order of appearance."""
    if all(request.session is not None for request in trace.requests):
        numbers: dict[str | None, int] = {}
        return [numbers.setdefault(request.session, len(numbers)) for request in trace.requests]
    common = _common_blocks(trace.requests)
    owners: dict[int, int] = {}  # block -> the session in which it appeared
    found: list[int] = []
    num_sessions = 0
    for request in trace.requests:
        last = next((block for block in reversed(request.blocks) if block in owners or block in common), None)
        session = num_sessions if last is None else owners.get(last, num_sessions)
        num_sessions = max(num_sessions, session + 1)
        for block in request.stored:
            if block not in common:
                owners.setdefault(block, session)
        found.append(session)
    return found


def _common_blocks(requests: Sequence[TraceRequest]) -> set[int]:
    """Return the blocks with more than MAX_BRANCHES different successors anywhere in the trace."""
    successors: dict[int, set[int]] = {}
    for request in requests:
        for block, after in zip(request.stored, request.stored[1:], strict=False):
            successors.setdefault(block, set()).add(after)
    return {block for block, after in successors.items() if len(after) > MAX_BRANCHES}


@dataclass(frozen=True, slots=True)
class Death:
    """One replica dies when `after` of the requests, a share, have arrived; it is back `back_s` later, or never.

    It is the one that has worked most until then.
    """

    after: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet: replicas that share `hot_blocks` evenly, a tier of `tier_blocks` (0: none), and how requests come.

    `arrivals` is the factor by which they come faster than in the trace.
    """

    num_replicas: int
    route: Route
    hot_blocks: int
    tier_blocks: int = 0
    arrivals: float = 1.0
    death: Death | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was served: seconds from its arrival to its service and to the end of it, and what it found."""

    job: Job
    replica: int
    queued_s: float
    wait_s: float
    service: Service


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What a fleet did with a trace: every request once, in the order in which they ended."""

    trace: Trace
    plan: Plan
    served: tuple[Served, ...]
    busy_s: tuple[float, ...]  # of each replica
    traffic: Traffic
    tier_evictions: int


def run_fleet(
    trace: Trace, plan: Plan, speeds: Speeds, progress: Callable[[int], None] = lambda done: None
) -> FleetRun:
    """Run a trace with times through a fleet; `progress` is passed 1 for each request that was served."""
    return _Fleet(trace, plan, speeds, progress).run()


class _Fleet:
    def __init__(self, trace: Trace, plan: Plan, speeds: Speeds, progress: Callable[[int], None]) -> None:
        self._trace = trace
        self._plan = plan
        self._progress = progress
        self._objects = ObjectTier(trace, plan.tier_blocks)
        self._replicas = [
            Replica(number, trace, self._memory, self._objects, speeds) for number in range(plan.num_replicas)
        ]
        self._choose = chooser_of(plan.route, plan.num_replicas, plan.seed)
        self._events: list[tuple[float, int, int, Event]] = []  # a heap: time, kind, number, what happens
        self._num_events = 0
        self._stranded: list[Job] = []  # came while no replica lived
        self._last: dict[int, tuple[int, int]] = {}  # session -> the replica that served it last, in which of its lives
        self._served: list[Served] = []

    def run(self) -> FleetRun:
        self._announce()
        while self._events:
            now, _, _, event = heapq.heappop(self._events)
            event(now)
        self._objects.check()
        for replica in self._replicas:
            replica.check()
        busy_s = tuple(replica.busy_s for replica in self._replicas)
        traffic, evictions = self._objects.traffic, self._objects.num_evictions
        return FleetRun(self._trace, self._plan, tuple(self._served), busy_s, traffic, evictions)

    def _memory(self) -> Tier:
        return Tier(self._trace, self._plan.hot_blocks // self._plan.num_replicas)

    def _announce(self) -> None:
        """Put every arrival and the death into the heap."""
        requests, death = self._trace.requests, self._plan.death
        for request, session in zip(requests, sessions_of(self._trace), strict=True):
            arrived_s = request.at_s / self._plan.arrivals
            self._at(arrived_s, ARRIVAL, partial(self._route, Job(request, session, arrived_s)))
        if death is not None:
            first_after = requests[min(int(death.after * len(requests)), len(requests) - 1)]
            self._at(first_after.at_s / self._plan.arrivals, DEATH, partial(self._kill, death))

    def _at(self, moment: float, kind: int, event: Event) -> None:
        heapq.heappush(self._events, (moment, kind, self._num_events, event))
        self._num_events += 1

    def _route(self, job: Job, now: float) -> None:
        live = [replica for replica in self._replicas if replica.is_live]
        if not live:
            self._stranded.append(job)
            return
        replica = self._choose(job, live, now)
        replica.enqueue(job, replica.plan(job.request).seconds)
        self._start(replica, now)

    def _start(self, replica: Replica, now: float) -> None:
        end = replica.start(now)
        if end is not None:
            self._at(end, END, partial(self._end, replica, replica.life))

    def _end(self, replica: Replica, life: int, now: float) -> None:
        if life != replica.life:
            return  # it died before
        job, service = replica.finish()
        here = (replica.number, life)
        if self._last.get(job.session) != here:
            self._objects.read_head()
        self._last[job.session] = here
        wait_s = now - job.arrived_s
        self._served.append(Served(job, replica.number, max(0.0, wait_s - service.seconds), wait_s, service))
        self._progress(1)
        self._start(replica, now)

    def _kill(self, death: Death, now: float) -> None:
        """End the life of the replica that has worked most, the first of several, and send its jobs elsewhere."""
        victim = max(self._replicas, key=lambda replica: replica.busy_s)
        lost = victim.die()
        if death.back_s is not None:
            self._at(now + death.back_s, RETURN, partial(self._revive, victim))
        for job in lost:
            self._route(job, now)

    def _revive(self, replica: Replica, now: float) -> None:
        replica.revive()
        stranded, self._stranded = self._stranded, []
        for job in stranded:
            self._route(job, now)
