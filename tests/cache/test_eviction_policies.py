"""What each policy gives up, on uses worked out by hand."""

from __future__ import annotations

import pytest

from rekindle.cache.eviction import POLICIES, EvictionOrder, make_policy


def departures(policy: str, uses: str, *, ttl: float | None = None) -> str:
    """Use slots named by letters, one a second, and let them all leave."""
    order = EvictionOrder(policy, ttl=ttl)
    for now, letter in enumerate(uses):
        slot = ord(letter) - ord("a")
        if slot not in order:
            order.add(slot)
        order.release(slot, now)
    order.check()
    left = [order.pop() for _ in range(len(order))]
    return "".join(chr(ord("a") + slot) for slot in left if slot is not None)


@pytest.mark.parametrize(
    ("policy", "expected"), [("lru", "bdca"), ("fifo", "abcd"), ("lfu", "dbca"), ("aged-lfu", "dbca"), ("ttl", "bdca")]
)
def test_who_leaves(policy: str, expected: str) -> None:
    assert departures(policy, "abcbcdacaa") == expected


def test_of_as_many_uses_the_least_recent_leaves() -> None:
    assert departures("lfu", "abcbac") == departures("aged-lfu", "abcbac") == "bac"


def test_counts_are_lost_when_a_slot_leaves() -> None:
    order = EvictionOrder("lfu")
    for slot in (0, 0, 0, 1, 1):
        if slot not in order:
            order.add(slot)
        order.release(slot, 1.0)
    order.remove(0)
    order.add(0)
    order.release(0, 2.0)
    assert [order.pop(), order.pop()] == [0, 1]


@pytest.mark.parametrize(("policy", "survivor"), [("lfu", 0), ("aged-lfu", 5)])
def test_old_fame_fades_only_with_age(policy: str, survivor: int) -> None:
    order = EvictionOrder(policy)
    order.add(0)
    for now in range(4):  # famous once
        order.release(0, now)
    for slot in range(1, 6):  # then nobody asks for it again; five come, each used twice, and one leaves for each
        order.add(slot)
        order.release(slot, 2 * slot + 10)
        order.release(slot, 2 * slot + 11)
        if slot > 1:
            order.pop()
    while len(order) > 1:
        order.pop()
    assert survivor in order


def test_a_lifetime_of_its_own_orders_by_deadline() -> None:
    assert departures("ttl", "abca", ttl=5.0) == "bca"


def test_an_unknown_policy_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match="no eviction policy 'lifo': choose one of lru, fifo"):
        make_policy("lifo")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_bears_the_name_it_is_asked_for_by(name: str) -> None:
    assert make_policy(name).name == name == EvictionOrder(name).policy.name
