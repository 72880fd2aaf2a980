"""Rows of the pool and the hashes: every operation on an empty, a full and an evicting pool.

Blocks form chains of 32 under one root, all ids random. Hashes are computed beforehand: hashing has separate rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.cache.rows import Part, Row, Track, counted_bytes, least, mean_us, most
from rekindle.cache.blocks.hashing import BlockHash, TokenIds, chain_hashes
from rekindle.cache.blocks.pool import BlockPool

ROOT = BlockHash(bytes(32))
CHAIN = 32
VOCABULARY = 150_000
POOL_BLOCK_TOKENS = (16, 64)
HASH_BLOCK_TOKENS = (16, 64, 512)
SAMPLE = 100_000
NUM_HASHED = 1 << 21
OPERATION_US, BLOCK_BYTES, HASHED_PER_US = 3, 300, 20


@dataclass(frozen=True, slots=True)
class Chains:
    """Hashes and parents of blocks [n] and their ids [n, block_tokens], chain after chain."""

    hashes: list[BlockHash]
    parents: list[BlockHash]
    ids: TokenIds

    @classmethod
    def random(cls, chooser: np.random.Generator, count: int, block_tokens: int) -> Chains:
        """Generate `count` blocks; the last chain may be shorter."""
        ids = chooser.integers(0, VOCABULARY, (count, block_tokens), dtype=np.uint32)
        hashes: list[BlockHash] = []
        for start in range(0, count, CHAIN):
            hashes += chain_hashes(ROOT, ids[start : start + CHAIN].reshape(-1), block_tokens)
        parents = [ROOT if i % CHAIN == 0 else hashes[i - 1] for i in range(count)]
        return cls(hashes, parents, ids)

    def publish(self, pool: BlockPool, number: int, block: int) -> None:
        """Register a private block under this one's hash, and release it."""
        pool.register(block, self.hashes[number], self.parents[number], self.ids[number])
        pool.release(block)


class PoolBench:
    """A pool that is first empty, then full of cached blocks, then evicting."""

    def __init__(self, num_blocks: int, block_tokens: int, *, repeats: int, seed: int) -> None:
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._part = Part(f"pool, blocks of {block_tokens}")
        self._repeats = repeats
        self._chooser = np.random.default_rng(seed)
        self._sample = min(SAMPLE, num_blocks // 4)

    def rows(self, track: Track) -> Iterator[Row]:
        """Yield all rows; each stage leaves the pool as the next one needs it."""
        yield self._empty()
        chains = Chains.random(self._chooser, self._num_blocks, self._block_tokens)
        doing = f"{self._part.name}: filling"
        with counted_bytes() as held:
            pool = BlockPool(self._num_blocks, self._block_tokens)
            for number in track(range(self._num_blocks), doing):
                block = pool.allocate()
                assert block is not None, "a pool that is not full has a block"
                chains.publish(pool, number, block)
            num_bytes = held()
        assert pool.num_cached == self._num_blocks, f"{pool.num_cached} of {self._num_blocks} blocks are cached"
        yield from self._bytes(num_bytes, pool)
        chosen = self._chooser.choice(self._num_blocks, self._sample, replace=False).tolist()
        yield from self._found(pool, chains, chosen)
        yield from self._held(pool, [(pool.block_of(chains.hashes[number]),) for number in chosen])
        yield from self._evicting(pool)

    def _empty(self) -> Row:
        values = []
        for _ in range(self._repeats):
            pool = BlockPool(self._num_blocks, self._block_tokens)
            values.append(mean_us(pool.allocate, [()] * self._sample))
        return self._part.row("allocate, all free", "µs", values, most(OPERATION_US), calls=self._sample)

    def _bytes(self, num_bytes: int, pool: BlockPool) -> Iterator[Row]:
        """Measure the pool's bytes per block, without and with the block's ids; both have the same target."""
        ids, target = 4 * self._block_tokens, most(BLOCK_BYTES)
        each, reported = num_bytes / self._num_blocks, pool.nbytes / self._num_blocks
        yield self._part.row(f"block without {ids} bytes of ids", "bytes", [each - ids], target, said=reported - ids)
        yield self._part.row("block with its ids", "bytes", [each], target, said=reported)

    def _found(self, pool: BlockPool, chains: Chains, chosen: list[int]) -> Iterator[Row]:
        known = [(chains.hashes[i], chains.ids[i]) for i in chosen]
        foreign = [(BlockHash(block_hash[::-1]), ids) for block_hash, ids in known]
        children = [(chains.parents[i], chains.ids[i]) for i in chosen]
        assert all(pool.find(*call) is not None for call in known), "a block of a full pool is not found"
        assert not any(pool.find(*call) is not None for call in foreign), "a block was found that is not there"
        for what, operation, calls, target in (
            ("find", pool.find, known, most(OPERATION_US)),
            ("find what is not there", pool.find, foreign, most(OPERATION_US)),
            ("find_child", pool.find_child, children, None),
        ):
            values = [mean_us(operation, calls) for _ in range(self._repeats)]
            yield self._part.row(what, "µs", values, target, calls=len(calls))

    def _held(self, pool: BlockPool, held: list[tuple[int | None]]) -> Iterator[Row]:
        shared: list[float] = []
        released: list[float] = []
        for _ in range(self._repeats):
            shared.append(mean_us(pool.share, held))
            released.append(mean_us(pool.release, held))
        yield self._part.row("share", "µs", shared, most(OPERATION_US), calls=len(held))
        yield self._part.row("release", "µs", released, most(OPERATION_US), calls=len(held))

    def _evicting(self, pool: BlockPool) -> Iterator[Row]:
        allocated: list[float] = []
        registered: list[float] = []
        for _ in range(self._repeats):
            chains = Chains.random(self._chooser, self._sample, self._block_tokens)
            blocks: list[int | None] = []
            allocated.append(mean_us(lambda into: into.append(pool.allocate()), [(blocks,)] * self._sample))
            given = zip(blocks, chains.hashes, chains.parents, chains.ids, strict=True)
            registered.append(mean_us(pool.register, list(given)))
            for block in blocks:
                assert block is not None, "every block was cached, and still there was a shortage"
                pool.release(block)
        assert pool.num_evictions == self._repeats * self._sample, f"{pool.num_evictions} evictions"
        target = most(OPERATION_US)
        yield self._part.row("allocate, evicting", "µs", allocated, target, calls=self._sample)
        yield self._part.row("register", "µs", registered, calls=self._sample)


def pool_rows(num_blocks: int, *, repeats: int, seed: int, track: Track) -> Iterator[Row]:
    """Yield all rows for small and usual blocks."""
    for block_tokens in POOL_BLOCK_TOKENS:
        yield from PoolBench(num_blocks, block_tokens, repeats=repeats, seed=seed).rows(track)


def hashing_rows(*, repeats: int, seed: int) -> Iterator[Row]:
    """Measure millions of tokens per second through a chain of hashes."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, NUM_HASHED, dtype=np.uint32)
    part = Part("hashing")
    for block_tokens in HASH_BLOCK_TOKENS:
        values = []
        for _ in range(repeats):
            began = time.perf_counter()
            chain_hashes(ROOT, ids, block_tokens)
            values.append(NUM_HASHED / (time.perf_counter() - began) / 1e6)
        yield part.row(f"blocks of {block_tokens}", "M tokens/s", values, least(HASHED_PER_US), tokens=NUM_HASHED)
