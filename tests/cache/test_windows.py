"""Window parts and states: what a table needs is there and is what it computed, whatever others do; where a sequence
resumes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockCopy, BlockTable
from rekindle.cache.blocks.windows import ABSENT, WindowSlots, resume_position
from rekindle.parts import STATE, WindowPart

SIZE, NUM_BLOCKS = 4, 14
WINDOWS = {3: 9, 7: 11}  # tokens -> slots
ROOTS = [BlockHash(bytes([number]) * 32) for number in (1, 2)]
KV = tuple[int, ...]  # of a token: all ids up to it
id_runs = st.lists(st.integers(0, 1), min_size=1, max_size=14)
picks = st.integers(0, 100)


class WindowMachine(RuleBasedStateMachine):
    """`rows`: for each window and slot, the KV written to each of its tokens; `states` are slots for recurrent states,
    `state_rows` for each of these the tokens that its state has seen."""

    num_states = 0

    def __init__(self) -> None:
        super().__init__()
        self.slots = [
            WindowSlots(WindowPart(window), num_slots=number, num_blocks=NUM_BLOCKS)
            for window, number in WINDOWS.items()
        ]
        self.states = WindowSlots(STATE, num_slots=1 + self.num_states, num_blocks=NUM_BLOCKS)
        self.state_rows: list[KV | None] = [None] * self.states.num_slots
        self.all_slots = [*self.slots, self.states] if self.num_states else self.slots
        self.pool = BlockPool(NUM_BLOCKS, SIZE, windows=self.all_slots)
        self.rows: list[list[list[KV | None]]] = [
            [[None] * SIZE for _ in range(slots.num_slots)] for slots in self.slots
        ]
        self.tables: list[tuple[BlockTable, BlockHash, list[int]]] = []

    @initialize(most=st.none() | st.integers(0, NUM_BLOCKS), other=st.none() | st.integers(0, NUM_BLOCKS))
    def bound(self, most: int | None, other: int | None) -> None:
        for root, share in zip(ROOTS, (most, other), strict=True):
            if share is not None:
                self.pool.set_quota(root, share)

    def pick(self, number: int) -> tuple[BlockTable, BlockHash, list[int]]:
        return self.tables[number % len(self.tables)]

    @precondition(lambda self: len(self.tables) < 4)
    @rule(root=st.sampled_from(ROOTS), ids=id_runs)
    def attach(self, root: BlockHash, ids: list[int]) -> None:
        """Resume at the last point that the stored blocks allow, and no later one."""
        blocks = self.pool.try_reuse_prefix(root, ids)
        parent = self.pool.name(blocks[-1]) if blocks else root
        assert parent is not None
        child = self.pool.find_child(parent, ids[len(blocks) * SIZE :] or [9])
        num_matched = len(blocks) * SIZE
        if child is not None:
            self.pool.share(child[0])
            blocks.append(child[0])
            num_matched += child[1]
        step = SIZE if self.num_states else 1
        position = resume_position(
            num_matched // step * step,
            [slots.kind for slots in self.all_slots],
            SIZE,
            lambda index, which: self.all_slots[which].has(blocks[index]),
        )
        assert position == max(at for at in range(0, num_matched + 1, step) if self.is_covered(blocks, at))
        kept = -(-position // SIZE)
        self.pool.release_all(blocks[kept:])
        table = BlockTable(self.pool)
        table.append_shared(blocks[:kept], position)
        self.tables.append((table, root, ids[:position]))

    def is_covered(self, blocks: list[int], position: int) -> bool:
        return all(
            slots.has(blocks[at // SIZE])
            for slots in self.slots
            for at in range(max(0, position - slots.kind.window) // SIZE * SIZE, position)
        ) and not (self.num_states and position and not self.states.has(blocks[(position - 1) // SIZE]))

    @precondition(lambda self: self.tables)
    @rule(number=picks, more=id_runs, spare=st.integers(0, 4), is_marked=st.booleans(), points=st.sets(picks))
    def compute(self, number: int, more: list[int], spare: int, is_marked: bool, points: set[int]) -> None:
        table, root, ids = self.pick(number)
        end = len(ids) + len(more)
        copies = table.prepare(end + spare, points, root=root)
        if copies is None or (spare and table.prepare(end, points, root=root) is None):
            return
        for copy in copies:
            for slots, rows in zip(self.slots, self.rows, strict=True):
                source, target = slots.slot_of[copy.source], slots.slot_of[copy.target]
                assert source != ABSENT and target != ABSENT
                rows[target][: copy.num_tokens] = rows[source][: copy.num_tokens]
        ids += more
        for at in range(end - len(more), end):
            for slots, rows in zip(self.slots, self.rows, strict=True):
                slot = slots.slot_of[table.blocks[at // SIZE]]
                assert slot != ABSENT, "nowhere to write"
                rows[slot][at % SIZE] = tuple(ids[: at + 1])
        if self.num_states:
            self.compute_states(table, ids, len(more), copies)
            for point in [at for at in points if end - len(more) < at <= end]:
                for index in STATE.kept_blocks(point, SIZE):
                    if (index + 1) * SIZE > end - len(more):
                        assert self.states.has(table.blocks[index]), "a resume point has no state"
        table.publish(ids, root)
        if is_marked:
            for index in STATE.kept_blocks(end, SIZE) if self.num_states else ():
                self.states.mark(table.blocks[index])
            for slots in self.slots:
                for block in table.blocks[slots.kind.first_needed(end, SIZE) : -(-end // SIZE)]:
                    slots.mark(block)
        table.end_parts()

    def compute_states(self, table: BlockTable, ids: list[int], num_new: int, copies: list[BlockCopy]) -> None:
        start = len(ids) - num_new
        for copy in copies:
            source, target = self.states.slot_of[copy.source], self.states.slot_of[copy.target]
            if source != ABSENT and target != ABSENT:
                self.state_rows[target] = self.state_rows[source]
        if start:
            before = self.states.slot_of[table.blocks[(start - 1) // SIZE]]
            assert before != ABSENT and self.state_rows[before] == tuple(ids[:start]), "nothing to go on from"
        for index in range(start // SIZE, -(-len(ids) // SIZE)):
            slot = self.states.slot_of[table.blocks[index]]
            if slot != ABSENT:
                self.state_rows[slot] = tuple(ids[: (index + 1) * SIZE])
        assert self.states.slot_of[table.blocks[(len(ids) - 1) // SIZE]] != ABSENT, "nowhere to keep the state"

    @precondition(lambda self: self.tables)
    @rule(number=picks)
    def end(self, number: int) -> None:
        table, root, ids = self.pick(number)
        table.seal(ids, root)
        table.release()
        self.tables.remove((table, root, ids))

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(number=picks)
    def fork(self, number: int) -> None:
        table, root, ids = self.pick(number)
        self.tables.append((table.fork(), root, ids.copy()))

    @rule(number=picks)
    def evict(self, number: int) -> None:
        idle = self.pool.idle_blocks()
        if idle:
            self.pool.evict(idle[number % len(idle)])

    @invariant()
    def what_is_needed_is_there(self) -> None:
        self.pool.check()
        for table, _, ids in self.tables:
            table.check()
            for slots, rows in zip(self.slots, self.rows, strict=True):
                for at in range(max(0, len(ids) - slots.kind.window), len(ids)):
                    slot = slots.slot_of[table.blocks[at // SIZE]]
                    assert slot != ABSENT and rows[slot][at % SIZE] == tuple(ids[: at + 1]), (slots, at)

    @invariant()
    def no_more_is_held_than_windows(self) -> None:
        for slots in self.slots:
            held = {
                block
                for table, _, ids in self.tables
                for block in table.blocks[slots.kind.first_needed(len(ids), SIZE) :]
            }
            num_held = slots.num_slots - 1 - slots.num_available
            assert len(held) <= num_held <= len(held) + len(self.tables), "each may hold the source of a copy as well"


class StateMachine(WindowMachine):
    """With slots for states as well: at the end of every block that has one is the state after it."""

    num_states = 9

    @invariant()
    def states_are_those_after_their_blocks(self) -> None:
        for table, _, ids in self.tables:
            if ids:
                slot = self.states.slot_of[table.blocks[(len(ids) - 1) // SIZE]]
                assert slot != ABSENT and self.state_rows[slot] == tuple(ids)
        for block in range(NUM_BLOCKS):
            name, slot = self.pool.name(block), self.states.slot_of[block]
            if name is not None and slot != ABSENT and len(self.pool.ids(block)) == SIZE:
                assert self.state_rows[slot] == self.chain(block)

    def chain(self, block: int) -> KV:
        """The ids of a published block and all before it."""
        parent = self.pool.parent(block)
        assert parent is not None
        above = self.pool.block_of(parent)
        return (*(() if above is None else self.chain(above)), *self.pool.ids(block).tolist())

    @invariant()
    def few_states_are_held(self) -> None:
        held = self.states.num_slots - 1 - self.states.num_available
        assert held <= sum(parts for table, _, _ in self.tables for parts in table.num_parts_held[-1:])


for machine in (WindowMachine, StateMachine):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWindowMachine = WindowMachine.TestCase
TestStateMachine = StateMachine.TestCase


@given(
    st.integers(0, 40),
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
    st.lists(st.sets(st.integers(0, 9)), min_size=2, max_size=2),
)
def test_a_sequence_resumes_at_the_last_point_whose_windows_are_there(
    num_tokens: int, windows: list[int], present: list[set[int]]
) -> None:
    def is_point(position: int) -> bool:
        return all(
            at // SIZE in present[which]
            for which, window in enumerate(windows)
            for at in range(WindowPart(window).first_needed(position, SIZE) * SIZE, position)
        )

    found = resume_position(num_tokens, [*map(WindowPart, windows)], SIZE, lambda index, which: index in present[which])
    assert found == max(at for at in range(num_tokens + 1) if is_point(at))


def test_a_long_match_without_windows_asks_about_each_block_once() -> None:
    asked: list[int] = []

    def has_part(index: int, which: int) -> bool:
        asked.append(index)
        return index < 3

    assert resume_position(1000 * SIZE, [WindowPart(5)], SIZE, has_part) == 3 * SIZE
    assert len(asked) == len(set(asked))


def test_what_was_passed_goes_before_what_is_marked() -> None:
    slots = WindowSlots(WindowPart(4), num_slots=4, num_blocks=8)
    for block in (0, 1, 2):
        assert slots.take(block)
    assert not slots.take(3), "all slots are held"
    slots.mark(0)
    for block in (0, 1, 2):
        slots.release(block)
    assert (slots.num_available, slots.num_kept) == (3, 1)
    for block, gone in ((3, 1), (4, 2), (5, 0)):
        assert slots.take(block)
        assert not slots.has(gone)
    assert slots.take_used_free() == [], "a slot that has another block is not free"
    slots.release(3)
    slots.drop(3)
    assert slots.take_used_free() == [2] and slots.take_used_free() == []
    slots.check([4, 5])


def test_a_part_that_is_used_again_outlives_older_ones() -> None:
    slots = WindowSlots(WindowPart(4), num_slots=3, num_blocks=4)
    for block in (0, 1):
        assert slots.take(block)
        slots.mark(block)
        slots.release(block)
    slots.hold(0)
    slots.release(0)
    assert slots.take(2)
    assert slots.has(0) and not slots.has(1)


def test_equal_blocks_become_one_with_the_parts_and_holders_of_both() -> None:
    slots = WindowSlots(WindowPart(4), num_slots=5, num_blocks=4)
    for block in (0, 1):
        assert slots.take(block)
    slots.mark(0)
    slots.move(0, 1)
    assert not slots.has(0) and slots.is_held(1)
    slots.release(1)
    assert slots.is_held(1)
    slots.release(1)
    assert slots.num_kept == 1, "a resume point of either needs it"
    slots.move(1, 2)
    assert slots.has(2) and not slots.has(1)
    slots.check([2])


def test_a_tail_that_two_tables_hold_keeps_its_part_when_one_finds_it_published() -> None:
    slots = WindowSlots(WindowPart(8), num_slots=9, num_blocks=16)
    pool, ids = BlockPool(16, SIZE, windows=[slots]), [1, 2, 3, 4, 5, 6]
    first, other, second = (BlockTable(pool) for _ in range(3))
    for table in (first, other):
        assert table.prepare(len(ids)) == []
        table.publish(ids, ROOTS[0])
        table.end_parts()
    for block in first.blocks:
        pool.share(block)
    second.append_shared(list(first.blocks), len(ids))
    other.seal(ids, ROOTS[0])
    other.release()
    assert second.seal(ids, ROOTS[0]) is None
    second.release()
    first.check()
    assert first.prepare(len(ids) + 1) == []
    first.publish([*ids, 7], ROOTS[0])
    first.release()
    pool.check()


def test_a_sequence_holds_the_state_at_the_end_of_its_last_full_block() -> None:
    """It is what it goes on from if it is preempted, and what the end of a turn keeps."""
    slots = WindowSlots(STATE, num_slots=4, num_blocks=16)
    pool, ids = BlockPool(16, SIZE, windows=[slots]), [1, 2, 3, 4, 5, 6]
    table, other = BlockTable(pool), BlockTable(pool)
    for end in (4, 6):
        assert table.prepare(end) == []
        table.publish(ids[:end], ROOTS[0])
        table.end_parts()
    assert [slots.is_held(block) for block in table.blocks] == [True, True]
    assert other.prepare(4) == [] and other.prepare(9) is None, "there is a slot for one of its blocks"
    assert table.prepare(9) is None
    other.release()
    assert table.prepare(9) == []
    table.publish([*ids, 7, 8, 9], ROOTS[0])
    table.end_parts()
    assert [slots.is_held(block) for block in table.blocks] == [False, True, True]


def test_the_copy_of_a_shared_block_has_a_part_of_its_own() -> None:
    slots, ids = WindowSlots(WindowPart(7), num_slots=6, num_blocks=8), [0, 1, 0, 1, 0, 1]
    pool = BlockPool(8, SIZE, windows=[slots])
    table = BlockTable(pool)
    assert table.prepare(len(ids)) == []
    table.publish(ids, ROOTS[0])
    other = table.fork()
    copies = other.prepare(len(ids) + 4)
    assert copies is not None and len(copies) == 1
    assert other.blocks[1:2] == [copies[0].target] and other.blocks[1] != table.blocks[1]
    assert [slots.is_held(block) for block in other.blocks] == [True, True, True]
    table.check()
    other.check()


def test_resume_points_do_without_states_where_slots_are_short() -> None:
    slots = WindowSlots(STATE, num_slots=4, num_blocks=16)
    pool = BlockPool(16, SIZE, windows=[slots])
    table = BlockTable(pool)
    assert table.prepare(9 * SIZE, range(SIZE + 1, 9 * SIZE, SIZE)) == [], "of eight points, and three slots"
    assert table.num_parts_held == [1] and slots.is_held(table.blocks[-1])
    other = BlockTable(pool)
    assert other.prepare(3 * SIZE, {SIZE + 1}) == [] and other.num_parts_held == [2]
    assert BlockTable(pool).prepare(1) is None


def test_a_table_says_how_it_is_divided() -> None:
    slots = WindowSlots(WindowPart(1024), num_slots=2001, num_blocks=4)
    assert slots.take(0)
    assert "2,001 slots for parts window-1024: 1,999 free, 0 passed, 0 kept, 1 held" in repr(slots)


@pytest.mark.parametrize(("position", "window", "first"), [(0, 8, 0), (8, 8, 0), (9, 8, 0), (12, 8, 1), (13, 1, 3)])
def test_a_window_reaches_back_to_the_token_before_the_first_it_shows(position: int, window: int, first: int) -> None:
    assert WindowPart(window).first_needed(position, SIZE) == first
    seen = np.arange(max(0, position - 1 - window + 1), position)  # by the token before `position`, when it runs again
    assert not len(seen) or first == seen[0] // SIZE
