"""Hints, lifetimes and quotas at their edges."""

from __future__ import annotations

import math

import pytest

from rekindle.cache.eviction import EvictionOrder, Hints


def order_of(*hints: Hints | None, ttl: float | None = None) -> EvictionOrder:
    """One slot for each hint, used at 0, 1, 2, ..."""
    order = EvictionOrder(ttl=ttl)
    for slot, hint in enumerate(hints):
        order.add(slot)
        order.release(slot, slot, hints=hint)
    return order


def leave(order: EvictionOrder, now: float | None = None) -> list[int | None]:
    order.check()
    return [order.pop(now) for _ in range(len(order))]


def test_kept_ones_leave_last_and_do_leave() -> None:
    assert leave(order_of(Hints(keep=True), None, Hints(keep=True), None)) == [1, 3, 0, 2]


def test_what_was_said_holds_until_something_else_is() -> None:
    order = order_of(Hints(keep=True), None, None)
    order.touch(0, 3)
    order.release(0, 4)
    assert order.pop() == 1
    order.release(0, 5, hints=Hints())
    order.touch(2, 6)
    assert leave(order) == [0, 2]


def test_of_awaited_ones_the_last_to_be_used_leaves_first() -> None:
    assert leave(order_of(Hints(next_use_in=50), None, Hints(next_use_in=90), Hints(next_use_in=20))) == [1, 2, 0, 3]


def test_waiting_ends_half_as_long_after_the_announced_time() -> None:
    order = order_of(Hints(next_use_in=10), None, Hints(next_use_in=10))
    assert order.pop(15.0) == 1
    order.add(3)
    order.release(3, 15.5)
    assert order.pop(15.5) == 0  # waited for until 15
    assert order.pop(15.5) == 3  # 2 is waited for until 17
    order.check()


def test_a_use_later_than_what_leaves_has_been_idle_is_not_waited_for() -> None:
    order = order_of(None, None)
    assert order.pop(8.0) == 0  # idle for 8: so long things stay
    order.add(2)
    order.release(2, 9, hints=Hints(next_use_in=8))
    order.add(3)
    order.release(3, 10, hints=Hints(next_use_in=9))
    order.add(4)
    order.release(4, 10, hints=Hints(next_use_in=30))
    assert leave(order, 11.0) == [4, 3, 1, 2]


def test_the_announced_use_ends_the_waiting() -> None:
    order = order_of(Hints(next_use_in=5), None)
    order.touch(0, 3)
    order.touch(1, 4)
    assert leave(order) == [0, 1]


def test_a_use_may_be_announced_anew_for_later() -> None:
    order = order_of(Hints(next_use_in=50), Hints(next_use_in=60))
    order.release(0, 5, hints=Hints(next_use_in=100))
    assert leave(order) == [0, 1]


def test_a_slot_taken_out_is_not_waited_for_under_its_number() -> None:
    order = order_of(Hints(next_use_in=5), None)
    order.remove(0)
    order.add(0)
    order.release(0, 0.5)
    assert leave(order, 100.0) == [0, 1]


def test_an_expired_leaf_leaves_before_all_others_and_a_held_one_never_expires() -> None:
    order = order_of(None, Hints(keep=True, ttl=3.0), None, Hints(ttl=math.inf), ttl=20.0)
    order.hold(2)
    assert order.pop_expired(3.9) is None
    assert order.is_expired(1, 4.0) and not order.is_expired(0, 4.0)
    assert order.pop(4.0) == 1
    assert not order.is_expired(2, 1e9)
    assert order.pop_expired(20.0) == 0
    assert order.pop_expired(1e9) is None
    order.release(2, 30.0)
    assert (order.pop_expired(49.9), order.pop_expired(50.0)) == (None, 2)
    assert 3 in order


def test_a_use_prolongs_a_life_and_a_shorter_one_counts_at_once() -> None:
    order = order_of(None, None, ttl=10.0)
    order.touch(0, 8.0)
    assert order.pop_expired(17.9) == 1
    order.release(0, 17.9, hints=Hints(ttl=1.0))
    assert order.pop_expired(18.8) is None
    assert order.pop_expired(18.9) == 0


def test_what_expires_before_its_children_leaves_after_them() -> None:
    order = EvictionOrder(ttl=10.0)
    order.add(0)
    order.add(1, 0)
    order.release(0, 0)
    order.release(1, 5)
    assert order.is_expired(0, 10.0) and order.pop_expired(10.0) is None
    assert [order.pop_expired(15.0) for _ in range(3)] == [1, 0, None]


def test_a_lifetime_given_to_one_is_that_ones_alone() -> None:
    order = order_of(None, Hints(ttl=1.0), None)
    assert [order.pop_expired(1e9), order.pop_expired(1e9)] == [1, None]


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
        Hints(ttl=bad)
    with pytest.raises(ValueError, match=r"ttl is .*: a lifetime is more than 0"):
        EvictionOrder(ttl=bad)


@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_a_next_use_is_to_come(bad: float) -> None:
    with pytest.raises(ValueError, match="it counts from now"):
        Hints(next_use_in=bad)


def test_how_long_things_stay_follows_departures_slowly() -> None:
    order = order_of(None)
    assert order.pop(16.0) == 0  # idle for 16
    order.add(0)
    order.release(0, 16)
    assert order.pop(16.0) == 0  # for 0: a sixteenth of the way from 16
    for slot, hint in enumerate((None, Hints(next_use_in=15.5), Hints(next_use_in=15))):
        order.add(slot)
        order.release(slot, 17, hints=hint)
    assert leave(order) == [1, 0, 2]


def test_of_groups_over_their_quotas_the_first_to_have_gone_over_gives_up_first() -> None:
    order = EvictionOrder()
    order.set_quota(1, 1)
    order.set_quota(2, 1)
    for slot, group in enumerate((2, 1, 1, 2, 1)):
        order.add(slot, group=group)
        order.release(slot, slot)
    assert leave(order) == [1, 2, 0, 3, 4]
