"""A request on its way through a fleet, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle_lab.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a session that arrived at `arrived_s`, seconds from the first arrival."""

    request: TraceRequest
    session: int
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """The plan of a job on a replica: blocks found hot and loaded from the tier, in tokens too, and the seconds.

    `left_blocks` are in the tier as well, but are computed sooner than loaded.
    """

    hot_blocks: int
    tier_blocks: int
    left_blocks: int
    hot_tokens: int
    tier_tokens: int
    seconds: float
