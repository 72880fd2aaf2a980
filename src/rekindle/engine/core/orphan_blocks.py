"""Blocks that were computed for an agent and are not part of a turn: by idle work, or taken in ahead of a turn.

Names only, as far as they are in memory. No branch leads to these blocks, and they keep their ancestors in memory:
who forgets the agent has to know of them. Owned by the core, on its thread.
"""

from __future__ import annotations

from collections.abc import Collection

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool


class OrphanBlocks:
    """Names by (namespace, agent), of as many agents as there are blocks at most."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hashes: dict[tuple[str, str], set[BlockHash]] = {}

    def note(self, key: tuple[str, str], hashes: Collection[BlockHash]) -> None:
        """These were computed for an agent."""
        if hashes:
            self._hashes[key] = self._in_memory(self._hashes.get(key, ())) | set(hashes)
        if len(self._hashes) > self._pool.num_blocks:
            left = {key: self._in_memory(mine) for key, mine in self._hashes.items()}
            self._hashes = {key: mine for key, mine in left.items() if mine}

    def take(self, key: tuple[str, str]) -> set[BlockHash]:
        """What is left of an agent's in memory; nothing is known of it then."""
        return self._in_memory(self._hashes.pop(key, ()))

    def _in_memory(self, hashes: Collection[BlockHash]) -> set[BlockHash]:
        return {block_hash for block_hash in hashes if self._pool.block_of(block_hash) is not None}
