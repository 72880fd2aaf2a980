"""The ceiling: what a memory would have held that knew all requests to come, and need not take in what it is asked for.

Belady's rule with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 1966): of everything here and everything just computed, those stay whose next use is nearest. A beginning is
asked for whenever what follows it is, so a parent's next use is never later than its child's and leaves go first.

It is the most blocks. Of tokens another choice may find more where prompts end with partial blocks: one token takes the
room of a whole block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rekindle.simulate.trace import Trace

NEVER = 1 << 60


def optimal_hits(trace: Trace, num_blocks: int) -> Iterator[int]:
    """Yield for each request how many of its first blocks a memory of `num_blocks` can hold at best.

    O(log n) for each block of the trace.
    """
    kept: dict[int, int] = {}  # block -> its next use
    leaving: list[tuple[int, int]] = []  # (-next use, -block) with stale entries; of equals the youngest leaves
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        hits = 0
        for block in request.blocks:
            if block not in kept:
                break
            hits += 1
        yield hits
        for block, use in zip(request.stored, uses, strict=True):
            if use == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = use
                heapq.heappush(leaving, (-use, -block))
        while len(kept) > num_blocks:
            use, block = heapq.heappop(leaving)
            if kept.get(-block) == -use:
                del kept[-block]


def next_uses(trace: Trace) -> list[list[int]]:
    """For each request and each block it stores, the number of the next request whose prompt has that block."""
    found: list[list[int]] = []
    following: dict[int, int] = {}
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        found.append([following.get(block, NEVER) for block in request.stored])
        following.update(dict.fromkeys(request.blocks, number))
    return found[::-1]
