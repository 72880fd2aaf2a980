"""Which blocks an ended sequence read and ended in: by hashes that are known, whatever they are."""

from __future__ import annotations

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, tail_hash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.core.reporting import chain_of
from rekindle.engine.sequence import Ended, Head, Sequence
from rekindle.engine.types import Chain, Link

ROOT, *HASHES = (BlockHash(bytes([number]) * 32) for number in range(6))  # hashes of nothing: none is computed
IDS = np.arange(11, dtype=np.uint32)
ENDED = Ended(IDS, tuple(HASHES[:2]), Head(HASHES[4], 11))


def sequence(num_reused: int, *names: BlockHash) -> Sequence:
    made = Sequence(ROOT, IDS, BlockTable(BlockPool(8, 4)), reuse="continuation", task="generate")
    made.note_reused(num_reused, names)
    return made


def test_the_last_block_that_was_read_and_the_one_before_it_are_named() -> None:
    head = Link(HASHES[4], HASHES[1], 11)
    assert chain_of(sequence(0), ENDED) == Chain(ROOT, None, head)
    assert chain_of(sequence(3, HASHES[3]), ENDED) == Chain(ROOT, Link(HASHES[3], ROOT, 3), head)
    assert chain_of(sequence(8, *HASHES[:2]), ENDED) == Chain(ROOT, Link(HASHES[1], HASHES[0], 8), head)
    assert chain_of(sequence(9, *HASHES[:3]), ENDED) == Chain(ROOT, Link(HASHES[2], HASHES[1], 9), head)
    nothing = Ended(IDS[:0], (), Head(ROOT, 0))
    assert chain_of(sequence(8, *HASHES[:2]), nothing).read is None, "it was preempted, and ended before it went on"
    assert chain_of(sequence(0), nothing) == Chain(ROOT, None, Link(ROOT, ROOT, 0))


def test_of_a_front_only_the_number_of_reused_tokens_is_known() -> None:
    front = sequence(0)
    tail = tail_hash(HASHES[1], IDS[8:10])
    for num_reused, read in (
        (4, Link(HASHES[0], ROOT, 4)),
        (6, Link(HASHES[1], HASHES[0], 6)),
        (10, Link(tail, HASHES[1], 10)),
    ):
        front.hot_tokens = num_reused
        assert chain_of(front, ENDED).read == read
        assert chain_of(front, Ended(IDS, ENDED.hashes, Head(HASHES[1], 8))).read == read, "whatever stays of its tail"
    assert chain_of(front, Ended(IDS[:0], (), Head(ROOT, 0))).read is None, "nothing of it was kept"
