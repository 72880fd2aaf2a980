"""The order of leaving against a naive model that searches all slots, under every policy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.eviction import POLICIES, EvictionOrder, Hints, make_policy
from rekindle.cache.eviction.adaptive import Adaptive, new_first
from rekindle.cache.eviction.policies import Forgetful

NUM_SLOTS = 10
STEPS = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 10.0, -2.0])  # of the clock: also none, and back
HINTS = st.none() | st.builds(
    Hints,
    keep=st.booleans(),
    next_use_in=st.none() | st.sampled_from([0.0, 1.0, 4.0, 20.0]),
    ttl=st.none() | st.sampled_from([2.0, 8.0, math.inf]),
)


@dataclass
class Entry:
    """What the model knows of a slot."""

    parent: int
    group: int
    is_held: bool = True
    first_use: float = 0.0
    last_use: float = 0.0
    uses: int = 0
    turn: int = 0
    age: float = 0.0  # of the policy, at the last use
    rank: int = 0
    hints: Hints = field(default_factory=Hints)
    is_demoted: bool = False
    next_use: float | None = None
    until: float = 0.0  # awaited; infinity: in vain


class OrderMachine(RuleBasedStateMachine):
    """Expired ones first, then a group over its quota, then level, rank, priority and turn."""

    @initialize(policy=st.sampled_from(["lru", "fifo", "lfu", "aged-lfu", "ttl"]), ttl=st.sampled_from([None, 6.0]))
    def begin(self, policy: str, ttl: float | None) -> None:
        self.order = EvictionOrder(policy, ttl=ttl)
        self.policy, self.ttl = policy, ttl
        self.entries: dict[int, Entry] = {}
        self.quota: dict[int, int] = {}
        self.over: list[int] = []
        self.now = self.latest = 100.0
        self.turn = 0
        self.age = 0.0
        self.idle = math.inf
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
            self.use(self.entries[slot], None)

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
            hints = data.draw(HINTS)
            self.order.release(slot, self.now, rank=rank, hints=hints)
            self.entries[slot].is_held = False
            self.entries[slot].rank = rank
            self.use(self.entries[slot], hints)
            self.order.check()

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        for slot in data.draw(st.lists(st.sampled_from(sorted(self.entries)), min_size=1, max_size=5)):
            self.now += data.draw(STEPS)
            self.order.touch(slot, self.now)
            self.use(self.entries[slot], None)

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
            entry.is_demoted, entry.next_use, entry.turn = True, None, self.turn

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
            for entry in self.entries.values():
                if entry.next_use is not None and entry.until < self.latest:
                    entry.next_use = None
            crowded = [[slot for slot in free if self.entries[slot].group == group] for group in self.over]
            candidates = next((slots for slots in crowded if slots), free)
            expected = min(candidates, key=self.place, default=None)
            if expected is not None:
                self.left(self.entries[expected])
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
        return entry.last_use + (entry.hints.ttl or self.ttl or math.inf)

    def place(self, slot: int) -> tuple[int, int, float, int]:
        entry = self.entries[slot]
        by_policy = {
            "lru": entry.last_use,
            "fifo": entry.first_use,
            "lfu": entry.uses,
            "aged-lfu": entry.age + entry.uses,
            "ttl": self.deadline(entry),
        }
        if entry.is_demoted:
            return 0, entry.rank, 0.0, entry.turn
        if entry.next_use is not None:
            return (1 if entry.until == math.inf else 3), entry.rank, -entry.next_use, entry.turn
        return (4 if entry.hints.keep else 2), entry.rank, by_policy[self.policy], entry.turn

    def use(self, entry: Entry, hints: Hints | None) -> None:
        self.turn += 1
        self.latest = max(self.latest, self.now)
        entry.uses += 1
        entry.first_use = self.now if entry.uses == 1 else entry.first_use
        entry.last_use, entry.turn, entry.age = self.now, self.turn, self.age
        entry.is_demoted, entry.next_use = False, None
        if hints is not None:
            entry.hints = hints
            if hints.next_use_in is not None and not hints.keep:
                entry.next_use = self.now + hints.next_use_in
                is_awaited = hints.next_use_in <= self.idle
                entry.until = self.now + 1.5 * hints.next_use_in if is_awaited else math.inf

    def left(self, entry: Entry) -> None:
        idle = self.latest - entry.last_use
        if not entry.is_demoted and entry.next_use is None and not entry.hints.keep:
            self.idle = idle if self.idle == math.inf else self.idle + (idle - self.idle) / 16
        self.age = max(self.age, entry.age + entry.uses)

    def forget(self, slot: int | None) -> None:
        if slot is not None:
            del self.entries[slot]
            self.weigh()

    def weigh(self) -> None:
        num = {group: sum(entry.group == group for entry in self.entries.values()) for group in self.quota}
        self.over = [group for group in self.over if group in self.quota and num[group] > self.quota[group]]
        self.over += [group for group, most in self.quota.items() if num[group] > most and group not in self.over]


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


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


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "ttl"])
def test_the_queues_stay_within_a_factor_of_the_slots(policy: str) -> None:
    order = filled(EvictionOrder(policy, ttl=1e9), 100)
    order.set_quota(0, 1000)
    empty = order.nbytes
    for use in range(5_000):
        slot = use * 7 % 100
        order.touch(slot, 100 + use)
        order.demote((slot + 1) % 100)
        order.release((slot + 2) % 100, 100 + use, hints=Hints(ttl=1e6 - use, next_use_in=3.0))
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


def shorten_the_life(order: EvictionOrder, use: int) -> None:
    order.release(use % 100, 100 + use, hints=Hints(ttl=1e6 - use))


@pytest.mark.parametrize("change", [demote_and_touch, lower_the_rank, touch_as_the_clock_goes_back, shorten_the_life])
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


@pytest.mark.parametrize("policy", ["fifo", "adaptive"])
def test_bytes_count_what_the_policy_keeps(policy: str) -> None:
    plain, kept = filled(EvictionOrder("lfu"), 1000), make_policy(policy)
    order = filled(EvictionOrder(kept), 1000)
    assert order.nbytes == plain.nbytes + kept.nbytes
    assert kept.nbytes > 8 * 1000


def test_bytes_of_an_adaptive_policy_count_its_trials() -> None:
    policy = Adaptive()
    order = filled(EvictionOrder(policy), 400)
    assert order.pop() == 0
    before = policy.nbytes
    for slot in [0, *range(400, 800)]:
        order.add(slot, key=slot << 40)
        order.release(slot, slot)
    assert sum(len(trial) for trial in policy.trials) > 100
    assert policy.nbytes > before + 200 * 100 + 17 * 300


def test_what_was_kept_is_kept_again_after_the_use_that_ends_a_demotion() -> None:
    order = EvictionOrder()
    for slot in range(3):
        order.add(slot)
        order.release(slot, slot, hints=Hints(keep=slot < 2))
    assert order.demote(0) and order.demote(1)
    order.touch(1, 3)
    order.touch(2, 4)
    assert [order.pop(), order.pop(), order.pop()] == [0, 2, 1]


def test_check_asks_the_policy_too() -> None:
    policy = Adaptive()
    order = filled(EvictionOrder(policy), 3)
    order.check()
    policy.rule = new_first
    with pytest.raises(AssertionError, match="a rule without trials"):
        order.check()


def test_priorities_sort_whatever_their_sign() -> None:
    class Given(Forgetful):
        name, remembers = "given", True

        def came(self, slot: int, key: int) -> None:
            arrivals.append((slot, key))

        def used(self, slot: int, now: float, num_uses: int, idle: float) -> float:
            return [3.5, -0.0, -math.inf, 1e-300, -7.0, math.inf, 0.0, -1e300][slot]

        def left(self, slot: int, priority: float, now: float, num_uses: int) -> None:
            departures.append((slot, priority, now, num_uses))

    arrivals: list[tuple[int, int]] = []
    departures: list[tuple[int, float, float, int]] = []
    order = filled(EvictionOrder(Given()), 8)
    assert [order.pop(50.0) for _ in range(8)] == [2, 7, 4, 1, 6, 3, 0, 5]
    order.add(3, key=77)
    assert arrivals == [*((slot, -1) for slot in range(8)), (3, 77)]
    assert departures[0] == (2, -math.inf, 50.0, 1) and departures[-1][0] == 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_no_finite_number_is_refused_and_nothing_happens(policy: str, now: float) -> None:
    order = filled(EvictionOrder(policy), 3)
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


def test_a_slot_that_left_is_new_when_it_comes_again() -> None:
    order = filled(EvictionOrder(), 2)
    assert order.pop() == 0 and order.last_use(0) is None
    order.add(0)
    assert order.last_use(0) is None
    order.release(0, 0.0)
    assert order.last_use(0) == 0.0 and [order.pop(), order.pop()] == [0, 1]
