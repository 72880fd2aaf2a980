"""The order of leaving against a naive model that searches all slots."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.eviction import EvictionOrder

NUM_SLOTS = 10
STEPS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 10.0, -2.0])  # of the clock: also none, and back


@dataclass
class Entry:
    """What the model knows of a slot."""

    parent: int
    group: int
    is_held: bool = True
    last_use: float = 0.0
    uses: int = 0
    turn: int = 0
    rank: int = 0
    is_demoted: bool = False


class OrderMachine(RuleBasedStateMachine):
    """Expired ones first, then a group over its quota, then demoted ones, rank, last use and turn."""

    @initialize(ttl=st.sampled_from([None, 6.0]))
    def begin(self, ttl: float | None) -> None:
        self.order = EvictionOrder(ttl=ttl)
        self.ttl = ttl
        self.entries: dict[int, Entry] = {}
        self.quota: dict[int, int] = {}
        self.over: list[int] = []
        self.now = self.latest = 100.0
        self.turn = 0
        for slot in range(0, NUM_SLOTS, 2):
            self.come(slot, -1, slot % 3)

    @precondition(lambda self: len(self.entries) < NUM_SLOTS)
    @rule(data=st.data(), group=st.integers(0, 2), num=st.integers(1, 3))
    def add(self, data: st.DataObject, group: int, num: int) -> None:
        """Let some in at once, so that the order does not run dry."""
        for _ in range(min(num, NUM_SLOTS - len(self.entries))):
            slot = data.draw(st.sampled_from([slot for slot in range(NUM_SLOTS) if slot not in self.entries]))
            self.come(slot, data.draw(st.sampled_from([-1, *range(slot)])), group)

    def come(self, slot: int, parent: int, group: int) -> None:
        self.order.add(slot, parent, group=group)
        self.entries[slot] = Entry(parent, group)
        self.weigh()
        if group != 1:
            self.order.release(slot, self.now)
            self.entries[slot].is_held = False
            self.use(self.entries[slot])

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.entries)))
        self.order.hold(slot)
        self.entries[slot].is_held = True

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), rank=st.sampled_from([0, 0, 0, 1, 255]))
    def release(self, data: st.DataObject, rank: int) -> None:
        for slot in data.draw(st.lists(st.sampled_from(sorted(self.entries)), min_size=1, max_size=5)):
            self.now += data.draw(STEPS)
            self.order.release(slot, self.now, rank=rank)
            self.entries[slot].is_held = False
            self.entries[slot].rank = rank
            self.use(self.entries[slot])
            self.order.check()

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        for slot in data.draw(st.lists(st.sampled_from(sorted(self.entries)), min_size=1, max_size=5)):
            self.now += data.draw(STEPS)
            self.order.touch(slot, self.now)
            self.use(self.entries[slot])

    @precondition(lambda self: any(entry.uses for entry in self.entries.values()))
    @rule(data=st.data(), rank=st.sampled_from([0, 1]))
    def settle(self, data: st.DataObject, rank: int) -> None:
        slot = data.draw(st.sampled_from(sorted(slot for slot, entry in self.entries.items() if entry.uses)))
        self.order.settle(slot, rank=rank)
        self.entries[slot].is_held = False
        self.entries[slot].rank = rank

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.entries)))
        entry = self.entries[slot]
        assert self.order.demote(slot) == (not entry.is_held)
        if not entry.is_held:
            self.turn += 1
            entry.is_demoted, entry.turn = True, self.turn

    @precondition(lambda self: self.entries)
    @rule(data=st.data(), is_vacated=st.booleans())
    def remove(self, data: st.DataObject, is_vacated: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.entries)))
        if is_vacated or not self.order.is_leaf(slot):
            self.order.vacate(slot)
        else:
            self.order.remove(slot)
        self.forget(slot)

    @rule(group=st.integers(0, 2), most=st.none() | st.integers(0, 3))
    def set_quota(self, group: int, most: int | None) -> None:
        self.order.set_quota(group, most)
        self.quota.pop(group, None)
        if most is not None:
            self.quota[group] = most
        self.weigh()

    @rule(step=STEPS)
    def pop(self, step: float) -> None:
        self.now += step
        self.latest = max(self.latest, self.now)
        free = self.free()
        expected = self.first_expired(self.latest)
        if expected is None:
            crowded = [[slot for slot in free if self.entries[slot].group == group] for group in self.over]
            candidates = next((slots for slots in crowded if slots), free)
            expected = min(candidates, key=self.place, default=None)
        assert self.order.pop(self.now) == expected
        self.forget(expected)

    @rule(step=STEPS)
    def pop_expired(self, step: float) -> None:
        self.now += step
        expected = self.first_expired(self.now)
        assert self.order.pop_expired(self.now) == expected
        self.forget(expected)

    @invariant()
    def agrees(self) -> None:
        self.order.check()
        num_held = sum(entry.is_held for entry in self.entries.values())
        assert (len(self.order), self.order.num_held) == (len(self.entries), num_held)
        assert self.order.num_idle == len(self.entries) - num_held
        parents = {entry.parent for entry in self.entries.values()}
        for slot in range(NUM_SLOTS + 1):
            assert (slot in self.order) == (slot in self.entries)
            assert self.order.is_leaf(slot) == (slot not in parents)
        for slot, entry in self.entries.items():
            assert self.order.is_held(slot) == entry.is_held and self.order.parent(slot) == entry.parent
            assert self.order.last_use(slot) == (entry.last_use if entry.uses else None)
            is_over = bool(entry.uses) and not entry.is_held and self.deadline(entry) <= self.now
            assert self.order.is_expired(slot, self.now) == is_over
            assert self.order.group(slot) == entry.group

    def free(self) -> list[int]:
        parents = {entry.parent for entry in self.entries.values()}
        return [slot for slot, entry in self.entries.items() if not entry.is_held and slot not in parents]

    def first_expired(self, now: float) -> int | None:
        over = [slot for slot in self.free() if self.deadline(self.entries[slot]) <= now]
        return min(over, key=lambda slot: (self.deadline(self.entries[slot]), self.entries[slot].turn), default=None)

    def deadline(self, entry: Entry) -> float:
        return entry.last_use + (self.ttl or math.inf)

    def place(self, slot: int) -> tuple[int, int, float, int]:
        entry = self.entries[slot]
        return (0, entry.rank, 0.0, entry.turn) if entry.is_demoted else (1, entry.rank, entry.last_use, entry.turn)

    def use(self, entry: Entry) -> None:
        self.turn += 1
        self.latest = max(self.latest, self.now)
        entry.uses += 1
        entry.last_use, entry.turn, entry.is_demoted = self.now, self.turn, False

    def forget(self, slot: int | None) -> None:
        if slot is not None:
            del self.entries[slot]
            self.weigh()

    def weigh(self) -> None:
        num = {group: sum(entry.group == group for entry in self.entries.values()) for group in self.quota}
        self.over = [group for group in self.over if group in self.quota and num[group] > self.quota[group]]
        self.over += [group for group, most in self.quota.items() if num[group] > most and group not in self.over]


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=75, stateful_step_count=50, deadline=None)


def filled(order: EvictionOrder, num_slots: int) -> EvictionOrder:
    for slot in range(num_slots):
        order.add(slot)
        order.release(slot, slot)
    return order


def test_a_parent_takes_the_place_of_its_own_last_use() -> None:
    order = EvictionOrder()
    system, child, other, late = range(4)
    for slot, parent in ((system, -1), (child, system), (other, -1), (late, -1)):
        order.add(slot, parent)
    for use, slot in enumerate((child, other, system, late)):
        order.release(slot, use)
    assert [order.pop() for _ in range(5)] == [child, other, system, late, None]


def test_what_was_held_all_along_leaves_nothing_to_pop() -> None:
    order = EvictionOrder()
    order.add(0)
    order.add(1, 0)
    order.release(0, 1)
    assert order.pop() is None
    assert order.num_idle == 1


def test_demoted_slots_go_first_in_the_order_they_were_demoted() -> None:
    order = EvictionOrder()
    used, parent, child, late = range(4)
    for slot, above in ((used, -1), (parent, -1), (child, parent), (late, -1)):
        order.add(slot, above)
        order.release(slot, 1)
    assert order.demote(parent) and order.demote(late) and order.demote(child)
    order.remove(child)
    assert [order.pop() for _ in range(3)] == [parent, late, used]


def test_the_clock_may_go_back() -> None:
    order = filled(EvictionOrder(), 3)
    order.touch(2, 0.5)
    assert [order.pop() for _ in range(3)] == [0, 2, 1]


def test_a_parent_can_only_be_vacated_and_comes_back_as_one() -> None:
    order = EvictionOrder()
    order.add(0)
    order.add(1, 0)
    with pytest.raises(AssertionError, match="slot 0 has children"):
        order.remove(0)
    order.vacate(0)
    assert 0 not in order and order.parent(1) == 0
    order.add(0)
    order.release(0, 1)
    assert order.pop() is None
    order.remove(1)
    assert order.pop() == 0
    order.check()


def test_the_queues_stay_within_a_factor_of_the_slots() -> None:
    order = filled(EvictionOrder(ttl=1e9), 100)
    order.set_quota(0, 1000)
    empty = order.nbytes
    for use in range(5_000):
        slot = use * 7 % 100
        order.touch(slot, 100 + use)
        order.demote((slot + 1) % 100)
        order.release((slot + 2) % 100, 100 + use)
        if not use % 3:
            order.remove(slot)
            order.add(slot)
            order.release(slot, 100 + use)
    order.check()
    assert order.nbytes < 4 * empty


def demote_and_touch(order: EvictionOrder, use: int) -> None:
    order.demote(use % 100)
    order.touch(use % 100, 100 + use)


def lower_the_rank(order: EvictionOrder, use: int) -> None:
    order.release(use % 100, 100 + use, rank=255)
    order.release(use % 100, 100 + use, rank=0)


def touch_as_the_clock_goes_back(order: EvictionOrder, use: int) -> None:
    order.touch(use % 100, 1e6 - use)


@pytest.mark.parametrize("change", [demote_and_touch, lower_the_rank, touch_as_the_clock_goes_back])
def test_queues_that_nothing_leaves_do_not_grow(change: Callable[[EvictionOrder, int], None]) -> None:
    order = filled(EvictionOrder(ttl=1e9), 100)
    order.set_quota(0, 1000)
    few = order.nbytes
    for use in range(5_000):
        change(order, use)
    order.check()
    assert order.nbytes < 2.5 * few


def test_a_group_that_comes_and_goes_leaves_no_entries_behind() -> None:
    order = EvictionOrder()
    for group in range(20):
        order.set_quota(group, 5)
    few = order.nbytes
    for use in range(4_000):
        order.add(0, group=use % 20)
        order.release(0, use)
        order.remove(0)
    order.check()
    assert order.nbytes < few + 20 * 2_000


def num_operations(work: Callable[[], object]) -> int:
    """How many bytecodes Python runs for `work`."""
    counted = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


def test_quotas_cost_the_same_whatever_the_number_of_groups() -> None:
    def operations(num_groups: int) -> int:
        """Those of 100 rounds in which a new group comes in for the slot that leaves."""
        order = EvictionOrder()
        for group in range(num_groups):
            order.add(group, group=group)
            order.set_quota(group, 1)
            order.release(group, group)

        def turn_over() -> None:
            for group in range(num_groups, num_groups + 100):
                order.set_quota(group, 1)
                slot = order.pop()
                assert slot is not None
                order.add(slot, group=group)
                order.release(slot, group)

        return num_operations(turn_over)

    assert operations(3_000) < 1.1 * operations(100)


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_finite_number_is_refused_and_nothing_happens(now: float) -> None:
    order = filled(EvictionOrder(), 3)
    order.hold(1)
    for act in (lambda: order.release(1, now), lambda: order.touch(0, now), lambda: order.touch(1, now)):
        with pytest.raises(ValueError, match="finite"):
            act()
    with pytest.raises(ValueError, match="finite"):
        order.pop(now)
    order.check()
    assert order.is_held(1) and order.num_idle == 2
    order.release(1, 9.0)
    assert sorted(slot for slot in (order.pop(), order.pop(), order.pop()) if slot is not None) == [0, 1, 2]


def test_times_sort_whatever_their_sign() -> None:
    order = EvictionOrder()
    for slot, now in enumerate([3.5, -0.0, 1e-300, -7.0, 0.0, -1e300]):
        order.add(slot)
        order.release(slot, now)
    assert [order.pop(50.0) for _ in range(6)] == [5, 3, 1, 4, 2, 0]


def test_an_order_grows_with_its_quotas_and_lifetimes() -> None:
    order = filled(EvictionOrder(ttl=1000.0), 2)
    order.set_quota(1, 1)
    for slot in range(2, 500):
        order.add(slot, group=slot // 400)
        order.release(slot, slot)
    order.check()
    assert [order.pop(), order.pop(), order.pop_expired(1000.0)] == [400, 401, 0]


def test_a_slot_that_left_is_new_when_it_comes_again() -> None:
    order = filled(EvictionOrder(), 2)
    assert order.pop() == 0 and order.last_use(0) is None
    order.add(0)
    assert order.last_use(0) is None
    order.release(0, 0.0)
    assert order.last_use(0) == 0.0 and [order.pop(), order.pop()] == [0, 1]
