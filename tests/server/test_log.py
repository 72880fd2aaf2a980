"""The line a person reads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.engine.types import Normalised, Report, Timings
from rekindle.server.lines import Line, on_one_line, plain
from rekindle.server.observers.log import RequestLog


def report(prompt: int, hot: int, warm: int, prefill_ms: float) -> Report:
    return Report(
        outcome="extend" if hot + warm else "miss",
        source="own" if hot + warm else None,
        matched_bytes=0,
        prompt_tokens=prompt,
        reused_tokens=hot + warm,
        hot_tokens=hot,
        warm_tokens=warm,
        computed_tokens=prompt - hot - warm,
        completion_tokens=5,
        reuse="continuation",
        timings=Timings(0.0, 0.0, 0.0, prefill_ms, prefill_ms + 1),
        explanation=None,
    )


def test_time_saved_is_priced_by_what_was_computed() -> None:
    log = RequestLog()
    warm = report(1000, 600, 300, 50.0)
    log.learn(report(1000, 0, 0, 500.0))
    assert log.price_ms == 0.5
    assert log.described(warm, "stop") == (
        "extend, reused 900 of 1,000 (600 hot, 300 warm), first token 51 ms, saved about 450 ms, 5 tokens out"
    )


def test_the_first_warm_request_is_priced_by_its_own_prefill() -> None:
    log = RequestLog()
    assert "saved about 450 ms" in log.described(report(1000, 0, 900, 50.0), "stop")
    log.learn(report(110, 0, 109, 20.0))
    assert "saved about 450 ms" in log.described(report(1000, 0, 900, 50.0), "stop")
    assert "saved" not in log.described(report(10, 0, 0, 5.0), "stop")


def test_a_failure_is_bounded() -> None:
    line = Line("req_1", status=200)
    line.fail(503, "x" * 10_000)
    line.fail(500, "another")
    assert line.about().startswith("failed with 503, xxx") and len(line.about()) < 400
    assert line.as_dict()["error_status"] == 503 and len(line.as_dict()["error"]) < 400


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), ("-", '"-"'), ("ada", "ada"), ("a b", '"a b"'), ('a"', '"a\\""'), ("a=b", '"a=b"'), ("", '""')],
)
def test_a_value_ends_where_it_seems_to(value: str | None, shown: str) -> None:
    assert plain(value) == shown


def test_a_line_is_one_line() -> None:
    assert on_one_line("a\nb\x1b[31m\u2028\u202e\ud83d é") == r"a\nb\x1b[31m\u2028\u202e\ud83d é"


def test_short_prefills_price_nothing() -> None:
    log = RequestLog()
    log.learn(report(100, 95, 0, 30.0))
    assert log.price_ms is None


def test_the_unnamed_and_the_cancelled_are_told() -> None:
    line = RequestLog().described(report(10, 0, 0, 5.0), "cancelled")
    assert line.startswith("miss, reused 0 of 10, first token")
    assert line.endswith("cancelled")


def test_what_was_taken_out_is_told_with_its_cost() -> None:
    items = (
        Normalised("attribution", 0, "x-anthropic-billing-header: cch=1;", 12_345),
        Normalised("dates", 0, "Today's date: 2026-11-20", 900),
        Normalised("dates", 1, "Today's date: 2026-11-20", 0),
        Normalised("tools", None, "look, ask", 0),
    )
    line = RequestLog().described(replace(report(20_000, 19_000, 0, 5.0), normalised=items), "stop")
    assert "attribution taken out (would have cost 12,345 tokens)" in line
    assert line.count("dates taken out") == line.count("dates taken out (would have cost 900 tokens)") == 1
    assert line.endswith("tools put in order") or "tools put in order," in line


def test_what_was_taken_out_is_a_field() -> None:
    items = (Normalised("dates", 0, "Today", 900), Normalised("dates", 1, "Today", 0), Normalised("tail", 0, "git", 7))
    found = RequestLog().fields(replace(report(20_000, 19_000, 0, 5.0), normalised=items), "stop")
    assert found["normalised"] == {"dates": 900, "tail": 7}
    assert RequestLog().fields(report(10, 0, 0, 5.0), "stop")["normalised"] == {}
