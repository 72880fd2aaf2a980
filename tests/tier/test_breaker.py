"""The breaker opens after failures in a row, lets one try after a while, and closes with a success."""

from __future__ import annotations

from rekindle.tier.breaker import FAILURES, FIRST_S, LONGEST_S, Breaker
from rekindle.tier.pace import SMALL_BYTES, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(FAILURES):
        assert breaker.allows() and not breaker.is_open
        breaker.failed("it burns")
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(Clock())
    for _ in range(5):
        breaker.failed("once")
        breaker.succeeded()
    assert breaker.allows() and not breaker.is_open and breaker.reason is None
    assert not opened(Clock()).allows() and opened(Clock()).is_open


def test_one_at_a_time_tries_again_and_waits_longer_each_time() -> None:
    clock = Clock()
    breaker, pause = opened(clock), FIRST_S
    for _ in range(12):
        clock.now += 0.99 * pause
        assert not breaker.allows()
        clock.now += 0.02 * pause
        assert breaker.allows() and not breaker.allows(), "one tries, the others wait for its outcome"
        breaker.failed("it burns still")
        pause = min(LONGEST_S, 2 * pause)
    assert breaker.reason == "it burns still"
    clock.now += LONGEST_S
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows() and not breaker.is_open


def test_the_pace_follows_what_was_seen() -> None:
    pace = Pace()
    for _ in range(100):
        pace.saw(100, 0.005)
        pace.saw(10_000_000, 0.105)
    assert 0.0049 < pace.latency_s < 0.0051 and 0.99e8 < pace.bytes_per_s < 1.01e8
    assert 0.99 < pace.predict(100_000_000) < 1.02
    assert abs(pace.predict(0) - pace.latency_s) < 1e-9 and SMALL_BYTES > 100
