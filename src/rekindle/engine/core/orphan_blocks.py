"""Blocks computed for an agent that are not part of a turn: by idle work, or prefilled ahead of a turn.

Hashes only, of blocks in memory. No branch leads to these blocks, and they keep their ancestors in memory, so
forgetting the agent must include them. Owned by the core, on its thread.
"""

from __future__ import annotations

from collections.abc import Collection

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool


class OrphanBlocks:
    """Hashes by (namespace, agent), of at most as many agents as there are blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hashes: dict[tuple[str, str], set[BlockHash]] = {}

    def note(self, key: tuple[str, str], hashes: Collection[BlockHash]) -> None:
        """Add blocks that were computed for an agent."""
        if hashes:
            self._hashes[key] = self._in_memory(self._hashes.get(key, ())) | set(hashes)
        if len(self._hashes) > self._pool.num_blocks:
            left = {key: self._in_memory(mine) for key, mine in self._hashes.items()}
            self._hashes = {key: mine for key, mine in left.items() if mine}

    def take(self, key: tuple[str, str]) -> set[BlockHash]:
        """Remove an agent's entry and return its hashes that are still in memory."""
        return self._in_memory(self._hashes.pop(key, ()))

    def _in_memory(self, hashes: Collection[BlockHash]) -> set[BlockHash]:
        return {block_hash for block_hash in hashes if self._pool.block_of(block_hash) is not None}
