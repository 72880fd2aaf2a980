"""The policy that follows the best of its trials: what each rule is for, what is remembered, and what trials hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.cache.eviction import EvictionOrder, Policy, make_policy
from rekindle.cache.eviction.adaptive import (
    FAR,
    UNKNOWN,
    Adaptive,
    EvictedKeys,
    Rule,
    Trial,
    bimodal,
    new_earlier,
    new_first,
    recent,
)


def keys_of(number: int) -> int:
    """As names of blocks are: nothing to see in them."""
    return int.from_bytes(blake2b(number.to_bytes(8, "little"), digest_size=8).digest(), "little")


def num_hits(policy: Policy, uses: Iterable[int], room: int, *, has_keys: bool = True) -> int:
    """Use things by number, one a second, in a tier for `room` of them."""
    order = EvictionOrder(policy, capacity=room)
    slots: dict[int, int] = {}
    things: dict[int, int] = {}
    hits = 0
    for now, thing in enumerate(uses):
        hits += thing in slots
        if thing not in slots:
            slot = len(slots)
            if slot == room:
                leaving = order.pop(now)
                assert leaving is not None
                slot = leaving
                del slots[things.pop(slot)]
            slots[thing], things[slot] = slot, thing
            order.add(slot, key=keys_of(thing) if has_keys else UNKNOWN)
        order.release(slots[thing], now)
    order.check()
    if isinstance(policy, Adaptive):
        policy.check()
    return hits


def turns(num_things: int, num_rounds: int) -> list[int]:
    return list(range(num_things)) * num_rounds


def read_once(num_uses: int) -> Iterator[int]:
    """Half of the uses are of 300 things, half of things that never come back."""
    chance = random.Random(1)
    return (chance.randrange(300) if chance.random() < 0.5 else 1000 + number for number in range(num_uses))


def moving(num_uses: int) -> Iterator[int]:
    """Each thing is used some times soon after it came, and then no more."""
    chance = random.Random(2)
    return (max(0, number // 4 - int(chance.expovariate(1 / 60))) for number in range(num_uses))


def test_more_things_than_room_take_turns() -> None:
    assert num_hits(make_policy("lru"), turns(400, 40), 200) == 0
    assert num_hits(Adaptive(), turns(400, 40), 200) > 0.2 * 400 * 40


def test_what_is_read_once_leaves_before_the_rest() -> None:
    lru = num_hits(make_policy("lru"), read_once(20_000), 200)
    assert num_hits(Adaptive(), read_once(20_000), 200) > 1.3 * lru


@pytest.mark.parametrize("room", [100, 200, 400])
def test_where_recency_is_all_it_is_as_good_as_lru(room: int) -> None:
    lru = num_hits(make_policy("lru"), moving(20_000), room)
    assert num_hits(Adaptive(), moving(20_000), room) > 0.98 * lru


@pytest.mark.parametrize("uses", [turns(400, 10), list(read_once(4000))])
def test_without_keys_it_is_lru(uses: list[int]) -> None:
    policy = Adaptive()
    assert num_hits(policy, uses, 200, has_keys=False) == num_hits(make_policy("lru"), uses, 200)
    assert policy.rule is recent


def test_until_something_has_left_it_is_lru() -> None:
    policy = Adaptive()
    assert num_hits(policy, turns(50, 4), 50) == 150
    assert not policy.trials


def test_what_left_is_not_new_when_it_comes_back_elsewhere() -> None:
    policy = Adaptive()
    policy.rule = new_first
    policy.came(0, keys_of(0))
    policy.came(1, keys_of(1))
    assert policy.used(0, 5.0, 1, 0.0) == policy.used(1, 5.0, 1, 0.0) == 5.0 - FAR
    policy.left(0, 5.0 - FAR, 6.0, 1)
    policy.came(2, keys_of(0))
    policy.came(3, keys_of(3))
    assert policy.used(2, 7.0, 1, 0.0) == 7.0
    assert policy.used(3, 7.0, 1, 0.0) == 7.0 - FAR


def test_trials_see_the_share_of_keys_that_they_have_room_for() -> None:
    policy = Adaptive()
    num_hits(policy, turns(2050, 1) + turns(1500, 5), 2000)  # a quarter of 1500 fits into a quarter of 2000
    assert policy.trials[0].most == 500
    assert policy.trials[0].score > 500


def test_trials_begin_anew_when_the_tier_has_doubled() -> None:
    policy = Adaptive()
    num_hits(policy, turns(100, 2), 90)
    before = policy.trials
    policy.came(95, UNKNOWN)
    policy.left(95, 0.0, 300.0, 1)
    assert policy.trials is before
    policy.came(180, UNKNOWN)
    policy.left(180, 0.0, 301.0, 1)
    assert policy.trials is not before
    policy.check()


@pytest.mark.parametrize(
    ("rule", "handicaps"),
    [
        (recent, (0, 0, 0, 0)),
        (new_earlier, (0, 0, 7, 7)),
        (new_first, (0, 0, FAR, FAR)),
        (bimodal, (0, FAR, 0, FAR)),
    ],
)
def test_whom_a_rule_puts_behind(rule: Rule, handicaps: tuple[float, ...]) -> None:
    told = [(is_new, is_refused) for is_new in (False, True) for is_refused in (False, True)]
    assert tuple(rule(*each, 7.0) for each in told) == handicaps


def hits_of(rule: Rule, uses: str, most: int, open_until: int = 0) -> int:
    trial = Trial(rule, most)
    for now, letter in enumerate(uses):
        trial.use(ord(letter), now, is_new=letter not in uses[:now], is_open=now < open_until)
        trial.check()
    return int(trial.score)


def test_trials_worked_out_by_hand() -> None:
    assert hits_of(recent, "abcabcabc", 2) == 0
    assert hits_of(recent, "aabbcacb", 2) == 3  # a b - c would be 4 with b in the place of a
    assert hits_of(new_first, "aaxybza", 2) == 2  # x, y, b and z leave before a
    assert hits_of(recent, "aaxybza", 2) == 1
    assert hits_of(bimodal, "abcabcabc", 2, open_until=1) == 2  # a stays, b and c replace each other
    assert hits_of(bimodal, "abcabcabc", 2, open_until=9) == 0
    assert hits_of(new_earlier, "aabbcacb", 2) == hits_of(recent, "aabbcacb", 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 8))
def test_a_trial_of_lru_hits_as_lru(uses: list[int], most: int) -> None:
    trial = Trial(recent, most)
    stack: list[int] = []
    hits = 0
    for now, key in enumerate(uses):
        trial.use(key, now, is_new=False, is_open=True)
        trial.check()
        hits += key in stack
        stack = [key, *(other for other in stack if other != key)][:most]
        assert len(trial) == len(stack)
    assert trial.score == hits


def test_memory_knows_again_and_forgets_the_oldest() -> None:
    memory = EvictedKeys()
    memory.make_room(1000)
    assert memory.nbytes == 4 * 1024
    assert not any(keys_of(number) in memory for number in range(1000))
    for number in range(200):
        memory.add(keys_of(number))
    assert sum(keys_of(number) in memory for number in range(200)) > 160
    for number in range(200, 20_000):
        memory.add(keys_of(number))
    assert keys_of(19_999) in memory
    assert not any(keys_of(number) in memory for number in range(200))


def test_memory_is_of_fingerprints_and_small() -> None:
    policy = Adaptive()
    policy.came(100_000 - 1, UNKNOWN)
    assert policy.nbytes < 40 * 100_000
