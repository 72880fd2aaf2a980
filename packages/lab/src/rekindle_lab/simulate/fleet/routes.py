"""Routes: how a request finds its replica.

    random    any replica
    queue     two replicas drawn by lot, the one with fewer unfinished requests
    session   always the replica that owns the session on the ring; while that is dead, the next one on the ring
    prefix    a session's first request where it is done soonest, with what is in memory and what is queued there; later
              ones to the same replica, until it dies

`session` needs no state and asks no replica: any number of routers agree, and a replica that returns gets its sessions
back. A table of sessions that sends new ones to the shortest queue is lost with its router.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

from rekindle_lab.simulate.fleet.jobs import Job
from rekindle_lab.simulate.fleet.replica import Replica
from rekindle_lab.simulate.fleet.ring import Ring

Route = Literal["random", "queue", "session", "prefix"]
ROUTES: tuple[Route, ...] = ("random", "queue", "session", "prefix")
Chooser = Callable[[Job, Sequence[Replica], float], Replica]  # of a job, the live replicas and the time


def chooser_of(route: Route, num_replicas: int, seed: int) -> Chooser:
    """Return the rule of a route with its state; the live replicas it is passed are never none."""
    draw = random.Random(seed)
    if route == "random":
        return lambda job, live, now: draw.choice(live)
    if route == "queue":
        return _TwoChoices(draw)
    return _ByRing(Ring(num_replicas, seed)) if route == "session" else _ByPrefix(draw)


class _TwoChoices:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    def __call__(self, job: Job, live: Sequence[Replica], now: float) -> Replica:
        drawn = self._draw.sample(live, min(2, len(live)))  # in random order, which decides between equal queues
        return min(drawn, key=lambda replica: replica.num_unfinished)


class _ByRing:
    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def __call__(self, job: Job, live: Sequence[Replica], now: float) -> Replica:
        by_number = {replica.number: replica for replica in live}
        return by_number[self._ring.owner(job.session, by_number)]


class _ByPrefix:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._homes: dict[int, int] = {}  # session -> number of its replica

    def __call__(self, job: Job, live: Sequence[Replica], now: float) -> Replica:
        home = next((each for each in live if each.number == self._homes.get(job.session)), None)
        if home is None:
            drawn = self._draw.sample(live, len(live))  # of equal ones any
            home = min(drawn, key=lambda replica: replica.queue_s(now) + replica.plan(job.request).seconds)
            self._homes[job.session] = home.number
        return home
