"""Scores of tokens in stored blocks, so that prompts with a common beginning score it once.

In memory only, by block hash, which stands for the model, the tenant and every token up to the block's end. Owned by
the engine thread. Knows no KV: a score is of use while its block is stored, and is dropped by age, not with the block.
"""

from __future__ import annotations

from collections import OrderedDict

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.sequence import Sequence
from rekindle.model.row_scores import RowScores

MAX_BYTES = 64 << 20  # 1.7 million tokens with their likeliest one
ENTRY_BYTES = 700  # of four small arrays and their entry, without their numbers


class ScoreCache:
    """Scores by block, the least recently used dropped first, in at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_block: OrderedDict[BlockHash, RowScores] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def fill(self, sequence: Sequence) -> None:
        """Give a sequence the scores of its leading blocks that are kept, if it wants any."""
        scores, size = sequence.scores, sequence.block_tokens
        if scores is None or sequence.reuse == "off":
            return
        while not scores.is_complete and (index := scores.num_known // size) < sequence.num_prompt // size:
            rows = self._by_block.get(sequence.hash_at(index))
            if rows is None or rows.num_top < scores.num_top:
                return
            self._by_block.move_to_end(sequence.hash_at(index))
            scores.put(index * size, rows)

    def keep(self, sequence: Sequence, first: int) -> None:
        """Keep the scores of a sequence's full blocks that end after token `first`, as far as they are known."""
        scores, size = sequence.scores, sequence.block_tokens
        if scores is None or sequence.reuse == "off":
            return
        for index in range(first // size, scores.num_known // size):
            self._put(sequence.hash_at(index), scores.rows_from(index * size, size))
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _cost(self._by_block.popitem(last=False)[1])

    def _put(self, block_hash: BlockHash, rows: RowScores) -> None:
        before = self._by_block.pop(block_hash, None)
        if before is not None:
            self._num_bytes -= _cost(before)
        best = before if before is not None and before.num_top > rows.num_top else rows
        self._by_block[block_hash] = best
        self._num_bytes += _cost(best)

    def clear(self) -> None:
        """Drop everything."""
        self._by_block.clear()
        self._num_bytes = 0

    def check(self) -> None:
        """Assert that the bytes are counted right and within the limit."""
        num_bytes = sum(map(_cost, self._by_block.values()))
        assert num_bytes == self._num_bytes, f"{num_bytes} bytes of scores, {self._num_bytes} counted"
        assert num_bytes <= self._max_bytes, f"{num_bytes} bytes of scores, {self._max_bytes} allowed"


def _cost(rows: RowScores) -> int:
    return rows.num_bytes + ENTRY_BYTES
