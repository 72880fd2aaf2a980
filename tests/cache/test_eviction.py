"""The leaf-first order against a naive model that searches all keys."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache import LeafLRU
from rekindle.cache.eviction import MIN_SWEEP, STALE_FACTOR

KEYS = st.integers(0, 11)


class OrderMachine(RuleBasedStateMachine):
    """The model: per key its parent, its rank (demoted ones below zero, then uses) and whether it is held."""

    @initialize()
    def begin(self) -> None:
        self.order: LeafLRU[int] = LeafLRU()
        self.parent: dict[int, int | None] = {}
        self.rank: dict[int, float] = {}
        self.held: set[int] = set()
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    @rule(key=KEYS, parent=st.none() | KEYS)
    def add(self, key: int, parent: int | None) -> None:
        if key not in self.parent and (parent is None or parent < key):
            self.order.add(key, parent)
            self.parent[key] = parent
            self.held.add(key)

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.order.hold(key)
        self.held.add(key)

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.rank[key] = self.tick()
        self.order.release(key, self.rank[key])
        self.held.discard(key)

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.rank[key] = self.tick()
        self.order.touch(key, self.rank[key])

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        assert self.order.demote(key) == (key not in self.held)
        if key not in self.held:
            self.rank[key] = -1e6 + self.tick()

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.order.remove(key)
        self.forget(key)

    @rule()
    def pop(self) -> None:
        free = [key for key in self.parent if key not in self.held and key not in self.parent.values()]
        expected = min(free, key=lambda key: self.rank[key], default=None)
        assert self.order.pop() == expected
        if expected is not None:
            self.forget(expected)

    def forget(self, key: int) -> None:
        del self.parent[key]
        self.held.discard(key)

    @invariant()
    def agrees(self) -> None:
        self.order.check()
        assert len(self.order) == len(self.parent)
        assert self.order.num_held == len(self.held)
        assert self.order.num_idle == len(self.parent) - len(self.held)
        for key in range(12):
            assert (key in self.order) == (key in self.parent)
            assert self.order.is_leaf(key) == (key not in self.parent.values())


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_parent_takes_the_place_of_its_own_last_use() -> None:
    order: LeafLRU[str] = LeafLRU()
    for key, parent in (("system", None), ("child", "system"), ("other", None), ("late", None)):
        order.add(key, parent)
    for use, key in enumerate(("child", "other", "system", "late")):
        order.release(key, use)
    assert [order.pop() for _ in range(5)] == ["child", "other", "system", "late", None]


def test_what_was_held_all_along_leaves_nothing_to_pop() -> None:
    order: LeafLRU[str] = LeafLRU()
    order.add("parent", None)
    order.add("child", "parent")
    order.release("parent", 1)
    assert order.pop() is None
    assert order.num_idle == 1


def test_demoted_keys_go_first_in_the_order_they_were_demoted() -> None:
    order: LeafLRU[str] = LeafLRU()
    for key, parent in (("used", None), ("parent", None), ("child", "parent"), ("late", None)):
        order.add(key, parent)
        order.release(key, 1)
    assert order.demote("parent") and order.demote("late") and order.demote("child")
    order.remove("child")
    assert [order.pop() for _ in range(3)] == ["parent", "late", "used"]


def test_many_uses_do_not_let_the_heap_grow() -> None:
    order: LeafLRU[int] = LeafLRU()
    for key in range(10):
        order.add(key, None)
        order.release(key, key)
    for use in range(10_000):
        order.touch(use % 7, use)
    assert len(order._queue) <= MIN_SWEEP + STALE_FACTOR * len(order)
    order.check()
    assert [order.pop() for _ in range(3)] == [7, 8, 9]
    order.release(0, math.inf)
    assert order.pop() != 0
