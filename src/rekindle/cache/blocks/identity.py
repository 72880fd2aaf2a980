"""Identity of a block: the value that every tier passes along with a block's bytes or their location."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.cache.blocks.hashing import BlockHash, TokenIds


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A full block or a tail of one chain.

    `parent` is the hash of the block before it, or `root` for the first block. `ids` are uint32 [num_tokens] and must
    not be changed.
    """

    hash: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds = field(compare=False)  # covered by the hash

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the block holds."""
        return len(self.ids)
