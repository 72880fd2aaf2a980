"""One simulated tier of memory: the engine's own block pool over the blocks of a trace.

Owns the spare blocks in which a request computes, apart from the tier's capacity; after the request the tier evicts
its surplus. The pool decides which blocks are evicted, which are found, and how long they live.

    pool   [ stored between requests: num_blocks ][ spare: as many as the longest request stores ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.cache import BlockPool
from rekindle_lab.simulate.trace import Trace


class Tier:
    """Stores `num_blocks`; `ttl_s` says how long a block may stay unused.

    `clock` is used only for lifetimes; without them uses are counted, as in the server, whatever the time between
    them. Call `hold`, `add`, `release` for each request. That uses each of its blocks once, the last block first, so
    that a request's later blocks are evicted before their ancestors.
    """

    def __init__(
        self, trace: Trace, num_blocks: int, *, ttl_s: float | None = None, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._blocks = trace.blocks
        self._clock = clock
        self._ttl_s = ttl_s
        self._num_spare = max((len(request.stored) for request in trace.requests), default=0)
        size = min(num_blocks, len(trace.blocks)) + self._num_spare  # more would stay free forever
        block_tokens = len(trace.blocks[0].ids) if trace.blocks else 1
        used_at = None if ttl_s is None else clock
        self._pool = BlockPool(max(size, 1), block_tokens, clock=used_at, ttl=ttl_s)
        self._held: list[int] = []
        self._spare: list[int] = []
        self._refill()

    @property
    def num_evictions(self) -> int:
        """Blocks evicted for lack of space."""
        return self._pool.num_evictions

    def depth(self, wanted: Sequence[int]) -> int:
        """Return the blocks of the longest stored prefix; no use of them is counted."""
        peek = self._pool.peek
        for depth, number in enumerate(wanted):
            block = self._blocks[number]
            if peek(block.hash, block.ids) is None:
                return depth
        return len(wanted)

    def hold(self, wanted: Sequence[int]) -> int:
        """Hold the longest stored prefix, and return its number of blocks."""
        assert not self._held, "the request before still holds blocks"
        if self._ttl_s is not None:
            self._pool.expire(self._clock())
        peek, share, held = self._pool.peek, self._pool.share, self._held
        for number in wanted:
            block = self._blocks[number]
            found = peek(block.hash, block.ids)
            if found is None:
                break
            share(found)
            held.append(found)
        return len(held)

    def add(self, stored: Sequence[int]) -> None:
        """Add and hold the blocks of `stored` after those already held."""
        for number in stored[len(self._held) :]:
            block = self._blocks[number]
            self._held.append(self._pool.register(self._spare.pop(), block.hash, block.parent, block.ids))

    def release(self) -> None:
        """Release all held blocks, and evict the surplus."""
        self._held.reverse()
        self._pool.release_all(self._held)
        self._held.clear()
        self._refill()

    def check(self) -> None:
        """Assert the pool's invariants, and that nothing is held between requests."""
        self._pool.check()
        assert len(self._spare) == self._num_spare and not self._held, f"{len(self._spare)} spare, {self._held} held"

    def _refill(self) -> None:
        while len(self._spare) < self._num_spare:
            block = self._pool.allocate()
            assert block is not None, "no block is held between requests, and none can be evicted"
            self._spare.append(block)
