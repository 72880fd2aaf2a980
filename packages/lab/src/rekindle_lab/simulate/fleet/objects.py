"""The shared tier: blocks as objects that every replica may read, written once their request is done.

Owns the counts of objects and bytes that cross the network. A request that ends leaves all its blocks in the tier;
those that were there are not written again, but count as used. Each block of the trace is one object. Each session has
a head, too, the list of its blocks: every request writes it, and reads it if another replica, or none, served the
session before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle_lab.simulate.tier import Tier
from rekindle_lab.simulate.trace import Trace, TraceRequest


@dataclass(slots=True)
class Traffic:
    """Objects and bytes written to and read from the tier; the bytes of heads are left out."""

    blocks_put: int = 0
    blocks_got: int = 0
    heads_put: int = 0
    heads_got: int = 0
    tokens_put: int = 0
    tokens_got: int = 0

    @property
    def objects_put(self) -> int:
        """Write requests to the object store."""
        return self.blocks_put + self.heads_put

    @property
    def objects_got(self) -> int:
        """Read requests to the object store."""
        return self.blocks_got + self.heads_got


class ObjectTier:
    """Stores `num_blocks` for all replicas, the least recently used leave first; 0: there is no tier."""

    def __init__(self, trace: Trace, num_blocks: int) -> None:
        self._trace = trace
        self._tier = Tier(trace, num_blocks) if num_blocks else None
        self.traffic = Traffic()

    @property
    def num_evictions(self) -> int:
        """Blocks evicted for lack of space."""
        return self._tier.num_evictions if self._tier else 0

    def depth(self, wanted: Sequence[int]) -> int:
        """Return the leading blocks that are there."""
        return self._tier.depth(wanted) if self._tier else 0

    def read_head(self) -> None:
        """Count the read of a session's list of blocks."""
        self.traffic.heads_got += bool(self._tier)

    def read(self, num_blocks: int, num_tokens: int) -> None:
        """Count the read of so many blocks with so many tokens in all."""
        self.traffic.blocks_got += num_blocks
        self.traffic.tokens_got += num_tokens

    def write(self, request: TraceRequest) -> None:
        """Write the blocks of a finished request that are not there, and the head."""
        if self._tier is None:
            return
        num_there = self._tier.hold(request.stored)
        self._tier.add(request.stored)
        self._tier.release()
        traffic, num_blocks = self.traffic, len(request.stored)
        traffic.blocks_put += num_blocks - num_there
        traffic.tokens_put += self._trace.stored_tokens(request, num_blocks)
        traffic.tokens_put -= self._trace.stored_tokens(request, num_there)
        traffic.heads_put += 1

    def check(self) -> None:
        """Assert the tier's invariants."""
        if self._tier:
            self._tier.check()
