"""The breaker opens after failures in a row, lets one try after a while, and closes with a success."""

from __future__ import annotations

from rekindle_tier.pace import FAILURES, FIRST_S, LONGEST_S, OLD_S, SMALL_BYTES, Breaker, Pace


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


def test_a_bandwidth_that_nobody_measures_keeps_nobody_from_trying() -> None:
    clock = Clock()
    pace = Pace(latency_s=0.01, clock=clock)
    for _ in range(2):
        pace.crawled(1_000, 10.0)
    assert pace.predict(1_000_000) > 0.1
    for _ in range(30):
        pace.crawled(1_000, 10.0)
    assert pace.predict(1_000_000) > 1000.0
    clock.now += 0.9 * OLD_S
    assert pace.predict(1_000_000) > 1000.0
    clock.now += 0.2 * OLD_S
    assert pace.predict(1_000_000) < 0.03
    pace.saw(1_000_000, 0.03)
    assert pace.predict(1_000_000) < 0.04, "it is fast again, and that is believed at once"


def test_what_has_not_come_is_expected_later() -> None:
    pace = Pace(latency_s=0.001)
    for _ in range(4):
        pace.missed(0, 0.01)
    assert pace.latency_s > 0.01
    pace.missed(1_000_000, 1.0)
    assert pace.bytes_per_s < 1e8
    latency_s, bytes_per_s = pace.latency_s, pace.bytes_per_s
    pace.missed(1_000_000, 0.0)
    pace.missed(0, 0.0)
    assert (pace.latency_s, pace.bytes_per_s) == (latency_s, bytes_per_s), "that nothing came at once is no news"
