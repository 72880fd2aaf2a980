"""Runs of a trace through one or many memories: which blocks of each prompt were found, in which tier.

Owns what counts as found: a prompt's longest prefix whose blocks are all present, in hot memory first, then as far as
the disk extends it. Every block that a request used or computed is in both tiers afterwards, as with the engine's
write-behind, so what hot memory evicts stays on disk. A request takes no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from rekindle_lab.simulate.tier import Tier
from rekindle_lab.simulate.trace import Trace, TraceRequest

Policy = Literal["lru", "offline optimum"]
LRU: Policy = "lru"  # the server's order
OPTIMUM: Policy = "offline optimum"
STEP = 64  # requests between two calls of `progress`
Progress = Callable[[int], None]
NEVER = 1 << 60


# The upper bound: hits of a memory that knows all future requests and need not store what is requested.
#
# Belady's rule with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
# Systems Journal 1966): of everything stored and just computed, the blocks with the nearest next use stay. A prefix is
# requested whenever its continuation is, so a parent's next use is never later than its child's: leaves are evicted
# first.
#
# It maximises blocks. Another choice may find more tokens where prompts end with partial blocks: one token occupies a
# whole block.


def optimal_hits(trace: Trace, num_blocks: int) -> Iterator[int]:
    """Yield, for each request, how many of its first blocks a memory of `num_blocks` can hold at best.

    O(log n) per block of the trace.
    """
    held: dict[int, int] = {}  # block -> its next use
    evictable: list[tuple[int, int]] = []  # (-next use, -block), some stale; of equals the youngest is evicted
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        hits = 0
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        yield hits
        for block, use in zip(request.stored, uses, strict=True):
            if use == NEVER:
                held.pop(block, None)
            else:
                held[block] = use
                heapq.heappush(evictable, (-use, -block))
        while len(held) > num_blocks:
            use, block = heapq.heappop(evictable)
            if held.get(-block) == -use:
                del held[-block]


def next_uses(trace: Trace) -> list[list[int]]:
    """Return, for each block that each request stores, the number of the next request whose prompt has that block."""
    found: list[list[int]] = []
    following: dict[int, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        found.append([following.get(block, NEVER) for block in request.stored])
        following.update(dict.fromkeys(request.blocks, number))
    return found[::-1]


@dataclass(frozen=True, slots=True)
class Memory:
    """What to simulate: the hot tier's blocks, the disk's (0: no disk), a time to live, and what is evicted."""

    num_blocks: int
    disk_blocks: int = 0
    ttl_s: float | None = None
    policy: Policy = LRU


@dataclass(frozen=True, slots=True)
class Found:
    """Sums over a trace: prompt blocks requested and found in each tier, and the same in tokens."""

    memory: Memory
    num_blocks: int = 0
    hot_blocks: int = 0
    disk_blocks: int = 0
    num_tokens: int = 0
    hot_tokens: int = 0
    disk_tokens: int = 0
    num_evictions: int = 0

    def counts(self, unit: Literal["blocks", "tokens"]) -> tuple[int, int, int]:
        """Return the counts requested, found hot, and found only on disk."""
        if unit == "blocks":
            return self.num_blocks, self.hot_blocks, self.disk_blocks
        return self.num_tokens, self.hot_tokens, self.disk_tokens

    def shares(self, unit: Literal["blocks", "tokens"]) -> tuple[float, float]:
        """Return the shares found hot and only on disk; 0 if nothing was requested."""
        asked, hot, disk = self.counts(unit)
        return hot / max(asked, 1), disk / max(asked, 1)


class _Clock:
    """The trace's time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(trace: Trace, memory: Memory, *, progress: Progress = lambda done: None) -> Found:
    """Run one memory over a trace; `progress` is passed the number of requests done since its last call."""
    num_evictions = 0
    sizes = [memory.num_blocks, *([memory.disk_blocks] if memory.disk_blocks else [])]
    if memory.policy == OPTIMUM:
        depths = zip(*(optimal_hits(trace, size) for size in sizes), strict=True)
        found = _sum(trace, depths, progress)
    else:
        clock = _Clock()
        tiers = [Tier(trace, size, ttl_s=memory.ttl_s, clock=clock) for size in sizes]
        found = _sum(trace, _run(trace.requests, tiers, clock), progress)
        num_evictions = tiers[0].num_evictions
    (hot_blocks, hot_tokens), (all_blocks, all_tokens) = found
    return Found(
        memory,
        trace.num_asked,
        hot_blocks,
        all_blocks - hot_blocks,
        trace.num_tokens,
        hot_tokens,
        all_tokens - hot_tokens,
        num_evictions,
    )


def _run(requests: Iterable[TraceRequest], tiers: Sequence[Tier], clock: _Clock) -> Iterator[tuple[int, ...]]:
    """Yield the number of leading blocks that each tier holds, for each request."""
    for request in requests:
        clock.now = request.at_s
        depths = tuple([tier.hold(request.blocks) for tier in tiers])
        for tier in tiers:
            tier.add(request.stored)
            tier.release()
        yield depths


def _sum(trace: Trace, depths: Iterable[tuple[int, ...]], progress: Progress) -> tuple[tuple[int, int], ...]:
    """Return blocks and tokens found hot, and found in any tier."""
    hot_blocks = hot_tokens = all_blocks = all_tokens = done = 0
    for request, found in zip(trace.requests, depths, strict=True):
        deepest = max(found)
        hot_blocks += found[0]
        hot_tokens += trace.tokens_in(request, found[0])
        all_blocks += deepest
        all_tokens += trace.tokens_in(request, deepest)
        done += 1
        if done == STEP:
            progress(done)
            done = 0
    progress(done)
    return (hot_blocks, hot_tokens), (all_blocks, all_tokens)


def sweep(
    trace: Trace,
    capacities: Sequence[int],
    *,
    ttls: Sequence[float | None] = (None,),
    disks: Sequence[int] = (0,),
    progress: Progress = lambda done: None,
) -> list[Found]:
    """Simulate every time to live, disk and capacity, then the optimum of each disk and capacity."""
    wanted = [Memory(size, disk, ttl) for ttl, disk, size in product(ttls, disks, capacities)]
    wanted += [Memory(size, disk, policy=OPTIMUM) for disk, size in product(disks, capacities)]
    return [simulate(trace, memory, progress=progress) for memory in wanted]
