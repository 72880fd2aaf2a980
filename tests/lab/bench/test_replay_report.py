"""The sums of a replay, on data made by hand."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rekindle.server.dayfile import DayEvent, RecordedRequest
from rekindle_lab.bench.replay.client import Answer
from rekindle_lab.bench.replay.replay import EventOutcome, Exchange, Replayed
from rekindle_lab.bench.replay.report import ColdCheck, earlier, measurements, notes, table
from rekindle_lab.bench.replay.table import arms_table, nearest_rank
from rekindle_lab.record import Measurement


def asked(at_s: float, first_s: float, usage: Any = (100, 40), after: str | None = None, **more: Any) -> Exchange:
    given = {"prompt_tokens": usage[0], "prompt_tokens_details": {"cached_tokens": usage[1]}} if usage else None
    answer = Answer(token_s=(first_s, first_s + 1), total_s=first_s + 2, usage=given, **more)
    since_s = at_s - 1000 if after else 0.0
    return Exchange(RecordedRequest(at_s, {"messages": []}, None, id=str(at_s)), {}, answer, after, since_s)


def replayed(*items: Exchange, events: tuple[EventOutcome, ...] = ()) -> Replayed:
    return Replayed(items, events, num_replaced=3, num_kept=1, num_skipped=0, wall_s=9.0)


KILL = EventOutcome(DayEvent(1000.0, "kill"), 2.5)


def by_name(found: list[Measurement]) -> dict[str, Measurement]:
    assert len({item.measure for item in found}) == len(found)
    return {item.measure: item for item in found}


def test_waiting_and_tokens_are_summed() -> None:
    found = by_name(measurements(replayed(asked(0, 1.0), asked(1, 2.0), asked(2, 6.0, usage=(50, 50))), "arm"))
    assert found["first token"].values == (1.0, 2.0, 6.0)
    assert found["first token"].detail == {"at_s": [0, 1, 2], "p95": 6.0}
    assert found["first tokens, sum"].values == (9.0,)
    assert found["prompt tokens sent"].values == (250.0,)
    assert found["prompt tokens computed"].values == (120.0,)
    assert found["prompt tokens computed"].detail["share"] == pytest.approx(0.48)
    assert found["errors"].values == (0.0,)


def test_the_time_after_a_kill_is_looked_at_for_itself() -> None:
    items = (
        asked(0, 1.0),
        asked(1001, 2.0, after="kill"),
        asked(1600, 3.0, after="kill"),
        asked(1601, 4.0, after="kill"),
    )
    found = by_name(measurements(replayed(*items, events=(KILL,)), "arm"))
    assert found["first tokens, sum, 10 min after a kill"].values == (5.0,)
    assert found["prompt tokens sent, 10 min after a kill"].values == (200.0,)
    assert found["first tokens, sum"].values == (10.0,)
    assert found["answers again after a kill"].values == (2.5,)


def test_a_failed_request_is_an_error_and_no_waiting() -> None:
    failed = asked(1, 0.01, error="http 503", problem="no room")
    found = by_name(measurements(replayed(asked(0, 1.0), failed, asked(2, 0.1, error="http 503")), "arm"))
    assert found["errors"].values == (2.0,)
    assert found["errors"].detail == {"requests": 3, "kinds": {"http 503": 2}, "first": "no room"}
    assert found["first tokens, sum"].values == (1.0,)


def test_what_a_server_does_not_say_is_unknown_and_never_0() -> None:
    day = replayed(asked(0, 1.0), asked(1, 1.0, usage=None))
    assert not [name for name in by_name(measurements(day, "arm")) if "tokens sent" in name or "computed" in name]
    assert "1 of 2 answers do not say how many prompt tokens there were" in notes(day, None)
    assert any("unknown" in note for note in notes(day, None))
    uncached = asked(1, 1.0, usage=(100, None))
    found = by_name(measurements(replayed(asked(0, 1.0), uncached), "arm"))
    assert found["prompt tokens sent"].values == (200.0,)
    assert "prompt tokens computed" not in found


def test_replies_unlike_cold_ones_are_counted() -> None:
    cold = ColdCheck(20, ("7",), 3)
    found = by_name(measurements(replayed(asked(0, 1.0)), "arm", cold))["replies unlike cold"]
    assert (found.values, found.detail["differing"]) == ((1.0,), ["7"])
    assert "3 requests are not greedy: their replies cannot be compared" in notes(replayed(asked(0, 1.0)), cold)


def test_a_skipped_event_is_said() -> None:
    day = replayed(asked(0, 1.0), events=(EventOutcome(DayEvent(5.0, "restart"), None),))
    assert "skipped, no command was given: restart" in notes(day, None)
    assert not [item for item in measurements(day, "arm") if "after a restart" in item.measure]


def test_nothing_answered_is_no_crash() -> None:
    failed = asked(0, 1.0, error="connection")
    assert {item.measure for item in measurements(replayed(failed), "arm")} == {"errors", "whole replay"}


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 1), (0.5, 10), (0.95, 19), (0.96, 20), (1.0, 20)])
def test_nearest_rank(share: float, wanted: int) -> None:
    assert nearest_rank([*range(20, 0, -1)], share) == wanted


def shown(table: Any) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(table)
    return text.getvalue()


def test_arms_stand_side_by_side() -> None:
    ours = measurements(replayed(asked(0, 1.0), asked(1, 3.0), events=(KILL,)), "ours")
    theirs = measurements(replayed(asked(0, 11.0, usage=None), asked(2, 0.1, error="timeout")), "theirs")
    rows = {line[:30].strip(): line[30:].split() for line in shown(table([*ours, *theirs])).splitlines()}
    assert rows["first token, median"] == ["2,000", "ms", "11.0", "s"]
    assert rows["first token, max"] == ["3,000", "ms", "11.0", "s"]
    assert rows["prompt tokens computed"] == ["120", "(60%)", "unknown"]
    assert rows["errors"] == ["0", "1", "(1", "timeout)"]
    assert rows["answers again after a kill"] == ["2,500", "ms", "unknown"]


def test_a_range_is_shown_where_there_are_several_values() -> None:
    rate = Measurement("decode", "a", "tok/s", (10.0, 30.0, 20.0))
    assert "20.0 tok/s (10.0-30.0)" in shown(arms_table("", [rate, Measurement("cold", "a", "s", (0.1, 0.2, 0.3))]))
    assert "200 ms (100-300)" in shown(arms_table("", [Measurement("cold", "a", "s", (0.1, 0.2, 0.3))]))


def test_only_arms_of_the_same_day_are_put_beside() -> None:
    line = {**Measurement("cold", "a", "s", (1.0,)).as_dict(), "bench": "replay", "settings": {"day_sha256": "x"}}
    assert [item.arm for item in earlier([line, {**line, "bench": "server"}], "x")] == ["a"]
    assert earlier([line], "y") == []
