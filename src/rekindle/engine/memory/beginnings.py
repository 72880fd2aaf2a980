"""Beginnings that prompts seen once have in common: which branch has the record that keeps each on disk.

The first prompt that reuses a beginning gets the record; those after it only mark that branch as used, so a system text
that a thousand single prompts begin with is written once. Owned by the intake thread.
"""

from __future__ import annotations

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch

MOST = 4096  # beginnings; of those beyond, the first noted are forgotten, and get another record when they are reused


class Beginnings:
    """Branches of a book by the last block that was saved of them."""

    def __init__(self, book: BranchBook, *, block_tokens: int) -> None:
        self._book = book
        self._block_tokens = block_tokens
        self._owners: dict[BlockHash, tuple[str, str, int]] = {}

    def owner(self, branch: KnownBranch, num_blocks: int) -> Branch | None:
        """Return the other branch that keeps the first blocks of this one, at least one, on disk; None if none does."""
        last = branch.hashes[num_blocks - 1]
        key = self._owners.get(last)
        owner = None if key is None else self._book.get(*key)
        if owner is None or (owner.number == branch.number and owner.agent == branch.agent):
            return None
        is_saved = owner.saved_tokens >= num_blocks * self._block_tokens
        return owner if is_saved and isinstance(owner, KnownBranch) and last in owner.hashes else None

    def note(self, branch: KnownBranch, num_blocks: int) -> None:
        """Remember that this branch has the record of its first blocks, at least one."""
        last = branch.hashes[num_blocks - 1]
        self._owners.pop(last, None)
        self._owners[last] = branch.namespace, branch.agent, branch.number
        while len(self._owners) > MOST:
            del self._owners[next(iter(self._owners))]

    def check(self) -> None:
        """Assert that they are bounded."""
        assert len(self._owners) <= MOST, len(self._owners)
