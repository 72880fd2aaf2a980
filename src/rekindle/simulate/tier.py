"""One tier of memory as the simulator runs it: the engine's own block pool over the blocks of a trace.

Owns the room that a request computes in, apart from what the tier keeps: new blocks are made there, and afterwards the
tier gives up as many as it has too many. Who leaves, what is found and how long it lasts is decided by the pool.

    pool   [ kept between requests: num_blocks ][ spare: as many as the longest request stores ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.cache import BlockPool
from rekindle.simulate.trace import Trace


class Tier:
    """Keeps `num_blocks`; `policy` says who leaves for others, `ttl_s` how long a block stays unused at most.

    Only lifetimes are told by `clock`; without one uses are counted, as in the server, however far apart they are.
    For each request: `hold`, `add`, `let_go`. That is one use of each of its blocks, the last block's first, so that of
    the same request those behind leave before those they stand on.
    """

    def __init__(
        self, trace: Trace, num_blocks: int, *, policy: str, ttl_s: float | None, clock: Callable[[], float]
    ) -> None:
        self._blocks = trace.blocks
        self._clock = clock
        self._ttl_s = ttl_s
        self._num_spare = max((len(request.stored) for request in trace.requests), default=0)
        size = min(num_blocks, len(trace.blocks)) + self._num_spare  # more would stay free for ever
        block_tokens = len(trace.blocks[0].ids) if trace.blocks else 1
        used_at = None if ttl_s is None else clock
        self._pool = BlockPool(max(size, 1), block_tokens, policy=policy, clock=used_at, ttl=ttl_s)
        self._held: list[int] = []
        self._spare: list[int] = []
        self._refill()

    @property
    def num_evictions(self) -> int:
        """Blocks that left because there was no more room."""
        return self._pool.num_evictions

    def hold(self, wanted: Sequence[int]) -> int:
        """Hold the longest beginning that is here, and return how many blocks that are."""
        assert not self._held, "the request before still holds blocks"
        if self._ttl_s is not None:
            self._pool.expire(self._clock())
        peek, share, held = self._pool.peek, self._pool.share, self._held
        for number in wanted:
            block = self._blocks[number]
            found = peek(block.name, block.ids)
            if found is None:
                break
            share(found)
            held.append(found)
        return len(held)

    def add(self, stored: Sequence[int]) -> None:
        """Add and hold what follows the blocks held of `stored`."""
        for number in stored[len(self._held) :]:
            block = self._blocks[number]
            self._held.append(self._pool.register(self._spare.pop(), block.name, block.parent, block.ids))

    def let_go(self) -> None:
        """Release everything that is held, and give up what is too much."""
        self._held.reverse()
        self._pool.release_all(self._held)
        self._held.clear()
        self._refill()

    def check(self) -> None:
        """Assert that the pool agrees with itself, and that it has as much room as between requests."""
        self._pool.check()
        assert len(self._spare) == self._num_spare and not self._held, f"{len(self._spare)} spare, {self._held} held"

    def _refill(self) -> None:
        while len(self._spare) < self._num_spare:
            block = self._pool.allocate()
            assert block is not None, "nobody holds a block between requests, and none can leave"
            self._spare.append(block)
