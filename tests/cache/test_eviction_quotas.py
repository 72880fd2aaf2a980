"""Lifetimes and quotas at their edges."""

from __future__ import annotations

import math

import pytest

from rekindle.cache.eviction import EvictionOrder


def order_of(num_slots: int, *, ttl: float | None = None) -> EvictionOrder:
    """Slots used at 0, 1, 2, ..."""
    order = EvictionOrder(ttl=ttl)
    for slot in range(num_slots):
        order.add(slot)
        order.release(slot, slot)
    return order


def leave(order: EvictionOrder, now: float | None = None) -> list[int | None]:
    order.check()
    return [order.pop(now) for _ in range(len(order))]


def test_an_expired_leaf_leaves_before_all_others_and_a_held_one_never_expires() -> None:
    order = order_of(4, ttl=20.0)
    order.hold(2)
    order.demote(3)
    assert order.pop_expired(19.9) is None
    assert order.is_expired(0, 20.0) and not order.is_expired(1, 20.0)
    assert [order.pop(20.0), order.pop(20.0)] == [0, 3]
    assert not order.is_expired(2, 1e9)
    assert [order.pop_expired(21.0), order.pop_expired(1e9)] == [1, None]
    order.release(2, 30.0)
    assert (order.pop_expired(49.9), order.pop_expired(50.0)) == (None, 2)


def test_a_use_prolongs_a_life_and_one_before_it_shortens_it() -> None:
    order = order_of(2, ttl=10.0)
    order.touch(0, 8.0)
    assert order.pop_expired(17.9) == 1
    order.touch(0, 2.0)
    assert order.pop_expired(11.9) is None
    assert order.pop_expired(12.0) == 0


def test_what_expires_before_its_children_leaves_after_them() -> None:
    order = EvictionOrder(ttl=10.0)
    order.add(0)
    order.add(1, 0)
    order.release(0, 0)
    order.release(1, 5)
    assert order.is_expired(0, 10.0) and order.pop_expired(10.0) is None
    assert [order.pop_expired(15.0) for _ in range(3)] == [1, 0, None]


def test_a_group_over_its_quota_gives_up_its_own() -> None:
    order = EvictionOrder()
    for slot in range(6):
        order.add(slot, group=slot % 2)
        order.release(slot, slot)
    order.set_quota(1, 2)
    assert order.pop() == 1
    assert order.pop() == 0  # two are left of group 1
    order.set_quota(1, None)
    order.set_quota(0, 0)
    assert leave(order) == [2, 4, 3, 5]


def test_a_quota_is_soft() -> None:
    order = EvictionOrder()
    for slot in range(3):
        order.add(slot, group=7 if slot else 0)
    order.set_quota(7, 1)
    order.release(0, 5)
    assert order.pop() == 0  # the group's are all held
    order.release(2, 6)
    assert leave(order) == [2, None]
    assert order.group(1) == 7


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_lifetime_is_more_than_nothing(bad: float) -> None:
    with pytest.raises(ValueError, match=r"ttl is .*: a lifetime is more than 0"):
        EvictionOrder(ttl=bad)


def test_of_groups_over_their_quotas_the_first_to_have_gone_over_gives_up_first() -> None:
    order = EvictionOrder()
    order.set_quota(1, 1)
    order.set_quota(2, 1)
    for slot, group in enumerate((2, 1, 1, 2, 1)):
        order.add(slot, group=group)
        order.release(slot, slot)
    assert leave(order) == [1, 2, 0, 3, 4]
