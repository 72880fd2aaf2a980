"""Figures of a run: shares of the prompts found, waits, how even the load was, and how many sessions moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle_lab.simulate.fleet.fleet import FleetRun


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares of all blocks asked for, and of tokens; waits in seconds.

    `hot` and `tier` were found; `left` was in the tier, too, but computed sooner than loaded.

    A wait is from the arrival of a request to its first token; `mean_queued_s` is the part before its service.
    `busiest` is the work of the busiest replica over the mean of all, `busy` the share of replicas' time spent on work,
    from the first arrival to the last end. A session has moved if a request of it was served on another replica than
    the one before; `moves` counts these requests.
    """

    hot: float
    tier: float
    left: float
    hot_tokens: float
    tier_tokens: float
    mean_wait_s: float
    p99_wait_s: float
    mean_queued_s: float
    busiest: float
    busy: float
    sessions: int
    moved_sessions: int
    moves: int

    @property
    def found(self) -> float:
        """The share of blocks found, hot or in the tier."""
        return self.hot + self.tier


def summarise(run: FleetRun) -> Summary:
    """Return the figures of a run over a trace with requests."""
    served, services = run.served, [each.service for each in run.served]
    waits = [each.wait_s for each in served]
    asked, tokens = max(run.trace.num_asked, 1), max(run.trace.num_tokens, 1)
    work, num_replicas = sum(run.busy_s), len(run.busy_s)
    ended_s = max(each.job.arrived_s + each.wait_s for each in served)
    moved = _moves(run)
    return Summary(
        hot=sum(service.hot_blocks for service in services) / asked,
        tier=sum(service.tier_blocks for service in services) / asked,
        left=sum(service.left_blocks for service in services) / asked,
        hot_tokens=sum(service.hot_tokens for service in services) / tokens,
        tier_tokens=sum(service.tier_tokens for service in services) / tokens,
        mean_wait_s=sum(waits) / len(waits),
        p99_wait_s=percentile(waits, 99),
        mean_queued_s=sum(each.queued_s for each in served) / len(served),
        busiest=max(run.busy_s) * num_replicas / work,
        busy=work / num_replicas / ended_s,
        sessions=len({each.job.session for each in served}),
        moved_sessions=len(set(moved)),
        moves=len(moved),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least so many percent of all do not exceed (the nearest rank)."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def _moves(run: FleetRun) -> list[int]:
    """Return the session of each request that was served on another replica than its session's request before."""
    homes: dict[int, int] = {}
    moved = []
    for each in run.served:
        if homes.setdefault(each.job.session, each.replica) != each.replica:
            moved.append(each.job.session)
        homes[each.job.session] = each.replica
    return moved
