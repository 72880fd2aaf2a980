"""Fleets on traces small enough to follow by hand, and what must hold on any.

Each string is a request, each letter of it a block of 100 tokens. A replica computes one block a second and loads ten a
second, 0.05 s after it asked; a request takes 0.005 s, and its last token is always computed (0.01 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle_lab.simulate.fleet.fleet import MAX_BRANCHES, Death, FleetRun, Plan, run_fleet, sessions_of
from rekindle_lab.simulate.fleet.routes import ROUTES, Ring, Route
from rekindle_lab.simulate.fleet.saturation import PRECISION, saturate
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.fleet.summary import percentile, summarise
from rekindle_lab.simulate.simulation import Memory, simulate
from rekindle_lab.simulate.trace import Trace, TraceBuilder

SPEEDS = Speeds(prefill=100, token_bytes=1e7, tier_bandwidth=10, tier_latency=0.05)
EAGER = replace(SPEEDS, tier_latency=0)  # loads whatever is there
PLAN = Plan(num_replicas=1, route="session", hot_blocks=100)
REQUESTS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=12)


def trace_of(*requests: str, at_s: Sequence[float], sessions: Sequence[str] = ()) -> Trace:
    builder = TraceBuilder(100)
    for moment, blocks in zip(at_s, requests, strict=True):
        builder.add_hashed(moment, 100 * len(blocks), list(blocks))
    trace = builder.build("by hand", "letters")
    if not sessions:
        return trace
    named = [replace(request, session=name) for request, name in zip(trace.requests, sessions, strict=True)]
    return replace(trace, requests=tuple(named))


def spaced(requests: Sequence[str], gap_s: float) -> Trace:
    return trace_of(*requests, at_s=[gap_s * number for number in range(len(requests))])


def waits(run: FleetRun) -> list[float]:
    return [round(each.wait_s, 6) for each in run.served]


def found(run: FleetRun) -> list[tuple[int, int, int]]:
    """Blocks of each request found hot, loaded, and left in the tier."""
    services = [each.service for each in run.served]
    return [(service.hot_blocks, service.tier_blocks, service.left_blocks) for service in services]


def test_one_replica_serves_one_after_the_other() -> None:
    trace = trace_of("ab", "ab", "cd", at_s=(0, 0.5, 1))
    run = run_fleet(trace, PLAN, SPEEDS)
    assert found(run) == [(0, 0, 0), (2, 0, 0), (0, 0, 0)]
    assert waits(run) == [2.005, 1.52, 3.025]  # served until 2.005, 2.02 and 4.025
    assert [round(each.queued_s, 6) for each in run.served] == [0, 1.505, 1.02]
    summary = summarise(run)
    assert (summary.mean_wait_s, summary.p99_wait_s) == (pytest.approx(6.55 / 3), pytest.approx(3.025))
    assert (summary.hot, summary.hot_tokens, summary.tier) == (2 / 6, 2 / 6, 0)
    assert (summary.busy, summary.busiest) == (pytest.approx(1), 1)


def test_arrivals_come_so_many_times_as_fast() -> None:
    trace = trace_of("ab", "ab", "cd", at_s=(0, 2, 4))
    assert waits(run_fleet(trace, replace(PLAN, arrivals=4), SPEEDS)) == [2.005, 1.52, 3.025]
    assert waits(run_fleet(trace, replace(PLAN, arrivals=0.5), SPEEDS)) == [2.005, 0.015, 2.005]


def test_a_partial_block_counts_its_tokens() -> None:
    builder = TraceBuilder(100)
    for moment, length, blocks in ((0.0, 150, "ab"), (10.0, 150, "ab"), (20.0, 250, "acd")):
        builder.add_hashed(moment, length, list(blocks))
    run = run_fleet(builder.build("by hand", "letters"), replace(PLAN, tier_blocks=9), SPEEDS)
    assert waits(run) == [1.505, 0.015, 1.505]
    assert (run.traffic.blocks_put, run.traffic.tokens_put) == (4, 150 + 150)
    assert summarise(run).hot_tokens == (150 + 100) / 550


@pytest.mark.parametrize(
    ("tier", "speeds", "wait_s", "shares"),
    [
        (0, SPEEDS, 1 + 2.005, (0, 0, 0)),
        (9, SPEEDS, 1 + 0.005 + 0.05 + 0.2 + 0.01, (0, 2, 0)),
        (9, replace(SPEEDS, tier_latency=1.81), 1 + 2.005, (0, 0, 2)),
        (9, replace(SPEEDS, tier_bandwidth=0.5), 1 + 2.005, (0, 0, 2)),
        (1, SPEEDS, 1 + 0.005 + 0.05 + 0.1 + 1, (0, 1, 0)),
    ],
)
def test_a_death_loses_what_is_hot_and_the_tier_is_read_where_that_is_faster(
    tier: int, speeds: Speeds, wait_s: float, shares: tuple[int, int, int]
) -> None:
    trace = trace_of("ab", "ab", at_s=(0, 10))
    plan = replace(PLAN, tier_blocks=tier, death=Death(0.5, back_s=1))
    run = run_fleet(trace, plan, speeds)
    assert waits(run) == [2.005, pytest.approx(wait_s)]
    assert found(run)[1] == shares
    assert (run.traffic.blocks_got, run.traffic.tokens_got) == (shares[1], 100 * shares[1])


def test_what_a_dead_replica_had_not_finished_is_sent_again_and_waits_from_its_arrival() -> None:
    trace = trace_of("ab", "c", at_s=(0, 1))
    run = run_fleet(trace, replace(PLAN, death=Death(0.5, back_s=2)), SPEEDS)
    assert waits(run) == [5.005, 5.01]  # both again from 3
    assert run.busy_s == (pytest.approx(2.005 + 1.005),)  # the first try of `ab` was lost at 1
    run = run_fleet(trace, replace(PLAN, death=Death(0.5, back_s=0.5)), SPEEDS)
    assert waits(run) == [3.505, 3.51], "what began before the death and would have ended at 2.005 does not"
    two = replace(PLAN, num_replicas=2, route="queue", death=Death(0.5))
    run = run_fleet(trace_of("ab", "c", "d", "e", at_s=(0, 0, 1, 1)), two, SPEEDS)
    kept = 1.005 if run.served[0].job.request.num_tokens == 100 else 2.005  # what the other replica is serving at 1
    assert waits(run) == [kept, 3.01, 3.015, 4.02], "then what was lost, and d and e"
    assert {each.replica for each in run.served if each.job.arrived_s == 1} == {1}


def test_the_replica_that_has_worked_most_dies() -> None:
    sessions = [str(number) for number in range(40)]
    trace = trace_of("a" * 9, *"bcdefghij" * 4, "a", "k", "l", at_s=range(0, 400, 10), sessions=sessions)
    alive = run_fleet(trace, replace(PLAN, num_replicas=4), SPEEDS)
    half = [each for each in alive.served if each.job.arrived_s < 200]
    work = [sum(each.service.seconds for each in half if each.replica == number) for number in range(4)]
    run = run_fleet(trace, replace(PLAN, num_replicas=4, death=Death(0.5)), SPEEDS)
    late = {each.replica for each in run.served if each.job.arrived_s >= 200}
    assert late == {0, 1, 2, 3} - {work.index(max(work))}


def test_blocks_are_in_the_tier_when_their_request_has_ended() -> None:
    trace = trace_of("ab", "ab", "abc", at_s=(0, 2.004, 2.004), sessions=("x", "y", "z"))
    plan = replace(PLAN, num_replicas=3, route="queue", tier_blocks=9)
    moments = {seed: found(run_fleet(trace, replace(plan, seed=seed), EAGER)) for seed in range(20)}
    assert (0, 2, 0) not in {each for run in moments.values() for each in run}
    later = trace_of("ab", "ab", "abc", at_s=(0, 2.005, 2.005), sessions=("x", "y", "z"))
    assert (0, 2, 0) in found(run_fleet(later, plan, EAGER))


def test_objects_are_counted() -> None:
    trace = trace_of("ab", "ab", "abc", at_s=(0, 10, 20))
    run = run_fleet(trace, replace(PLAN, tier_blocks=9, death=Death(0.5, back_s=1)), EAGER)
    traffic = run.traffic
    assert (traffic.blocks_put, traffic.heads_put, traffic.objects_put, traffic.tokens_put) == (3, 3, 6, 300)
    assert (traffic.blocks_got, traffic.heads_got, traffic.objects_got, traffic.tokens_got) == (2, 2, 4, 200)
    none = run_fleet(trace, PLAN, EAGER).traffic
    assert (none.objects_put, none.objects_got) == (0, 0)


def test_a_small_tier_writes_again_what_it_has_evicted() -> None:
    run = run_fleet(spaced(["ab", "cd", "ab"], 10), replace(PLAN, tier_blocks=2), SPEEDS)
    assert found(run)[2] == (2, 0, 0)
    assert (run.traffic.blocks_put, run.tier_evictions) == (6, 4)


def test_hot_memory_is_shared_by_all_replicas() -> None:
    trace = spaced(["abcd", "abcd"], 100)
    assert found(run_fleet(trace, replace(PLAN, hot_blocks=4), SPEEDS))[1] == (4, 0, 0)
    assert found(run_fleet(trace, replace(PLAN, num_replicas=2, hot_blocks=4), SPEEDS))[1] == (2, 0, 0)


def test_of_two_queues_the_shorter_is_taken() -> None:
    letters = "abcdefghij"
    run = run_fleet(trace_of(*letters, at_s=[0] * 10), replace(PLAN, num_replicas=2, route="queue"), SPEEDS)
    assert [sum(each.replica == number for each in run.served) for number in (0, 1)] == [5, 5]
    drawn = run_fleet(trace_of(*letters, at_s=[0] * 10), replace(PLAN, num_replicas=2, route="random"), SPEEDS)
    assert sum(each.replica for each in drawn.served) != 5


@pytest.mark.parametrize("route", ["session", "prefix"])
def test_a_session_stays_where_it_is(route: Route) -> None:
    names = [str(number) for number in range(30)]
    trace = trace_of(*["ab", "c"] * 30, at_s=range(60), sessions=names * 2)
    summary = summarise(run_fleet(trace, replace(PLAN, num_replicas=4, route=route), SPEEDS))
    assert (summary.sessions, summary.moved_sessions, summary.moves) == (30, 0, 0)


def test_sessions_that_are_routed_by_lot_move() -> None:
    trace = trace_of("ab", "ab", "ab", "ab", at_s=(0, 10, 20, 30))
    runs = [run_fleet(trace, replace(PLAN, num_replicas=2, route="random", seed=seed), SPEEDS) for seed in range(9)]
    for run in runs:
        places = [each.replica for each in run.served]
        moves = sum(before != after for before, after in pairwise(places))
        assert (summarise(run).moves, summarise(run).moved_sessions) == (moves, int(moves > 0))
    assert len({summarise(run).moves for run in runs}) > 1


def test_a_new_session_goes_where_its_prefix_is_unless_the_queue_costs_more() -> None:
    plan = replace(PLAN, num_replicas=4, route="prefix")
    for seed in range(5):
        apart = trace_of("abcd", "abcde", "xy", "abcdf", at_s=(0, 10, 20, 30), sessions="pqrs")
        places = [each.replica for each in run_fleet(apart, replace(plan, seed=seed), SPEEDS).served]
        assert places[0] == places[1] == places[3]
        crowded = trace_of("abcd", "abcdefghijk", "abcdl", at_s=(0, 10, 10), sessions="pqr")
        places = [each.replica for each in run_fleet(crowded, replace(plan, seed=seed), SPEEDS).served]
        assert len(set(places[:2])) == 2, "7 s of queue are more than 4 s of prefix"


def test_a_session_that_lost_its_replica_finds_another_and_stays_there() -> None:
    trace = trace_of(*["ab"] * 6, at_s=range(0, 60, 10))
    for route in ("session", "prefix"):
        plan = replace(PLAN, num_replicas=3, route=route, tier_blocks=9, death=Death(0.5))
        run = run_fleet(trace, plan, EAGER)
        assert found(run) == [(0, 0, 0), (2, 0, 0), (2, 0, 0), (0, 2, 0), (2, 0, 0), (2, 0, 0)]
        assert (summarise(run).moved_sessions, summarise(run).moves) == (1, 1)


def test_on_the_ring_only_the_sessions_of_a_dead_replica_move_and_they_return() -> None:
    ring, other, live = Ring(8, seed=3), Ring(8, seed=4), set(range(8))
    homes = [ring.owner(session, live) for session in range(2_000)]
    after = [ring.owner(session, live - {5}) for session in range(2_000)]
    assert [home for home, now in zip(homes, after, strict=True) if home != now] == [5] * homes.count(5)
    assert len({now for home, now in zip(homes, after, strict=True) if home == 5}) == 7, "to all the others"
    assert all(125 < count < 375 for count in map(homes.count, live))
    assert homes == [ring.owner(session, live) for session in range(2_000)]
    assert homes != [other.owner(session, live) for session in range(2_000)]
    with pytest.raises(ValueError, match="no replica"):
        ring.owner(1, set())


def test_sessions_of_hashed_blocks_share_blocks_that_few_share() -> None:
    assert sessions_of(spaced(["ab", "cd", "abe", "cdf", "abeg", "h"], 1)) == [0, 1, 0, 1, 0, 2]
    assert sessions_of(spaced(["a", "ab", "abc"], 1)) == [0, 0, 0]
    users = [chr(1000 + number) for number in range(MAX_BRANCHES + 1)]
    system = spaced([*(f"s{user}" for user in users), f"s{users[7]}a"], 1)
    assert sessions_of(system) == [*range(len(users)), 7]
    long = spaced([*(f"ps{user}" for user in users), f"ps{users[7]}a"], 1)
    assert sessions_of(long) == [*range(len(users)), 7], "what comes before a common block is common, too"
    few = spaced([*(f"s{user}" for user in users[1:]), f"s{users[7]}a"], 1)
    assert set(sessions_of(few)) == {0}


def test_named_sessions_are_taken_as_they_are() -> None:
    assert sessions_of(trace_of("ab", "ab", "c", at_s=(0, 1, 2), sessions=("x", "y", "x"))) == [0, 1, 0]


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.sampled_from(ROUTES), st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.8, None]), st.booleans())
def test_with_an_unlimited_tier_a_fleet_finds_what_one_machine_does(
    requests: list[str], route: Route, num_replicas: int, after: float | None, is_late: bool
) -> None:
    trace = spaced(requests, 100)  # each ends before the next comes
    death = None if after is None else Death(after, back_s=1 if num_replicas == 1 or is_late else None)
    size = len(trace.blocks)
    plan = Plan(num_replicas, route, hot_blocks=4 * size, tier_blocks=size, death=death)
    run = run_fleet(trace, plan, SPEEDS)
    one = simulate(trace, Memory(size))
    assert sum(map(sum, found(run))) == one.hot_blocks
    assert sum(tier for _, tier, _ in found(run_fleet(trace, plan, EAGER))) >= run.traffic.blocks_got
    assert run.traffic.blocks_put == size, "each is written once"


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.sampled_from(ROUTES), st.integers(2, 4), st.sampled_from([0.1, 2.0]), st.booleans())
def test_queues_lose_no_request_and_invent_no_block(
    requests: list[str], route: Route, num_replicas: int, gap_s: float, dies: bool
) -> None:
    trace = spaced(requests, gap_s)
    plan = Plan(num_replicas, route, 4 * num_replicas, len(trace.blocks), death=Death(0.5) if dies else None)
    run = run_fleet(trace, plan, SPEEDS)
    assert sorted(each.job.arrived_s for each in run.served) == [request.at_s for request in trace.requests]
    assert all(each.wait_s >= each.service.seconds - 1e-9 for each in run.served)
    assert sum(map(sum, found(run))) <= simulate(trace, Memory(len(trace.blocks))).hot_blocks
    assert run == run_fleet(trace, plan, SPEEDS), "the same again"


@settings(deadline=None, max_examples=60)
@given(
    REQUESTS,
    st.sampled_from(ROUTES),
    st.integers(1, 8),
    st.integers(0, 8),
    st.sampled_from([0.1, 100]),
)
def test_one_replica_finds_what_the_simulation_of_a_memory_does(
    requests: list[str], route: Route, hot: int, tier: int, gap_s: float
) -> None:
    trace = spaced(requests, gap_s)
    run = run_fleet(trace, Plan(1, route, hot, tier), EAGER)
    one = simulate(trace, Memory(hot, tier))
    assert tuple(map(sum, zip(*found(run), strict=True))) == (one.hot_blocks, one.disk_blocks, 0)


def one_a_time() -> Trace:
    """Ten requests, 10 s apart, of one block each: 1.005 s."""
    return spaced(list("abcdefghij"), 10)


def test_saturation_is_where_the_queue_grows() -> None:
    # With gaps of g < 1.005 s the last request waits 1.005 + 9 (1.005 - g): 2 s where g is 0.8944 s, 10 / 11.18.
    search = saturate(one_a_time(), PLAN, SPEEDS, bound_s=2)
    assert search.borne is not None and search.is_bounded
    assert 11.18 / PRECISION < search.borne.run.plan.arrivals <= 11.181
    points = [(point.run.plan.arrivals, point.is_within) for point in search.points]
    assert points == sorted(points) and [within for _, within in points] == sorted(
        (within for _, within in points), reverse=True
    )
    from_above = saturate(one_a_time(), replace(PLAN, arrivals=40), SPEEDS, bound_s=2)
    assert from_above.borne is not None and 11.18 / PRECISION < from_above.borne.run.plan.arrivals <= 11.181


def test_saturation_may_have_no_end_or_no_beginning() -> None:
    search = saturate(one_a_time(), PLAN, SPEEDS, bound_s=11)  # all at once: 10.05 s
    assert search.borne is search.points[-1] and not search.is_bounded
    search = saturate(one_a_time(), PLAN, SPEEDS, bound_s=1)
    assert search.borne is None and search.is_bounded


def test_a_percentile_is_the_nearest_rank() -> None:
    assert percentile(range(100, 0, -1), 99) == 99
    assert [percentile(range(1, 11), percent) for percent in (0, 10, 11, 50, 99, 100)] == [1, 1, 2, 5, 10, 10]
    assert percentile([7.0], 99) == 7.0
