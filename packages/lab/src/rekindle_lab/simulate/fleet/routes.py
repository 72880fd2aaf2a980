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
from bisect import bisect_right
from collections.abc import Callable, Container, Sequence
from hashlib import blake2b
from typing import Literal

from rekindle_lab.simulate.fleet.jobs import Job
from rekindle_lab.simulate.fleet.replica import Replica

Route = Literal["random", "queue", "session", "prefix"]
ROUTES: tuple[Route, ...] = ("random", "queue", "session", "prefix")
Chooser = Callable[[Job, Sequence[Replica], float], Replica]  # of a job, the live replicas and the time
POINTS = 128  # places of a replica: shares of the circle differ by about a tenth


# A consistent hash ring: which replica a session belongs to, the same for every router without shared state.
#
# Each replica has POINTS places on a circle; a session belongs to the first place after its own. When a replica is
# away, only its sessions move, and they return with it.


class Ring:
    """The places of `num_replicas` replicas, drawn by `seed`."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self._seed = seed
        places = sorted(
            (self._place(f"replica {number}, point {point}"), number)
            for number in range(num_replicas)
            for point in range(POINTS)
        )
        self._places = [place for place, _ in places]
        self._owners = [number for _, number in places]

    def owner(self, session: int, live: Container[int]) -> int:
        """Return the replica in `live` whose place comes first after the session's; ValueError if none is there."""
        start = bisect_right(self._places, self._place(f"session {session}"))
        for owner in (*self._owners[start:], *self._owners[:start]):
            if owner in live:
                return owner
        raise ValueError("no replica of the ring is live")

    def _place(self, name: str) -> int:
        return int.from_bytes(blake2b(f"{self._seed}: {name}".encode(), digest_size=8).digest())


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
