"""Which block: the value that every tier passes on with a block's bytes or with the place where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.cache.blocks.hashing import BlockHash, TokenIds


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A full block or a tail of one chain.

    `parent` is the hash of the block before it, `root` of the first. `ids` are uint32 [num_tokens], not to be changed.
    """

    hash: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds = field(compare=False)  # the hash is theirs

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the block holds."""
        return len(self.ids)
