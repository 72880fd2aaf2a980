"""What the last hour's requests reused, and what that saved today, for each namespace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rekindle.engine.types import Report, Timings
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.today import MOST_NAMESPACES, Today
from rekindle.text.messages import Message

NOON = 20_000 * 86400 + 43200.0


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def report(
    outcome: Any = "extend", *, reused: int = 90, computed: int = 10, first_ms: float = 20.0, **times: float
) -> Report:
    timings = Timings(
        **{"queue_ms": 0.0, "match_ms": 0.0, "load_ms": 0.0, "prefill_ms": 5.0, **times}, first_token_ms=first_ms
    )
    return Report(
        outcome=outcome, source="own", matched_bytes=0, prompt_tokens=reused + computed, reused_tokens=reused,
        hot_tokens=reused, warm_tokens=0, computed_tokens=computed, completion_tokens=3, reuse="continuation",
        timings=timings, explanation=None,
    )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def today(clock: Clock) -> Today:
    return Today(clock=clock)


def test_the_last_hour_by_outcome(today: Today, clock: Clock) -> None:
    assert today.hour("a") == {} and today.saved("a").reused_tokens == 0
    today.add("a", report(first_ms=1000.0))
    clock.now += 1800
    for first_ms in (10.0, 12.0, 30.0, math.nan):
        today.add("a", report(first_ms=first_ms))
    today.add("a", report("miss", reused=0, computed=50, first_ms=200.0))
    today.add("a", replace(report(), reuse="off"))
    today.add("b", report())
    hour = today.hour("a")
    assert (hour["extend"].requests, hour["extend"].prompt_tokens, hour["extend"].reused_tokens) == (5, 500, 450)
    assert hour["extend"].first_token_ms == pytest.approx(12.0, rel=0.03)
    assert hour["miss"].first_token_ms == pytest.approx(200.0, rel=0.03) and hour.keys() == {"extend", "miss"}
    clock.now += 1800
    hour = today.hour("a")
    assert hour["extend"].requests == 4 and hour["miss"].requests == 1, "the first is an hour old"
    clock.now += 3600
    today.check()
    assert today.hour("a") == {}


def test_saved_is_what_computing_at_todays_pace_would_have_taken(today: Today, clock: Clock) -> None:
    today.add("a", report(reused=1000, computed=10, prefill_ms=900.0))
    assert today.saved("a").seconds is None, "a step takes its time whatever is computed in it"
    today.add("a", report("miss", reused=0, computed=400, prefill_ms=2000.0))
    today.add("a", report(reused=3000, computed=600, prefill_ms=3000.0, load_ms=4000.0))
    saved = today.saved("a")
    assert (saved.since, saved.reused_tokens, saved.seconds) == (NOON, 4000, pytest.approx(4000 * 0.005 - 4))
    assert today.saved("b").seconds is None
    today.add("a", report(reused=1, computed=1, load_ms=60_000.0))
    assert today.saved("a").seconds == 0, "loading took longer"
    clock.now += 86400
    assert (today.saved("a").since, today.saved("a").reused_tokens) == (NOON + 43200, 0)
    today.add("a", report(reused=7))
    assert (today.saved("a").reused_tokens, today.saved("a").seconds) == (7, None)


def test_a_request_with_several_choices_counts_once(today: Today) -> None:
    watch = today.began(Caller("a", "ada"), "/v1/chat/completions", {})
    for number in range(3):
        watch.finished(number, report(), "stop", reply=Message("assistant", "Yes."))
    assert today.hour("a")["extend"].requests == 1


def test_hours_and_namespaces_are_bounded(today: Today, clock: Clock) -> None:
    for _ in range(200):
        clock.now += 60
        today.add("a", report())
    assert today.hour("a")["extend"].requests == 60
    today.check()
    for number in range(MOST_NAMESPACES):
        today.add(f"team {number}", report())
    today.check()
    assert today.hour("a") == {}
