"""The order by key against a naive model: parents that are not here, come later or leave before their children."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rekindle.cache.eviction import KeyedOrder

KEYS = st.integers(0, 11)


class KeyedMachine(RuleBasedStateMachine):
    """The model: per key its parent, its place (demoted ones below zero, then uses) and whether it is held."""

    @initialize()
    def begin(self) -> None:
        self.order: KeyedOrder[int] = KeyedOrder()
        self.parent: dict[int, int | None] = {}
        self.place: dict[int, float] = {}
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
        self.place[key] = self.tick()
        self.order.release(key, self.place[key])
        self.held.discard(key)

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.place[key] = self.tick()
        self.order.touch(key, self.place[key])

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def demote(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        assert self.order.demote(key) == (key not in self.held)
        if key not in self.held:
            self.place[key] = -1e6 + self.tick()

    @precondition(lambda self: self.parent)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.parent)))
        self.order.remove(key)
        self.forget(key)

    @rule()
    def pop(self) -> None:
        free = [key for key in self.parent if key not in self.held and key not in self.parent.values()]
        expected = min(free, key=lambda key: self.place[key], default=None)
        assert self.order.pop() == expected
        if expected is not None:
            self.forget(expected)

    def forget(self, key: int) -> None:
        del self.parent[key]
        self.held.discard(key)

    @invariant()
    def agrees(self) -> None:
        self.order.check()
        assert len(self.order) == len(self.parent) and set(self.order) == set(self.parent)
        assert self.order.num_held == len(self.held)
        assert self.order.num_idle == len(self.parent) - len(self.held)
        for key in range(12):
            assert (key in self.order) == (key in self.parent)
            assert self.order.is_leaf(key) == (key not in self.parent.values())
            assert key not in self.parent or self.order.is_held(key) == (key in self.held)


TestKeyed = KeyedMachine.TestCase
TestKeyed.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_a_parent_may_come_after_its_children_and_back() -> None:
    order: KeyedOrder[str] = KeyedOrder()
    order.add("child", "parent")
    assert "parent" not in order and not order.is_leaf("parent")
    order.add("parent")
    order.release("parent", 1)
    order.remove("parent")
    order.add("parent", "above")
    order.release("parent", 2)
    assert order.pop() is None
    order.release("child", 3)
    assert [order.pop(), order.pop(), order.pop()] == ["child", "parent", None]
    order.check()


def test_a_key_that_comes_back_brings_nothing_with_it() -> None:
    order: KeyedOrder[str] = KeyedOrder(ttl=100.0)
    for name in ("famous", "child", "known"):
        order.add(name, "famous" if name == "child" else None)
    order.release("famous", 60, rank=1)
    order.release("known", 8)
    order.remove("famous")
    order.add("famous")
    assert order.last_use("famous") is None
    order.release("famous", 7)
    order.remove("child")
    assert not order.is_expired("famous", 50.0)
    assert [order.pop(), order.pop()] == ["famous", "known"]


def test_expired_keys_and_quotas_go_by_key_too() -> None:
    order: KeyedOrder[tuple[str, int]] = KeyedOrder(ttl=10.0)
    order.set_quota(1, 1)
    for number in range(3):
        order.add(("a", number), group=number > 0)
        order.release(("a", number), number)
    assert order.pop(3.0) == ("a", 1)
    assert order.pop_expired(9.9) is None
    assert order.pop_expired(10.0) == ("a", 0)
    assert not order.is_expired(("a", 2), 11.9) and order.is_expired(("a", 2), 12.0)
    order.settle(("a", 2), rank=3)
    assert order.pop_expired(12.0) == ("a", 2)
    order.check()
