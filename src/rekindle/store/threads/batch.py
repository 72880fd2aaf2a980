"""A batch: blocks and turns that were queued together, and what of the blocks is still to be written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.rows.ledger import Ledger
from rekindle.store.values import SavingBlock, SequenceRecord


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """In the order in which they were queued."""

    blocks: list[SavingBlock]
    turns: list[SequenceRecord]

    @classmethod
    def of(cls, items: Sequence[SavingBlock | SequenceRecord]) -> Batch:
        """The batch of these items."""
        return cls(
            [item for item in items if isinstance(item, SavingBlock)],
            [item for item in items if isinstance(item, SequenceRecord)],
        )

    def wanted(self, ledger: Ledger, is_bad: Callable[[BlockHash], bool]) -> tuple[list[SavingBlock], int]:
        """The parts of blocks that are not on disk and whose parent is; and how many blocks have none there.

        A block comes once, with all its new parts; one that `is_bad` counts as missing.
        """
        wanted: dict[BlockHash, SavingBlock] = {}
        num_orphaned = 0
        for block in self.blocks:
            block_hash, parent = block.identity.hash, block.identity.parent
            known = set[int]() if is_bad(block_hash) else ledger.parts(block_hash)
            coming = wanted.get(block_hash)
            rows = {part: row for part, row in block.rows.items() if part not in known}
            if coming is not None:
                wanted[block_hash] = replace(coming, rows={**rows, **coming.rows})
            elif not rows:
                continue
            elif 0 not in known | rows.keys() or not (
                parent == block.identity.root or parent in wanted or ledger.has(parent)
            ):
                num_orphaned += 1
            else:
                wanted[block_hash] = replace(block, rows=rows)
        return list(wanted.values()), num_orphaned

    def needed(self, ledger: Ledger) -> set[bytes]:
        """The blocks on disk that the batch builds on, or moves a branch from or to."""
        near = {each for block in self.blocks for each in (block.identity.hash, block.identity.parent)}
        return near | {turn.head for turn in self.turns} | set(ledger.heads(self.turns))
