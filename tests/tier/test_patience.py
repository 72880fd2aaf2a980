"""What waiting for the object store costs a request, whatever comes of it, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle_tier.pace import MOST_SHARE, SILENT_SHARE, Patience, can_ask, head_s

EPSILON = 1e-9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waited(costs: list[float], gaps: list[float], **settings: float) -> tuple[int, float, list[float]]:
    """Wait for blocks that cost so much to compute and come after such gaps; return how many came until it was given
    up, the seconds waited, and the loss after each of them."""
    clock, saved = Clock(), 0.0
    before = settings.get("waited_before_s", 0.0)
    patience = Patience(sum(costs), clock=clock, wait_s=settings.pop("wait_s", 0.0), **settings)
    losses = [before]
    for at, (cost, gap) in enumerate(zip(costs, gaps, strict=True)):
        left = max(0.0, patience.seconds_left())
        if gap > left:
            clock.now += left
            return at, patience.waited_s, losses
        clock.now += gap
        saved += cost
        patience.left_to_compute(sum(costs) - saved)
        losses.append(before + patience.waited_s - saved)
    return len(costs), patience.waited_s, losses


SECONDS = st.lists(st.tuples(st.floats(0.001, 10.0), st.floats(0.0, 30.0)), min_size=1, max_size=30)


@given(SECONDS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_it_costs_a_twelfth_at_most_whatever_comes(
    pairs: list[tuple[float, float]], latency: float, head: float
) -> None:
    costs, gaps = [cost for cost, _ in pairs], [gap for _, gap in pairs]
    compute_s = sum(costs)
    before = head * head_s(compute_s, wait_s=0.0)
    num, seconds, losses = waited(costs, gaps, waited_before_s=before, latency_s=latency)
    loss = before + seconds - sum(costs[:num])
    assert loss <= MOST_SHARE * compute_s + EPSILON
    assert loss <= min(0.0, *losses) + MOST_SHARE * compute_s + EPSILON, "what was gained is not lost again"


@given(st.lists(st.tuples(st.floats(0.001, 10.0), st.floats(0.0, 0.99)), min_size=1, max_size=30))
def test_what_comes_faster_than_it_is_computed_is_waited_for(pairs: list[tuple[float, float]]) -> None:
    costs = [cost for cost, _ in pairs]
    largest = SILENT_SHARE * sum(costs)
    gaps = [min(share * cost, largest) for cost, share in pairs]
    assert waited(costs, gaps)[0] == len(costs)


def test_silence_costs_a_sixteenth_with_the_head() -> None:
    assert waited([16.0], [2.0]) == (0, pytest.approx(1.0), [0.0])
    assert waited([16.0], [2.0], waited_before_s=0.75)[1] == pytest.approx(0.25)
    assert waited([12.0], [2.0], waited_before_s=0.75, latency_s=0.1)[1] == pytest.approx(0.2), "twice the usual"
    assert waited([12.0], [2.0], waited_before_s=0.75, latency_s=9.0)[1] == pytest.approx(0.25), "within a twelfth"
    assert waited([16.0], [9.0], waited_before_s=0.75, wait_s=5.0)[1] == pytest.approx(5.0)


def test_a_trickle_is_given_up_when_it_has_cost_as_much_as_silence() -> None:
    num, seconds, _ = waited([1.0] * 64, [2.0] * 64)
    assert num == 3 and seconds == pytest.approx(7.0), "each block comes in time, and costs a second more than it saves"
    num, seconds, losses = waited([1.0] * 64, [0.1] * 40 + [2.0] * 24)
    assert num == 43 and seconds == pytest.approx(11.0) and losses[-1] == pytest.approx(-33.0), "whenever it begins"


def test_nothing_is_waited_for_when_computing_would_be_done() -> None:
    num, seconds, _ = waited([0.9] * 64, [1.0] * 64, wait_s=7.0)
    assert num == 57 and seconds == pytest.approx(0.9 * 64)


def test_a_head_is_asked_for_where_there_is_time_for_two_answers() -> None:
    assert can_ask(1.0, 2 / MOST_SHARE, wait_s=0.0) and not can_ask(1.01, 2 / MOST_SHARE, wait_s=0.0)
    assert can_ask(1.01, 0.0, wait_s=2.0)
