"""The simulator on traces small enough to follow by hand, and against models that are too slow for large ones.

Each string is a request, each letter of it a block; a letter stands for the same block wherever the ones before agree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle_lab.simulate.report import by_arm
from rekindle_lab.simulate.simulation import LRU, OPTIMUM, Found, Memory, Policy, optimal_hits, simulate, sweep
from rekindle_lab.simulate.tier import Tier
from rekindle_lab.simulate.trace import Trace, TraceBuilder, TraceRequest

REQUESTS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=12)


def trace_of(*requests: str, at_s: Sequence[float] = (), block_tokens: int = 1) -> Trace:
    builder = TraceBuilder(block_tokens)
    for number, blocks in enumerate(requests):
        moment = at_s[number] if at_s else float(number)
        builder.add_hashed(moment, len(blocks) * block_tokens, list(blocks))
    return builder.build("by hand", "letters")


def hits(trace: Trace, policy: Policy, num_blocks: int) -> int:
    return simulate(trace, Memory(num_blocks, policy=policy)).hot_blocks


def test_the_least_recently_used_leaf_leaves_first() -> None:
    # abc | abd finds ab, c leaves | e: d leaves | abc finds ab
    found = simulate(trace_of("abc", "abd", "e", "abc"), Memory(3))
    assert (found.num_blocks, found.hot_blocks, found.num_evictions) == (10, 4, 3)


def test_what_is_computed_needs_no_room_of_the_others_before_it_is_kept() -> None:
    trace = trace_of("a", "a", "bcd", "a")
    assert hits(trace, LRU, 1) == 1  # bcd is longer than the memory: a leaves


def test_of_one_request_the_blocks_behind_leave_before_those_they_stand_on() -> None:
    trace = trace_of("abcd", "abcd")
    for each in (trace, trace.unlinked()):
        assert [hits(each, LRU, size) for size in (1, 3, 4)] == [1, 3, 4]


def test_the_same_block_after_another_beginning_is_another() -> None:
    trace = trace_of("ab", "cb", "ab")
    assert len(trace.blocks) == 4
    assert hits(trace, LRU, 4) == 2
    trace = trace_of("ab", "b")
    assert hits(trace, LRU, 4) == 0


def test_the_optimum_knows_what_comes() -> None:
    trace = trace_of("a", "b", "a", "b", "a")
    assert hits(trace, OPTIMUM, 1) == 2  # a stays, b is never taken in
    assert hits(trace, LRU, 1) == 0
    assert list(optimal_hits(trace, 1)) == [0, 0, 1, 0, 1]
    assert list(optimal_hits(trace, 2)) == [0, 0, 1, 1, 1]


def test_a_time_to_live_counts_from_the_last_use() -> None:
    trace = trace_of("a", "a", "a", "b", "a", at_s=(0, 10, 25, 30, 36.9))
    assert simulate(trace, Memory(9, ttl_s=12)).hot_blocks == 2  # at 10 and, 11.9 s after the last use, at 36.9
    assert simulate(trace, Memory(9, ttl_s=15)).hot_blocks == 2  # over at 25 exactly
    assert simulate(trace, Memory(9, ttl_s=15.1)).hot_blocks == 3


def test_a_parent_does_not_expire_before_its_child_and_expired_ones_make_room() -> None:
    trace = trace_of("ab", "a", "ac", "d", "ac", at_s=(0, 5, 9, 20, 21))
    found = simulate(trace, Memory(3, ttl_s=10))
    assert (found.hot_blocks, found.num_evictions) == (2, 0)  # b expires at 10, a and c at 19: nothing had to leave
    assert simulate(trace, Memory(3, ttl_s=13)).hot_blocks == 4  # a and c are there until 22


def test_what_leaves_hot_memory_stays_on_disk() -> None:
    found = simulate(trace_of("a", "b", "a", "b"), Memory(1, 2))
    assert (found.hot_blocks, found.disk_blocks) == (0, 2)
    found = simulate(trace_of("ab", "ab", "cd", "ab"), Memory(1, 4))
    assert (found.hot_blocks, found.disk_blocks) == (1, 3)  # b from disk, then both
    assert found.shares("blocks") == (1 / 8, 3 / 8)
    found = simulate(trace_of("ab", "ab"), Memory(2, 1))  # a disk smaller than memory adds nothing
    assert (found.hot_blocks, found.disk_blocks) == (2, 0)


def test_the_optimum_of_two_tiers_is_that_of_each() -> None:
    trace = trace_of("a", "b", "a", "b", "a")
    found = simulate(trace, Memory(1, 2, policy=OPTIMUM))
    assert (found.hot_blocks, found.disk_blocks) == (2, 1)


def test_tokens_of_a_partial_last_block_count_as_many_as_they_are() -> None:
    builder = TraceBuilder(512)
    for at_s, length, blocks in ((0, 600, [1, 2]), (1, 600, [1, 2]), (2, 1500, [1, 3, 4])):
        builder.add_hashed(at_s, length, blocks)
    found = simulate(builder.build("by hand", "numbers"), Memory(10))
    assert found.counts("blocks") == (7, 3, 0)
    assert found.counts("tokens") == (2700, 600 + 512, 0)


def test_the_optimum_of_blocks_is_called_so_where_tokens_are_shown() -> None:
    builder = TraceBuilder(512)
    for at_s, (length, block) in enumerate([(512, "a"), (512, "a"), (1, "b"), (1, "b"), (512, "a")]):
        builder.add_hashed(at_s, length, [block])
    trace = builder.build("by hand", "letters")
    optimum = simulate(trace, Memory(1, policy=OPTIMUM))
    assert (optimum.hot_blocks, optimum.hot_tokens) == (2, 513)
    assert list(by_arm([optimum], trace, "blocks")) == ["offline optimum"]
    assert list(by_arm([optimum], trace, "tokens")) == ["offline optimum of blocks"]


def test_a_parent_leaves_before_its_child_only_in_free_order() -> None:
    trace = trace_of("ab", "ac", "d")
    assert trace.unlinked().requests == trace.requests
    assert all(block.parent == trace.blocks[0].parent for block in trace.unlinked().blocks)


def test_without_lifetimes_only_the_order_of_requests_counts() -> None:
    chooser = random.Random(7)
    for _ in range(20):
        requests = ["".join(chooser.choices("abcde", k=chooser.randrange(1, 3))) for _ in range(60)]
        moments = list(accumulate(chooser.choices([0.0, 3.0], k=60)))
        timed, untimed = trace_of(*requests, at_s=moments), trace_of(*requests)
        assert [hits(timed, LRU, size) for size in (2, 5)] == [hits(untimed, LRU, size) for size in (2, 5)]


def test_a_reply_is_stored_and_not_asked_for() -> None:
    requests = (TraceRequest(0.0, 1, (0,), (0, 1)), TraceRequest(1.0, 3, (0, 1, 2), (0, 1, 2)))
    blocks = trace_of("abc").blocks
    trace = Trace("by hand", "letters", 1, requests, blocks)
    assert hits(trace, LRU, 3) == hits(trace, OPTIMUM, 3) == 2
    assert trace.num_asked == 4
    assert hits(trace, LRU, 1) == hits(trace, OPTIMUM, 1) == 1


def test_the_optimum_keeps_what_is_asked_for_not_what_is_stored_again() -> None:
    requests = (
        TraceRequest(0.0, 1, (0,), (0, 1)),  # 1 is a reply that nobody goes on from
        TraceRequest(1.0, 1, (2,), (2,)),
        TraceRequest(2.0, 1, (0,), (0, 1)),
        TraceRequest(3.0, 1, (2,), (2,)),
    )
    ab, c = trace_of("ab").blocks, trace_of("c").blocks
    assert hits(Trace("by hand", "numbers", 1, requests, (*ab, *c)), OPTIMUM, 2) == 2


def test_requests_are_taken_in_the_order_of_their_times() -> None:
    trace = trace_of("b", "a", "a", at_s=(120, 100, 110))
    assert [request.at_s for request in trace.requests] == [0, 10, 20]
    assert [request.blocks for request in trace.requests] == [(1,), (1,), (0,)]
    same = trace_of("a", "b", "c", at_s=(5, 5, 5))
    assert [request.blocks for request in same.requests] == [(0,), (1,), (2,)]


def test_a_sweep_holds_every_memory_once_and_then_the_ceiling() -> None:
    seen: list[int] = []
    trace = trace_of("ab", "ac", "ab")
    found = sweep(trace, [1, 2], ttls=[5.0, None], disks=[0, 4], progress=seen.append)
    memories = [each.memory for each in found]
    assert len(set(memories)) == len(memories) == 2 * 2 * 2 + 2 * 2
    assert memories[-1] == Memory(2, 4, policy=OPTIMUM)
    assert sum(seen) == len(memories) * len(trace.requests)


def test_an_empty_trace_finds_nothing() -> None:
    trace = TraceBuilder(16).build("empty", "letters")
    for policy in (LRU, OPTIMUM):
        assert simulate(trace, Memory(4, policy=policy)).shares("tokens") == (0.0, 0.0)


def naive_hits(requests: Sequence[str], capacity: int) -> list[int]:
    """The same by beginnings as strings, everything looked through for every block that leaves."""
    last: dict[str, tuple[int, int]] = {}
    found = []
    for now, request in enumerate(requests):
        beginnings = [request[: end + 1] for end in range(len(request))]
        found.append(next((n for n, each in enumerate(beginnings) if each not in last), len(request)))
        for depth, each in enumerate(beginnings):
            last[each] = (now, -depth)
        while len(last) > capacity:
            leaves = [each for each in last if not any(len(x) > len(each) and x.startswith(each) for x in last)]
            del last[min(leaves, key=lambda each: last[each])]
    return found


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 8))
def test_the_order_agrees_with_a_model_that_looks_at_everything(requests: list[str], capacity: int) -> None:
    assert hits(trace_of(*requests), LRU, capacity) == sum(naive_hits(requests, capacity))


def most_hits(requests: Sequence[str], capacity: int) -> int:
    """The most that any choice of what to keep can find, all choices tried."""
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for request in requests:
        beginnings = [request[: end + 1] for end in range(len(request))]
        reached: dict[frozenset[str], int] = {}
        for kept, count in states.items():
            found = count + next((n for n, each in enumerate(beginnings) if each not in kept), len(request))
            here = kept | set(beginnings)
            for size in range(min(capacity, len(here)) + 1):
                for chosen in combinations(sorted(here), size):
                    key = frozenset(chosen)
                    reached[key] = max(reached.get(key, 0), found)
        states = reached
    return max(states.values())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 3))
def test_nothing_finds_more_than_the_optimum_and_some_choice_as_much(requests: list[str], capacity: int) -> None:
    assert hits(trace_of(*requests), OPTIMUM, capacity) == most_hits(requests, capacity)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 8), st.sampled_from([None, 2.5]))
def test_the_order_stays_below_the_ceiling_and_finds_all_without_a_limit(
    requests: list[str], capacity: int, ttl_s: float | None
) -> None:
    trace = trace_of(*requests)
    found = simulate(trace, Memory(capacity, 2 * capacity, ttl_s))
    ceiling = simulate(trace, Memory(capacity, 2 * capacity, policy=OPTIMUM))
    assert found.hot_blocks <= ceiling.hot_blocks
    assert found.hot_blocks + found.disk_blocks <= ceiling.hot_blocks + ceiling.disk_blocks
    assert hits(trace, LRU, len(trace.blocks)) == hits(trace, OPTIMUM, len(trace.blocks))


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 6), st.sampled_from([None, 3.0]), st.booleans())
def test_a_tier_stays_whole(requests: list[str], size: int, ttl_s: float | None, free: bool) -> None:
    trace = trace_of(*requests)
    trace = trace.unlinked() if free else trace
    now = 0.0
    tier = Tier(trace, size, ttl_s=ttl_s, clock=lambda: now)
    for request in trace.requests:
        now = request.at_s
        tier.hold(request.blocks)
        tier.add(request.stored)
        tier.release()
        tier.check()


@pytest.mark.parametrize(("unit", "share"), [("blocks", 0.5), ("tokens", 0.4)])
def test_shares_are_of_what_was_asked_for(unit: str, share: float) -> None:
    found = Found(Memory(1), 10, 5, 0, 100, 40, 0)
    assert found.shares("blocks" if unit == "blocks" else "tokens") == (share, 0.0)
