"""Names that collide cost reuse, and never yield what belongs to other ids: the pool under hashes of a few bits."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache import BlockHash, BlockPool, BlockTable, block_hash, root_hash, tail_hash

BLOCK_TOKENS = 2
NUM_BLOCKS = 12
ROOTS = [root_hash(fingerprint=b"fp", namespace=name, cache_salt="", secret=b"s") for name in ("a", "b")]
KV = tuple[bytes, tuple[int, ...]]  # root, ids up to and with the position

id_runs = st.lists(st.integers(1, 6), min_size=1, max_size=8)
picks = st.integers(0, 50)
chains = st.lists(st.lists(st.integers(1, 6), min_size=BLOCK_TOKENS, max_size=BLOCK_TOKENS), min_size=2, max_size=3)


def array(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint32)


def weak_pool(bits: int, num_blocks: int = NUM_BLOCKS) -> BlockPool:
    mask = (1 << bits) - 1

    def hash_fn(parent: BlockHash, ids: np.ndarray) -> BlockHash:
        return BlockHash(bytes([block_hash(parent, ids)[0] & mask]) * 32)

    def tail_hash_fn(parent: BlockHash, ids: np.ndarray) -> BlockHash:
        return BlockHash(bytes([tail_hash(parent, ids)[0] & mask]) * 32)

    return BlockPool(num_blocks, BLOCK_TOKENS, hash_fn=hash_fn, tail_hash_fn=tail_hash_fn)


class WeakNamesMachine(RuleBasedStateMachine):
    """Every row of the arena says what was computed there; whoever reuses a block must find its own."""

    @initialize(bits=st.sampled_from([1, 3, 8]))
    def begin(self, bits: int) -> None:
        self.pool = weak_pool(bits)
        self.arena: list[list[KV | None]] = [[None] * BLOCK_TOKENS for _ in range(NUM_BLOCKS)]
        self.sequences: list[tuple[BlockTable, BlockHash, list[int]]] = []
        self.ends: list[list[int]] = []  # last ids of what was registered before its parent
        self.before: dict[BlockHash, tuple[BlockHash, list[list[int]]]] = {}  # what a name without a block stands for

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(root=st.sampled_from(ROOTS), ids=id_runs)
    def start(self, root: BlockHash, ids: list[int]) -> None:
        blocks = self.pool.try_reuse_prefix(root, array(*ids))
        num_tokens = len(blocks) * BLOCK_TOKENS
        parent = self.pool.name(blocks[-1]) if blocks else root
        assert parent is not None
        child = self.pool.find_child(parent, array(*ids[num_tokens:]))
        if child is not None:
            self.pool.share(child[0])
            blocks.append(child[0])
            num_tokens += child[1]
        table = BlockTable(self.pool)
        table.append_shared(blocks, num_tokens)
        self.sequences.append((table, root, ids[:num_tokens]))
        self.compute(len(self.sequences) - 1, ids[num_tokens:])

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, more=id_runs)
    def compute(self, pick: int, more: list[int]) -> None:
        table, root, ids = self.sequences[pick % len(self.sequences)]
        copies = table.prepare(len(ids) + len(more))
        if copies is None:
            return
        for copy in copies:
            self.arena[copy.target][: copy.num_tokens] = self.arena[copy.source][: copy.num_tokens]
        for token in more:
            block, row = table.blocks[len(ids) // BLOCK_TOKENS], len(ids) % BLOCK_TOKENS
            assert self.pool.is_private(block), "a write into a block that others may see"
            ids.append(token)
            self.arena[block][row] = (root, tuple(ids))
        for item in table.publish(array(*ids), root):
            assert self.arena[item.block][-1] == (
                root,
                tuple(ids[: BLOCK_TOKENS * table.names.index(item.identity.hash) + 2]),
            )

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        table, root, ids = self.sequences.pop(pick % len(self.sequences))
        tail = table.seal(array(*ids), root)
        if tail is not None:
            num_rows = tail.identity.num_tokens
            assert self.arena[tail.block][num_rows - 1] == (root, tuple(ids))
            assert self.pool.ids(tail.block).tolist() == ids[-num_rows:]
        table.release()

    @precondition(lambda self: 0 < len(self.sequences) < 4)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        table, root, ids = self.sequences[pick % len(self.sequences)]
        self.sequences.append((table.fork(), root, list(ids)))

    @rule(root=st.sampled_from(ROOTS), chain=chains)
    def register_before_its_parent(self, root: BlockHash, chain: list[list[int]]) -> None:
        """The last block alone; its parent's name may be given to others later, and they must not inherit it."""
        parent = root
        for ids in chain[:-1]:
            parent = self.pool.hash_fn(parent, array(*ids))
        block = self.pool.allocate()
        if block is None:
            return
        if all(self.pool.parent(other) != parent for other in range(NUM_BLOCKS)):
            self.before.pop(parent, None)
        is_free = self.pool.block_of(parent) is None
        if is_free and self.before.setdefault(parent, (root, chain[:-1])) == (root, chain[:-1]):
            self.arena[block] = self.kv(root, chain)
            self.ends.append(chain[-1])
            block = self.pool.register(block, self.pool.hash_fn(parent, array(*chain[-1])), parent, array(*chain[-1]))
        self.pool.release(block)

    @rule(root=st.sampled_from(ROOTS), chain=chains, rest=id_runs)
    def follow_by_name(self, root: BlockHash, chain: list[list[int]], rest: list[int]) -> None:
        parent, done = root, []
        for ids in chain:
            name = self.pool.hash_fn(parent, array(*ids))
            block = self.pool.find(name, array(*ids), parent=parent)
            assert self.pool.peek(name, array(*ids), parent=parent) == block
            if block is None:
                break
            parent, done = name, [*done, ids]
            assert self.arena[block] == self.kv(root, done)
        child = self.pool.find_child(parent, array(*rest))
        if child is not None:
            block, num_common = child
            expected = self.kv(root, [*done, rest[:num_common]])
            assert self.arena[block][:num_common] == expected

    @precondition(lambda self: self.sequences and self.ends)
    @rule(pick=picks, end=picks)
    def reuse_with_what_came_before_its_parent(self, pick: int, end: int) -> None:
        table, root, ids = self.sequences[pick % len(self.sequences)]
        starts = range(0, BLOCK_TOKENS * len(table.names), BLOCK_TOKENS)
        known = [ids[start : start + BLOCK_TOKENS] for start in starts]
        for count in range(1, len(known) + 1):
            self.reuse(root, [*known[:count], self.ends[end % len(self.ends)]])

    @rule(root=st.sampled_from(ROOTS), chain=chains)
    def reuse(self, root: BlockHash, chain: list[list[int]]) -> None:
        blocks = self.pool.try_reuse_prefix(root, array(*(token for ids in chain for token in ids)))
        for index, block in enumerate(blocks):
            assert self.arena[block] == self.kv(root, chain[: index + 1])
        self.pool.release_all(blocks)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def evict(self, block: int) -> None:
        self.pool.evict(block)

    def kv(self, root: BlockHash, chain: list[list[int]]) -> list[KV | None]:
        """What the rows of a chain's last block hold."""
        ids = tuple(token for part in chain for token in part)
        return [(root, ids[:end]) for end in range(len(ids) - len(chain[-1]) + 1, len(ids) + 1)]

    @invariant()
    def tables_read_back_their_own_kv(self) -> None:
        self.pool.check()
        for table, root, ids in self.sequences:
            table.check()
            for position in range(len(ids)):
                kv = self.arena[table.blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
                assert kv == (root, tuple(ids[: position + 1]))


TestWeakNames = WeakNamesMachine.TestCase
TestWeakNames.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def collision(pool: BlockPool) -> tuple[np.ndarray, np.ndarray]:
    """Two blocks' ids that have the same name under the first root."""
    seen: dict[BlockHash, np.ndarray] = {}
    for number in range(1000):
        ids = array(number, 7)
        name = pool.hash_fn(ROOTS[0], ids)
        if name in seen:
            return seen[name], ids
        seen[name] = ids
    raise AssertionError("no collision in 1,000 names of 8 bits")


def test_other_ids_of_the_same_name_are_not_found() -> None:
    pool = weak_pool(8)
    mine, theirs = collision(pool)
    block = pool.allocate()
    assert block is not None
    name = pool.hash_fn(ROOTS[0], mine)
    pool.register(block, name, ROOTS[0], mine)
    assert pool.find(name, theirs) is None and pool.find(name, mine) == block
    assert pool.try_reuse_prefix(ROOTS[0], theirs) == []
    assert pool.try_reuse_prefix(ROOTS[0], np.concatenate([mine, theirs])) == [block]


def test_the_same_ids_after_another_parent_of_the_same_name_are_not_reused() -> None:
    pool = weak_pool(8)
    ids = array(3, 4)
    names = {pool.hash_fn(ROOTS[0], ids)}
    others = [root_hash(fingerprint=b"", namespace=str(i), cache_salt="", secret=b"") for i in range(1000)]
    other = next(root for root in others if pool.hash_fn(root, ids) in names)
    block = pool.allocate()
    assert block is not None
    (name,) = names
    pool.register(block, name, ROOTS[0], ids)
    assert pool.try_reuse_prefix(other, ids) == []
    assert pool.find(name, ids, parent=other) is None and pool.peek(name, ids, parent=other) is None
    assert pool.find(name, ids, parent=ROOTS[0]) == block


def test_a_child_that_came_first_goes_to_no_other_parent() -> None:
    pool = weak_pool(8)
    mine, theirs = collision(pool)
    child, name = array(9, 9), pool.hash_fn(ROOTS[0], mine)
    (first, second), below = pool.allocate_many(2) or (), pool.hash_fn(name, child)
    assert pool.register(first, below, name, child) == first
    assert pool.register(second, name, ROOTS[0], theirs) == second
    assert pool.is_private(second), "its name stands for the parent of a child that is not its own"
    assert pool.try_reuse_prefix(ROOTS[0], np.concatenate([theirs, child])) == []
    pool.release(first)
    assert pool.evict(first)
    assert pool.register(second, name, ROOTS[0], theirs) == second
    assert pool.try_reuse_prefix(ROOTS[0], np.concatenate([theirs, child])) == [second]
    pool.check()


@pytest.mark.parametrize("bits", [1, 8])
def test_a_pool_of_colliding_names_stays_in_use(bits: int) -> None:
    pool = weak_pool(bits, 64)
    for start in range(0, 3000, 10):
        ids = np.arange(start, start + 10, dtype=np.uint32)
        table = BlockTable(pool)
        blocks = pool.try_reuse_prefix(ROOTS[0], ids)
        assert blocks == [], "these ids were never here"
        assert table.prepare(10) == []
        table.publish(ids, ROOTS[0])
        table.seal(ids, ROOTS[0])
        table.release()
    pool.check()
    assert pool.num_held == 0 and pool.num_cached <= 1 << bits
