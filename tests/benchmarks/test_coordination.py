"""Agents that talk round after round: what is counted of it, and that the arms differ in what they are about."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.coordination.bench import ARMS, OURS, CoordinationBench, run_coordination_bench
from benchmarks.coordination.report import (
    Played,
    Spoken,
    measurements,
    percentile,
    round_line,
    rounds_table,
    totals_table,
)
from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle_sessions.service import run


def spoken(number: int, gap_ms: float | None, *, computed: int = 10, begins: bool = False) -> Spoken:
    return Spoken(number, "Ada", gap_ms, 1000, 1000 - computed, 30, 20, 5.0, {}, begins)


PLAYED = Played(
    OURS,
    (
        spoken(0, None, begins=True),
        spoken(0, 19.0),
        spoken(1, 90.0, begins=True),
        spoken(1, 20.0),
        spoken(1, 40.0, computed=50),
    ),
    (1.5, 2.5),
    (4.0, 5.0, 6.0),
)


def shown(*tables: object) -> str:
    console = Console(width=200, record=True, file=StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_the_bound_is_two_steps_and_ten_milliseconds() -> None:
    assert (PLAYED.step_ms, PLAYED.bound_ms) == (5.0, 20.0)
    assert PLAYED.gaps_ms == [19.0, 20.0, 40.0] and PLAYED.is_met is True
    assert Played(OURS, (spoken(0, 21.0),), (1.0,), (5.0,)).is_met is False
    assert Played(OURS, (spoken(0, None),), (1.0,), (5.0,)).is_met is None
    assert percentile([3.0, 1.0, 2.0], 0.9) == 3.0


def test_rounds_and_totals_are_shown() -> None:
    text = shown(rounds_table(PLAYED))
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2"]
    assert "19.0 ms" in text and "30.0 ms" in text and "no" in text and "a gap may take 20.0 ms" in text
    assert "97.7%" in text and "95.0%" in text, "what all turns reused, and the least of them"
    assert "1-2" in shown(totals_table([PLAYED]))


def test_the_gap_between_two_rounds_is_shown_beside_the_others() -> None:
    assert round_line(OURS, PLAYED.rounds()[0], 2, 1.5) == "ours: round 1 of 2, gap 19.0 ms, 99.0% reused, 1.5 s"
    assert round_line(OURS, PLAYED.rounds()[1], 2, 2.5) == (
        "ours: round 2 of 2, gap 30.0 ms, from the round before 90.0 ms, 97.7% reused, 2.5 s"
    )
    rows = [line.split() for line in shown(rounds_table(PLAYED)).splitlines() if line.strip()[:1].isdigit()]
    assert ["90.0" in row for row in rows] == [False, True]
    found = {each.measure: each for each in measurements(PLAYED)}
    assert found["gap between rounds"].values == (90.0,) and found["gap between rounds"].detail["met"] is False
    assert found["gap between speakers"].values == (19.0, 20.0, 40.0)


def test_lines_say_whether_the_bound_is_met() -> None:
    found = {each.measure: each for each in measurements(PLAYED)}
    gap = found["gap between speakers"]
    assert (gap.median, gap.detail["met"], gap.detail["bound_ms"], len(gap.detail["turns"])) == (20.0, True, 20.0, 5)
    assert found["computed at a turn"].values[-1] == 50.0 and found["round"].unit == "s"
    assert found["between two tokens in the session"].values == (5.0,) * 5, "a step may give several"
    silent = Played(OURS, (Spoken(0, "Ada", None, 10, 0, 0, 1, None, {}),), (1.0,), (5.0,))
    measured = {each.measure for each in measurements(silent)}
    assert {"gap between speakers", "between two tokens in the session"}.isdisjoint(measured)


@pytest.mark.parametrize(
    "wrong", [{"agents": 1}, {"agents": 31}, {"rounds": 0}, {"tokens": 0}, {"history": -1}, {"arms": ("theirs",)}]
)
def test_what_cannot_be_played_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CoordinationBench(**wrong)


def test_the_arms_differ_in_what_they_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSE_S", 600.0)  # however late a slow machine begins a round, it follows the last
    out = tmp_path / "lines.jsonl"
    settings = Settings.load({"threads": 1, "hot_bytes": "64MiB"})
    options = CoordinationBench(agents=3, rounds=2, history=200, tokens=12, baseline_rounds=1, arms=("all",), out=out)
    assert [options.rounds_of(arm) for arm in options.chosen_arms()] == [2, 1, 1, 1]
    written = StringIO()
    assert run_coordination_bench(settings, options, Console(file=written, width=160)) == 0
    told = written.getvalue().splitlines()
    rounds = [line.split(",")[0] for line in told if ": round " in line]
    assert rounds == [
        f"{arm}: round {n + 1} of {options.rounds_of(arm)}" for arm in ARMS for n in range(options.rounds_of(arm))
    ]
    assert told[1].startswith("ours: round 1 of 2, gap "), "each as it ends, before the table"
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {line["arm"] for line in lines} == set(ARMS)
    turns = {line["arm"]: line["detail"]["turns"] for line in lines if line["measure"] == "gap between speakers"}
    assert len(turns[OURS]) == 6 and {turn["num_tokens"] for each in turns.values() for turn in each} == {12}
    wraps = {line["arm"]: len(line["values"]) for line in lines if line["measure"] == "gap between rounds"}
    assert wraps == {OURS: 1}, "a first round follows nothing"
    taken_in = {arm: sum(turn["taken_in_tokens"] for turn in each) for arm, each in turns.items()}
    assert taken_in[OURS] > 0 == sum(taken_in[arm] for arm in ARMS if arm != OURS)
    assert all(turn["reused_tokens"] == 0 for turn in turns["reuse off"])
    assert all(turn["reused_tokens"] > 150 for arm in (OURS, "not listening") for turn in turns[arm][1:])
