"""The text of one branch of an agent, on its way from one engine to another: its ids, and the blocks that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds, chain_hashes, tail_hash


@dataclass(frozen=True, slots=True, eq=False)
class BranchText:
    """One text of an agent: its ids, uint32 [num_tokens], whose first `canonical_tokens` are a fresh encoding.

    `turn_ends` are token counts. `parts` says which blocks, counted from 0, have each part of the layout but the first,
    which all have. Times are wall clock.
    """

    root: BlockHash
    ids: TokenIds
    canonical_tokens: int
    last_use: float
    turn_ends: tuple[int, ...] = ()
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def blocks(self, block_tokens: int) -> Iterator[BlockIdentity]:
        """Yield its blocks in order, the last one partial if its tokens do not fill it."""
        parent = self.root
        for at, name in enumerate(chain_hashes(self.root, self.ids, block_tokens)):
            yield BlockIdentity(name, parent, self.root, self.ids[at * block_tokens : (at + 1) * block_tokens])
            parent = name
        rest = self.ids[len(self.ids) // block_tokens * block_tokens :]
        if len(rest):
            yield BlockIdentity(tail_hash(parent, rest), parent, self.root, rest)
