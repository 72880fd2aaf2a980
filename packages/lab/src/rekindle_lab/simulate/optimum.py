"""The upper bound: hits of a memory that knows all future requests and need not store what is requested.

Belady's rule with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966): of everything stored and just computed, the blocks with the nearest next use stay. A prefix is
requested whenever its continuation is, so a parent's next use is never later than its child's: leaves are evicted
first.

It maximises blocks. Another choice may find more tokens where prompts end with partial blocks: one token occupies a
whole block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rekindle_lab.simulate.trace import Trace

NEVER = 1 << 60


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
