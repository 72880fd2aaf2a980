"""The line a person reads."""

from __future__ import annotations

from dataclasses import replace

from rekindle.engine.types import Normalised, Report, Timings
from rekindle.errors import BadRequest
from rekindle.server.log import RequestLog


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
    log.finished(1, None, report(1000, 0, 0, 500.0), "stop")
    assert log.price_ms == 0.5
    assert log.line("ada", warm, "stop") == (
        "ada: extend, reused 900 of 1,000 (600 hot, 300 warm), first token 51 ms, saved about 450 ms, 5 tokens out"
    )


def test_the_first_warm_request_is_priced_by_its_own_prefill() -> None:
    log = RequestLog()
    assert "saved about 450 ms" in log.line("ada", report(1000, 0, 900, 50.0), "stop")
    log.finished(1, None, report(110, 0, 109, 20.0), "stop")
    assert "saved about 450 ms" in log.line("ada", report(1000, 0, 900, 50.0), "stop")
    assert "saved" not in log.line("ada", report(10, 0, 0, 5.0), "stop")


def test_a_failure_is_one_line_too() -> None:
    log = RequestLog()
    assert log.failure("ada", 400, BadRequest("no\n such thing")) == "ada: failed with 400, no such thing"
    assert log.failure(None, 500, ValueError("bits")) == "unnamed: failed with 500, ValueError('bits')"
    assert len(log.failure("ada", 400, BadRequest("x" * 10_000))) < 400


def test_short_prefills_price_nothing() -> None:
    log = RequestLog()
    log.finished(1, None, report(100, 95, 0, 30.0), "stop")
    assert log.price_ms is None


def test_the_unnamed_and_the_cancelled_are_told() -> None:
    line = RequestLog().line(None, report(10, 0, 0, 5.0), "cancelled")
    assert line.startswith("unnamed: miss, reused 0 of 10, first token")
    assert line.endswith("cancelled")


def test_what_was_taken_out_is_told_with_its_cost() -> None:
    items = (
        Normalised("attribution", 0, "x-anthropic-billing-header: cch=1;", 12_345),
        Normalised("dates", 0, "Today's date: 2026-11-20", 900),
        Normalised("dates", 1, "Today's date: 2026-11-20", 0),
        Normalised("tools", None, "look, ask", 0),
    )
    line = RequestLog().line("ada", replace(report(20_000, 19_000, 0, 5.0), normalised=items), "stop")
    assert "attribution taken out (would have cost 12,345 tokens)" in line
    assert line.count("dates taken out") == line.count("dates taken out (would have cost 900 tokens)") == 1
    assert line.endswith("tools put in order") or "tools put in order," in line
