"""The arrivals that a fleet bears: the largest factor with which the waits' 99th percentile keeps within a bound.

The factor is doubled while waits keep within the bound, or halved until they do, then the interval is narrowed to
PRECISION. Waits need not grow with every step, so the answer is a factor next to one that was tried and is too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rekindle_lab.simulate.fleet.fleet import FleetRun, Plan, run_fleet
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.fleet.summary import Summary, summarise
from rekindle_lab.simulate.trace import Trace

PRECISION = 1.05  # of the first factor that is too large over the last that is not
MAX_STEPS = 12  # doublings or halvings


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the search."""

    run: FleetRun
    summary: Summary
    is_within: bool


@dataclass(frozen=True, slots=True)
class Saturation:
    """All points in ascending order of arrivals; `borne` is the largest within the bound, None if none is.

    `is_bounded`: whether a point above it was tried and is too large.
    """

    points: tuple[Point, ...]
    borne: Point | None
    is_bounded: bool


def saturate(
    trace: Trace, plan: Plan, speeds: Speeds, bound_s: float, progress: Callable[[int], None] = lambda done: None
) -> Saturation:
    """Search upwards or downwards from the plan's own arrivals."""

    def attempt(arrivals: float) -> Point:
        run = run_fleet(trace, replace(plan, arrivals=arrivals), speeds, progress)
        summary = summarise(run)
        return Point(run, summary, summary.p99_wait_s <= bound_s)

    points = sorted(_search(plan.arrivals, attempt), key=lambda point: point.run.plan.arrivals)
    beyond = next((at for at, point in enumerate(points) if not point.is_within), len(points))
    return Saturation(tuple(points), points[beyond - 1] if beyond else None, beyond < len(points))


def _search(start: float, attempt: Callable[[float], Point]) -> Iterator[Point]:
    point = attempt(start)
    yield point
    was_within, low, high = point.is_within, start, start
    for _ in range(MAX_STEPS):
        low, high = (high, high * 2) if was_within else (low / 2, low)
        point = attempt(high if was_within else low)
        yield point
        if point.is_within != was_within:
            break
    else:
        return
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        point = attempt(middle)
        yield point
        low, high = (middle, high) if point.is_within else (low, middle)
