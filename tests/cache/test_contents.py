"""Names, parents and ids of blocks together, with parents that no block bears."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache import BlockHash, block_hash, id_bytes, root_hash, tail_hash
from rekindle.cache.blocks.contents import BlockContents

BLOCK_TOKENS = 2
NUM_BLOCKS = 6
ROOTS = [root_hash(fingerprint=b"fp", namespace=name, cache_salt="", secret=b"s") for name in ("a", "b")]
Ids = tuple[int, ...]


def array(ids: Ids) -> np.ndarray:
    return np.array(ids, np.uint32)


def hash_fn(parent: BlockHash, ids: Ids) -> BlockHash:
    return (block_hash if len(ids) == BLOCK_TOKENS else tail_hash)(parent, array(ids))


RUNS: list[Ids] = [(1, 1), (1, 2), (2, 1), (1,), (2,)]
LEVELS = [ROOTS, [hash_fn(root, ids) for root in ROOTS for ids in RUNS[:3]]]
PARENTS = LEVELS[0] + LEVELS[1] + [hash_fn(name, ids) for name in LEVELS[1] for ids in RUNS[:1]]


class ContentsMachine(RuleBasedStateMachine):
    """Model: block -> (name, parent, ids)."""

    @initialize()
    def begin(self) -> None:
        self.contents = BlockContents(NUM_BLOCKS, BLOCK_TOKENS)
        self.known: dict[int, tuple[BlockHash, BlockHash, Ids]] = {}

    @rule(block=st.integers(0, NUM_BLOCKS - 1), parent=st.sampled_from(PARENTS), ids=st.sampled_from(RUNS))
    def add(self, block: int, parent: BlockHash, ids: Ids) -> None:
        name = hash_fn(parent, ids)
        if block in self.known:
            return
        if any(name == other for other, _, _ in self.known.values()):
            return
        is_root = name in {above for _, above, _ in self.known.values()}
        assert self.contents.add(block, name, parent, id_bytes(array(ids))) != is_root
        if not is_root:
            self.known[block] = (name, parent, ids)

    @precondition(lambda self: self.known)
    @rule(choice=st.data())
    def add_under_another_name(self, choice: st.DataObject) -> None:
        """Whoever comes with ids that are here is told so."""
        _, parent, ids = self.known[choice.draw(st.sampled_from(sorted(self.known)))]
        for block in set(range(NUM_BLOCKS)) - set(self.known):
            assert not self.contents.add(block, BlockHash(bytes(32)), parent, id_bytes(array(ids)))

    @precondition(lambda self: self.known)
    @rule(choice=st.data())
    def remove(self, choice: st.DataObject) -> None:
        parents = {parent for _, parent, _ in self.known.values()}
        leaves = [block for block, (name, _, _) in self.known.items() if name not in parents]
        block = choice.draw(st.sampled_from(sorted(leaves)))
        assert self.contents.remove(block) == self.known.pop(block)[0]

    @rule(root=st.sampled_from(ROOTS), runs=st.lists(st.sampled_from(RUNS[:3]), max_size=3))
    def follow(self, root: BlockHash, runs: list[Ids]) -> None:
        blocks = {name: block for block, (name, _, _) in self.known.items()}
        expected, parent = [], root
        for ids in runs:
            parent = hash_fn(parent, ids)
            if parent not in blocks:
                break
            expected.append(blocks[parent])
        ids = array(tuple(token for run in runs for token in run))
        assert self.contents.prefix(root, ids, block_hash) == expected

    @invariant()
    def they_agree(self) -> None:
        self.contents.check(block_hash, tail_hash)
        assert self.contents.blocks() == sorted(self.known) and len(self.contents) == len(self.known)
        blocks = {name: block for block, (name, _, _) in self.known.items()}
        for block in range(NUM_BLOCKS):
            name, parent, ids = self.known.get(block, (None, None, ()))
            assert (self.contents.hash(block), self.contents.parent(block)) == (name, parent)
            assert tuple(self.contents.ids(block)) == ids and (block in self.contents) == (name is not None)
            assert self.contents.above(block) == (-1 if parent is None else blocks.get(parent, -1))
        for name, parent, ids in self.known.values():
            data = id_bytes(array(ids))
            assert self.contents.match(name, data, parent) == self.contents.match(name, data, None) == blocks[name]
            assert self.contents.match(name, data, BlockHash(bytes(32))) is None
            assert self.contents.match(name, data + data, parent) is None


TestContents = ContentsMachine.TestCase
TestContents.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
