"""Block pool and tables together, against a naive model that also keeps what every block would hold.

The model's KV of a position is the whole sequence up to it, which is what real KV depends on: reading back a table's
blocks shows at once a wrong share, a missed copy or a write into a block that others see.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache import BlockHash, BlockPool, BlockTable, Published, block_hash, root_hash, tail_hash

BLOCK_TOKENS = 4
NUM_BLOCKS = 9
ROOTS = [root_hash(fingerprint=b"fp", namespace=name, cache_salt="", secret=b"s") for name in ("a", "b")]
KV = tuple[bytes, tuple[int, ...]]  # root, ids up to and with the position

id_runs = st.lists(st.sampled_from([1, 257]), max_size=11)  # alike in their first byte
picks = st.integers(0, 50)


def array(ids: list[int] | tuple[int, ...]) -> np.ndarray:
    return np.array(ids, np.uint32)


class Sequence:
    """One table with what the model knows of it."""

    def __init__(self, table: BlockTable, root: BlockHash, ids: list[int]) -> None:
        self.table = table
        self.root = root
        self.ids = ids  # of stored positions
        self.sources: list[int] = []  # still held after a copy

    def held(self) -> list[int]:
        return self.table.blocks + self.sources


def test_a_tail_whose_block_a_shorter_fork_sealed_first_is_not_published() -> None:
    """Its rows stay right; those that the shorter tail does not have are computed again by the next turn."""
    pool = BlockPool(4, BLOCK_TOKENS)
    table = BlockTable(pool)
    table.prepare(2)
    table.publish(array([1, 2]), ROOTS[0])
    fork = table.fork()
    fork.truncate(1)
    assert fork.seal(array([1]), ROOTS[0]) is not None
    assert table.seal(array([1, 2]), ROOTS[0]) is None
    assert table.blocks == fork.blocks and table.num_tokens == 2
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Model: `named` name -> (block, parent, ids), `arena` block -> KV of each row."""

    @initialize()
    def begin(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_TOKENS, on_evict=self.left)
        self.named: dict[BlockHash, tuple[int, BlockHash, tuple[int, ...]]] = {}
        self.arena: list[list[KV | None]] = [[None] * BLOCK_TOKENS for _ in range(NUM_BLOCKS)]
        self.sequences: list[Sequence] = []

    def left(self, name: BlockHash) -> None:
        block, _, _ = self.named.pop(name)
        assert block not in self.held(), "a held block was evicted"
        assert all(parent != name for _, parent, _ in self.named.values()), "a parent left before its child"

    def held(self) -> set[int]:
        return {block for sequence in self.sequences for block in sequence.held()}

    def num_obtainable(self) -> int:
        """Free blocks, and cached ones that could be evicted leaf by leaf."""
        held, left = self.held(), dict(self.named)
        num_free = NUM_BLOCKS - len(held | {block for block, _, _ in left.values()})
        while True:
            parents = {parent for _, parent, _ in left.values()}
            leaves = [name for name, (block, _, _) in left.items() if block not in held and name not in parents]
            if not leaves:
                return num_free
            num_free += len(leaves)
            for name in leaves:
                del left[name]

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(root=st.sampled_from(ROOTS), ids=id_runs)
    def start_from_what_is_hot(self, root: BlockHash, ids: list[int]) -> None:
        expected, parent = [], root
        for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            name = block_hash(parent, array(ids[start : start + BLOCK_TOKENS]))
            if name not in self.named:
                break
            expected.append(self.named[name][0])
            parent = name
        blocks = self.pool.try_reuse_prefix(root, array(ids))
        assert blocks == expected
        num_tokens = len(blocks) * BLOCK_TOKENS
        rest = tuple(ids[num_tokens:])
        overlaps = [common(rest, own) for _, above, own in self.named.values() if above == parent]
        child = self.pool.find_child(parent, array(rest))
        assert (child[1] if child else 0) == max(overlaps, default=0)
        if child is not None:
            self.pool.share(child[0])
            blocks.append(child[0])
            num_tokens += child[1]
        table = BlockTable(self.pool)
        table.append_shared(blocks, num_tokens)
        self.sequences.append(Sequence(table, root, ids[:num_tokens]))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, more=id_runs, stored=picks, spare=st.integers(0, 5))
    def step(self, pick: int, more: list[int], stored: int, spare: int) -> None:
        """Prepare for `more` and some spare positions, compute a part of it, publish."""
        sequence = self.pick(pick)
        table, before, start = sequence.table, list(sequence.table.blocks), len(sequence.ids)
        sequence.sources.clear()
        obtainable = self.num_obtainable()
        wanted = start + len(more) + spare
        num_needed = self.num_needed(sequence, wanted)
        copies = table.prepare(wanted)
        assert (copies is None) == (num_needed > obtainable), f"{num_needed} needed, {obtainable} to be had"
        if copies is None:
            assert table.blocks == before
            return
        for copy in copies:
            assert copy.source not in table.blocks and self.pool.refs(copy.source) > 0
            sequence.sources.append(copy.source)
            self.arena[copy.target][: copy.num_tokens] = self.arena[copy.source][: copy.num_tokens]
        ids = sequence.ids + more[: stored % (len(more) + 1)]
        for position in range(start, len(ids)):
            block = table.blocks[position // BLOCK_TOKENS]
            assert self.pool.is_private(block), "a write into a block that others may see"
            self.arena[block][position % BLOCK_TOKENS] = (sequence.root, tuple(ids[: position + 1]))
        sequence.ids = ids
        sequence.sources.clear()
        self.note(sequence, table.publish(array(ids), sequence.root))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, more=st.integers(1, 6))
    def prepare_and_stop(self, pick: int, more: int) -> None:
        """A step that was planned and not run; its copies were made, and their sources stay held."""
        sequence = self.pick(pick)
        sequence.sources.clear()
        for copy in sequence.table.prepare(len(sequence.ids) + more) or []:
            sequence.sources.append(copy.source)
            self.arena[copy.target][: copy.num_tokens] = self.arena[copy.source][: copy.num_tokens]

    def num_needed(self, sequence: Sequence, wanted: int) -> int:
        """Blocks to get for positions up to `wanted`: those missing, and one for a tail others may see."""
        start, blocks = len(sequence.ids), sequence.table.blocks
        if wanted <= start:
            return 0
        needed = max(0, -(-wanted // BLOCK_TOKENS) - len(blocks))
        if start % BLOCK_TOKENS:
            tail = blocks[start // BLOCK_TOKENS]
            users = [other for other in self.sequences for block in other.held() if block == tail]
            needed += len(users) > 1 or tail in (block for block, _, _ in self.named.values())
        return needed

    def note(self, sequence: Sequence, published: list[Published]) -> None:
        for item in published:
            identity = item.identity
            assert identity.hash not in self.named and identity.root == sequence.root
            index = sequence.table.blocks.index(item.block)
            ids = tuple(sequence.ids[index * BLOCK_TOKENS :][: identity.num_tokens])
            assert identity.ids.tolist() == list(ids)
            self.named[identity.hash] = (item.block, identity.parent, ids)

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def seal(self, pick: int) -> None:
        sequence = self.pick(pick)
        sequence.sources.clear()
        tail = sequence.table.seal(array(sequence.ids), sequence.root)
        num_rows = len(sequence.ids) % BLOCK_TOKENS
        if tail is None:
            last = sequence.table.blocks[-1] if num_rows else None
            others = [ids for block, _, ids in self.named.values() if block == last]
            assert not num_rows or others, "a tail was not named"
            assert tuple(sequence.ids[len(sequence.ids) - num_rows :]) not in others
            return
        ids = tuple(sequence.ids[-num_rows:])
        name, parent = tail.identity.hash, tail.identity.parent
        assert name == tail_hash(sequence.table.head(sequence.root), array(ids))
        assert tuple(tail.identity.ids.tolist()) == ids
        assert name not in self.named or self.named[name][0] == tail.block
        self.named[name] = (tail.block, parent, ids)

    @precondition(lambda self: 0 < len(self.sequences) < 4)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        sequence = self.pick(pick)
        self.sequences.append(Sequence(sequence.table.fork(), sequence.root, list(sequence.ids)))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks, keep=picks)
    def truncate(self, pick: int, keep: int) -> None:
        sequence = self.pick(pick)
        sequence.ids = sequence.ids[: keep % (len(sequence.ids) + 1)]
        sequence.sources.clear()
        sequence.table.truncate(len(sequence.ids))

    @precondition(lambda self: self.sequences)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        sequence = self.pick(pick)
        sequence.table.release()
        sequence.table.release()
        self.sequences.remove(sequence)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def evict(self, block: int) -> None:
        parents = {parent for _, parent, _ in self.named.values()}
        names = [name for name, (other, _, _) in self.named.items() if other == block and block not in self.held()]
        assert self.pool.evict(block) == any(name not in parents for name in names)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def demote(self, block: int) -> None:
        is_cached = block not in self.held() and block in (other for other, _, _ in self.named.values())
        assert self.pool.demote(block) == is_cached

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def collide(self, data: st.DataObject) -> None:
        """A full block that claims a name whose ids are others stays private, and nobody finds it."""
        name = data.draw(st.sampled_from(sorted(self.named)))
        _, parent, ids = self.named[name]
        block = self.pool.allocate()
        if block is None or len(ids) < BLOCK_TOKENS or name not in self.named:
            if block is not None:
                self.pool.release(block)
            return
        others = array([7] * BLOCK_TOKENS)
        assert self.pool.register(block, name, parent, others) == block
        assert self.pool.register(block, name, ROOTS[0] if parent != ROOTS[0] else ROOTS[1], array(ids)) == block
        assert self.pool.is_private(block)
        assert self.pool.find(name, others) is None
        assert self.pool.find(name, array(ids)) == self.named[name][0]
        self.pool.release(block)

    @invariant()
    def tables_read_back_their_own_kv(self) -> None:
        for sequence in self.sequences:
            sequence.table.check()
            assert sequence.table.num_tokens == len(sequence.ids)
            for position in range(len(sequence.ids)):
                kv = self.arena[sequence.table.blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS]
                assert kv == (sequence.root, tuple(sequence.ids[: position + 1]))

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        held = self.held()
        cached = {block for block, _, _ in self.named.values()} - held
        assert self.pool.num_held == len(held)
        assert self.pool.num_cached == len(cached)
        assert self.pool.num_free + len(cached) + len(held) == NUM_BLOCKS
        references = [block for sequence in self.sequences for block in sequence.held()]
        for block in range(NUM_BLOCKS):
            assert self.pool.refs(block) == references.count(block)
        for name, (block, parent, ids) in self.named.items():
            assert (self.pool.name(block), self.pool.parent(block)) == (name, parent)
            assert self.pool.ids(block).tolist() == list(ids)

    def teardown(self) -> None:
        for sequence in getattr(self, "sequences", []):
            sequence.table.release()
        if hasattr(self, "pool"):
            assert self.pool.num_held == 0, "a reference leaked"


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
