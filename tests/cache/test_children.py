"""The tree of siblings against a plain comparison with all of them."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.blocks.children import ChildIndex
from rekindle.cache.blocks.columns import IdRows
from rekindle.cache.blocks.hashing import id_bytes

BLOCK_TOKENS = 4
NUM_BLOCKS = 10
PARENTS = [0, 3, NUM_BLOCKS, NUM_BLOCKS + 6]  # blocks, and others
EDGES = [0, 1, 256, 1 << 31, 2**32 - 1]  # alike in some bytes or in none; also what padding would look like

runs = st.lists(st.sampled_from(EDGES), min_size=1, max_size=BLOCK_TOKENS).map(tuple)
queries = st.lists(st.sampled_from(EDGES), max_size=BLOCK_TOKENS).map(tuple)
parents = st.sampled_from(PARENTS)
Ids = tuple[int, ...]


def data(ids: Ids) -> bytes:
    return id_bytes(np.array(ids, np.uint32))


def common(a: Ids, b: Ids) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ChildrenMachine(RuleBasedStateMachine):
    """Model: block -> (parent, ids)."""

    @initialize()
    def begin(self) -> None:
        self.rows = IdRows(NUM_BLOCKS, BLOCK_TOKENS)
        self.index = ChildIndex(NUM_BLOCKS, self.rows)
        self.known: dict[int, tuple[int, Ids]] = {}

    @rule(block=st.integers(0, NUM_BLOCKS - 1), parent=parents, ids=runs)
    def add(self, block: int, parent: int, ids: Ids) -> None:
        if block in self.known:
            return
        self.rows.put(block, data(ids))
        is_new = (parent, ids) not in self.known.values()
        assert self.index.add(block, parent) == is_new
        if is_new:
            self.known[block] = (parent, ids)
        else:
            self.rows.drop(block)

    @precondition(lambda self: self.known)
    @rule(choice=st.data())
    def remove(self, choice: st.DataObject) -> None:
        block = choice.draw(st.sampled_from(sorted(self.known)))
        self.index.remove(block)
        self.rows.drop(block)
        del self.known[block]

    @rule(parent=parents, ids=queries)
    def find(self, parent: int, ids: Ids) -> None:
        siblings = {block: own for block, (other, own) in self.known.items() if other == parent}
        found = self.index.find(parent, data(ids))
        if found is None:
            assert not siblings
            return
        block, num_common = found
        assert num_common == max(common(ids, own) for own in siblings.values())
        assert block == [other for other, own in siblings.items() if common(ids, own) == num_common][-1], (
            "not the newest"
        )

    @invariant()
    def they_agree(self) -> None:
        self.index.check()
        for block in range(NUM_BLOCKS):
            parent, ids = self.known.get(block, (-1, ()))
            assert self.index.parent(block) == parent and tuple(self.rows.ids(block)) == ids
            assert self.rows.holds(block, data(ids))
        for parent in PARENTS:
            children = {block for block, (other, _) in self.known.items() if other == parent}
            assert self.index.has_children(parent) == bool(children)


TestChildren = ChildrenMachine.TestCase
TestChildren.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


@given(st.sets(runs, min_size=1, max_size=NUM_BLOCKS), queries)
@settings(max_examples=300, deadline=None)
def test_no_sibling_shares_more_than_the_one_found(siblings: set[Ids], query: Ids) -> None:
    rows = IdRows(NUM_BLOCKS, BLOCK_TOKENS)
    index = ChildIndex(NUM_BLOCKS, rows)
    for block, ids in enumerate(siblings):
        rows.put(block, data(ids))
        assert index.add(block, 0)
    found = index.find(0, data(query))
    assert found is not None and found[1] == max(common(query, ids) for ids in siblings)


def test_a_way_down_passes_few_of_many_siblings() -> None:
    num_siblings = 3000
    rows = IdRows(num_siblings, 16)
    index = ChildIndex(num_siblings, rows)
    ids = np.random.default_rng(5).integers(0, 150_000, (num_siblings, 16), dtype=np.uint32)
    for block in range(num_siblings):
        rows.put(block, id_bytes(ids[block]))
        assert index.add(block, 0)
    index.check()
    asked = CountedBytes(id_bytes(ids[1234]))
    assert index.find(0, asked) == (1234, 16)
    assert asked.num_read < 40, "about log2 of the siblings"


class CountedBytes(bytes):
    """Counts how often one of its bytes is looked at."""

    num_read = 0

    def __getitem__(self, at):
        if isinstance(at, int):
            self.num_read += 1
        return super().__getitem__(at)


def test_a_row_holds_what_was_put_and_nothing_longer() -> None:
    rows = IdRows(2, BLOCK_TOKENS)
    rows.put(1, data((1, 2, 3, 4)))
    rows.put(1, data((1, 2)))
    assert rows.ids(1).tolist() == [1, 2]
    assert not rows.holds(1, data((1, 2, 3, 4))) and not rows.holds(1, data((1,))) and rows.holds(1, data((1, 2)))
    with pytest.raises(AssertionError, match="20 bytes"):
        rows.put(0, data((1, 2, 3, 4, 5)))
    with pytest.raises(ValueError, match="read-only"):
        rows.ids(1)[0] = 7
