"""Quotas of slots for window parts and states: whose slot is taken first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable
from rekindle.cache.blocks.windows import WindowSlots
from rekindle.parts import WindowPart

SIZE, NUM_BLOCKS, NUM_SLOTS, NUM_GROUPS = 4, 12, 5, 3
QUIET, FLOOD = (BlockHash(bytes([number]) * 32) for number in (1, 2))
blocks = st.integers(0, NUM_BLOCKS - 1)


def group_of(block: int) -> int:
    return block % NUM_GROUPS


class SlotsMachine(RuleBasedStateMachine):
    """`refs` and `marked` are of the blocks that have a slot, `unheld` are those that nobody holds in the order of
    their release or mark, `over` the groups over their quotas in the order in which they exceeded them."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = WindowSlots(WindowPart(SIZE), num_slots=NUM_SLOTS + 1, num_blocks=NUM_BLOCKS)
        self.refs: dict[int, int] = {}
        self.marked: set[int] = set()
        self.unheld: list[int] = []
        self.quotas: dict[int, int] = {}
        self.over: list[int] = []

    def weigh(self) -> None:
        num = {group: sum(group_of(block) == group for block in self.refs) for group in self.quotas}
        now = [group for group, most in self.quotas.items() if num[group] > most]
        self.over = [group for group in self.over if group in now] + [group for group in now if group not in self.over]

    def leave(self, block: int) -> None:
        del self.refs[block]
        self.marked.discard(block)
        if block in self.unheld:
            self.unheld.remove(block)
        self.weigh()

    def note_mark(self, block: int) -> None:
        if block not in self.marked:
            self.marked.add(block)
            if block in self.unheld:
                self.unheld.remove(block)
                self.unheld.append(block)

    def next_taken(self) -> int:
        own = ([block for block in self.unheld if group_of(block) == group] for group in self.over)
        first = next(filter(None, own), self.unheld)
        return min(first, key=lambda block: (block in self.marked, first.index(block)))

    @initialize(first=st.integers(0, 3), second=st.integers(0, 3))
    def begin(self, first: int, second: int) -> None:
        self.set_quota(1, first)
        self.set_quota(2, second)

    @rule(group=st.integers(1, NUM_GROUPS - 1), most=st.none() | st.integers(0, 3))
    def set_quota(self, group: int, most: int | None) -> None:
        self.slots.set_quota(group, most)
        self.quotas.pop(group, None)
        if most is not None:
            self.quotas[group] = most
        self.weigh()

    @rule(block=blocks)
    def take(self, block: int) -> None:
        if block in self.refs:
            return
        if len(self.refs) == NUM_SLOTS and not self.unheld:
            assert not self.slots.take(block, group_of(block))
            return
        if len(self.refs) == NUM_SLOTS:
            self.leave(self.next_taken())
        assert self.slots.take(block, group_of(block))
        self.refs[block] = 1
        self.weigh()

    @rule(block=blocks)
    def hold(self, block: int) -> None:
        if block in self.refs:
            self.slots.hold(block)
            self.refs[block] += 1
            if self.refs[block] == 1:
                self.unheld.remove(block)

    @rule(block=blocks)
    def release(self, block: int) -> None:
        if self.refs.get(block):
            self.slots.release(block)
            self.refs[block] -= 1
            if not self.refs[block]:
                self.unheld.append(block)

    @rule(block=blocks)
    def mark(self, block: int) -> None:
        self.slots.mark(block)
        if block in self.refs:
            self.note_mark(block)

    @rule(block=blocks, is_marked=st.booleans())
    def use(self, block: int, is_marked: bool) -> None:
        self.take(block)
        if is_marked:
            self.mark(block)
        self.release(block)

    @rule(block=blocks)
    def drop(self, block: int) -> None:
        if not self.refs.get(block):
            self.slots.drop(block)
            if block in self.refs:
                self.leave(block)

    @rule(source=blocks)
    def move(self, source: int) -> None:
        target = (source + NUM_GROUPS) % NUM_BLOCKS
        self.slots.move(source, target)
        if source in self.refs and target in self.refs:
            if source in self.marked:
                self.note_mark(target)
            self.refs[target] += self.refs[source]
            if self.refs[target] and target in self.unheld:
                self.unheld.remove(target)
            self.leave(source)
        elif source in self.refs:
            self.refs[target] = self.refs.pop(source)
            self.marked = {target if block == source else block for block in self.marked}
            self.unheld = [target if block == source else block for block in self.unheld]

    @invariant()
    def slots_are_where_the_model_has_them(self) -> None:
        self.slots.check(range(NUM_BLOCKS), {block: group_of(block) for block in range(NUM_BLOCKS)})
        assert {block for block in range(NUM_BLOCKS) if self.slots.has(block)} == set(self.refs)
        assert self.slots.num_kept == len(self.marked.intersection(self.unheld))


SlotsMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlotsMachine = SlotsMachine.TestCase


def compute(pool: BlockPool, root: BlockHash, ids: list[int]) -> None:
    """A sequence from `root` on whose end is a resume point."""
    table, (slots,) = BlockTable(pool), pool.windows
    assert table.prepare(len(ids), root=root) == []
    table.publish(ids, root)
    slots.mark(table.blocks[-1])
    table.release()


@pytest.mark.parametrize(("most", "is_kept"), [(1, True), (20, True), (36, False), (None, False)])
def test_a_flood_takes_its_own_slots_before_those_of_others(most: int | None, is_kept: bool) -> None:
    """All of a long chunk counts while its slots are taken, not once it is published; one slot of ten, which a quota of
    one block of forty allows, is within it."""
    slots = WindowSlots(WindowPart(SIZE), num_slots=11, num_blocks=40)
    pool = BlockPool(40, SIZE, windows=[slots])
    for root in (QUIET, FLOOD):
        pool.set_quota(root, most)
    compute(pool, QUIET, [0] * SIZE)
    (block,) = pool.idle_blocks()
    for number in range(1, 5):
        compute(pool, FLOOD, [number] * 9 * SIZE)
        pool.check()
    assert pool.num_evictions == 0 and slots.has(block) == is_kept


def test_of_a_group_over_its_quota_what_was_passed_goes_first() -> None:
    slots = WindowSlots(WindowPart(SIZE), num_slots=5, num_blocks=8)
    slots.set_quota(1, 1)
    for block, group in ((0, 0), (1, 1), (2, 1), (3, 1)):
        assert slots.take(block, group)
        if block == 1:
            slots.mark(block)
        slots.release(block)
    slots.mark(2)
    for block, gone in ((4, 3), (5, 1), (6, 0)):
        assert slots.take(block, 2) and not slots.has(gone)
    assert slots.has(2)
    slots.set_quota(1, None)
    slots.check([2, 4, 5, 6], {2: 1, 4: 2, 5: 2, 6: 2})


def test_a_part_that_counts_against_another_group_than_its_block_is_found() -> None:
    slots = WindowSlots(WindowPart(SIZE), num_slots=5, num_blocks=8)
    slots.set_quota(1, 1)
    assert slots.take(3, 1)
    slots.check([3], {3: 1, 4: 0})
    with pytest.raises(AssertionError, match="block 3 of group 2 counts against 1"):
        slots.check([3], {3: 2})
