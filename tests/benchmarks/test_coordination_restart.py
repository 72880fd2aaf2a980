"""A session whose server is killed: what counts as lost or doubled, what is shown of it, and one real kill."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.coordination.bench import OURS
from benchmarks.coordination.messages import Comparison, Message, compare, misheard
from benchmarks.coordination.report import Spoken
from benchmarks.coordination.restart import CoordinationRestartBench, run_coordination_restart, verdict
from benchmarks.coordination.restart_report import (
    AFTER,
    BEFORE,
    FIRST,
    PHASES,
    REST,
    Endured,
    Restart,
    measurements,
    restarts_table,
    turns_table,
)
from benchmarks.coordination.talk import Following, Kill, Talk
from rekindle.config import Settings
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import Client, ServerProcess
from tests.lab.bench.durable import until_durable

SAID = [
    Message(0, "Host", "Talk."),
    Message(1, "Ada", "Tea.", 1),
    Message(2, "Ben", "Milk.", 2),
    Message(3, "Ada", "Tea.", 3),
    Message(4, "Ben", "", 4),
]
WHOLE = Comparison(5, 5, (), (), ())


def test_what_was_told_and_is_there_is_kept() -> None:
    assert compare(SAID, SAID) == WHOLE and WHOLE.is_whole
    assert compare(SAID, [*SAID, Message(5, "Ada", "More.", 5)]) == WHOLE, "more may be said behind it"
    assert compare([], []).is_whole


def test_a_lost_message_is_seen() -> None:
    assert compare(SAID, SAID[:2] + SAID[3:]) == Comparison(5, 4, (2,), (), ())
    assert compare(SAID, []) == Comparison(5, 0, (0, 1, 2, 3, 4), (), ())


@pytest.mark.parametrize(
    "other", [Message(2, "Ben", "Mil", 2), Message(2, "Ada", "Milk.", 2), Message(2, "Ben", "Milk.", 7)]
)
def test_a_changed_message_is_seen(other: Message) -> None:
    assert compare(SAID, [*SAID[:2], other, *SAID[3:]]) == Comparison(5, 4, (), (2,), ())


@pytest.mark.parametrize(
    ("found", "doubled"),
    [
        ([*SAID, SAID[3]], (3,)),  # the same number again
        ([*SAID, Message(5, "Ben", "Yes.", 4)], (5,)),  # the same turn
        ([*SAID, Message(5, "Ben", "", 5)], (5,)),  # the same words, right behind
    ],
)
def test_a_doubled_message_is_seen(found: list[Message], doubled: tuple[int, ...]) -> None:
    assert compare(SAID, found) == Comparison(5, 5, (), (), doubled)


def test_a_message_that_is_told_again_is_doubled() -> None:
    assert compare([*SAID, SAID[2]], SAID) == Comparison(5, 5, (), (), (2,))
    assert compare([*SAID, Message(2, "Ben", "Water.", 2)], SAID).doubled == (2,), "whatever is told of it then"


def test_what_an_agent_heard_is_held_to_what_was_said() -> None:
    heard = SAID[:4]
    assert misheard("Ada", SAID, heard) is None, "silence reaches nobody"
    assert misheard("Ada", SAID, heard[:3]) == "Ada: message 3 not heard"
    assert misheard("Ada", SAID, [*heard, heard[2], heard[3]]) == "Ada: messages 2, 3 heard more than once"
    assert misheard("Ada", SAID, [replace(heard[0], text="Go."), *heard[1:]]) == (
        "Ada: message 0 heard with other words"
    )
    assert misheard("Ada", SAID, [*heard, Message(9, "Cleo", "I, too.", 9)]) == "Ada: message 9 heard but never sent"
    assert misheard("Ada", SAID, heard[::-1]) == "Ada: all messages heard, but not in order"


def turn(number: int, gap_ms: float | None, *, computed: int = 10, warm: int = 0) -> Spoken:
    return Spoken(
        number,
        "Ada",
        gap_ms,
        prompt_tokens=1000,
        reused_tokens=1000 - computed,
        taken_in_tokens=0,
        num_tokens=16,
        token_ms=4.0,
        timings={"load_ms": 2.0, "prefill_ms": 12.0},
        first_token_ms=20.0,
        warm_tokens=warm,
    )


RESUMED = (turn(1, None, computed=40, warm=960), turn(1, 25.0))
RESTART = Restart("Ben", 4, 3.5, 0.08, (turn(1, 21.0),), RESUMED, (turn(2, 22.0),), WHOLE)
DONE = Endured(OURS, (turn(0, 19.0), turn(0, 20.0)), (RESTART,), WHOLE, ())


def shown(*tables: object) -> str:
    console = Console(width=200, record=True, file=StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_turns_are_shown_by_phase() -> None:
    rows = {}
    for line in shown(turns_table(DONE)).splitlines():
        rows |= {phase: line.split(phase)[1].split() for phase in PHASES if line.startswith(f"  {phase}  ")}
    assert [rows[phase][0] for phase in PHASES] == ["3", "1", "1", "1"]
    assert rows[BEFORE][1:3] == ["20.0", "ms"], "the median gap, that of the broken round with it"
    assert rows[FIRST] == "1 80.0 ms 96.0% 96.0% 40 960 0 2.0 ms 12.0 ms".split()
    assert rows[REST][1:5] == ["25.0", "ms", "20.0", "ms"] and rows[AFTER][1:3] == ["22.0", "ms"]


def test_restarts_are_shown_and_measured() -> None:
    lines = [line.split() for line in shown(restarts_table(DONE)).splitlines() if "spoke" in line or "median" in line]
    assert lines[0] == "1 Ben spoke 3.50 s 3.58 s 80.0 ms 20.0 ms 5 5 0 0 0".split()
    assert lines[1][-5:] == ["5", "5", "0", "0", "0"]
    found = {each.measure: each for each in measurements(DONE)}
    assert found[f"first token, {FIRST}"].values == (80.0,), "as the client waited for it"
    assert found[f"first token of the turn alone, {FIRST}"].values == (20.0,)
    assert found["SIGKILL to first token"].values == (3.58,)
    assert found[f"from disk at a turn, {FIRST}"].values == (960.0,)
    assert found["messages lost"].values == (0.0, 0.0) and f"gap between speakers, {FIRST}" not in found


def test_the_verdict_names_what_is_wrong() -> None:
    assert [check.holds for check in DONE.checks()] == [True] * 4
    compared = Comparison(5, 3, (2,), (1,), ())
    wrong = replace(DONE, restarts=(replace(RESTART, compared=compared),), misheard=("Ada: message 2 not heard",))
    told: list[str] = []
    assert verdict([DONE], told.append) == 0 and all(line.startswith("holds  ours: ") for line in told)
    told.clear()
    assert verdict([wrong], told.append) == 1
    assert told == [
        "FAILS  ours: no message is lost, but message 2 after restart 1",
        "FAILS  ours: no message is changed, but message 1 after restart 1",
        "holds  ours: no message is doubled",
        "FAILS  ours: every agent heard each message once, in order; Ada: message 2 not heard",
    ]
    doubled = replace(DONE, compared=Comparison(5, 5, (), (), (3, 4)))
    assert verdict([DONE, doubled], told.append) == 1
    assert "FAILS  ours: no message is doubled, but messages 3, 4 at the end" in told


def test_a_turn_that_fails_ends_the_run() -> None:
    following = Following(0)
    with pytest.raises(RekindleError, match="round 1 could not be played"):
        following.take("turn_failed", {"turn": 1, "speaker": "Ada", "error": "too long"})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"agents": 1}, "--agents"),
        ({"agents": 31}, "--agents"),
        ({"rounds": 0}, "--rounds"),
        ({"restarts": 0}, "--restarts"),
        ({"history": -1}, "--history"),
        ({"tokens": 3}, "--tokens must be at least 4"),
        ({"arms": ("theirs",)}, "--arm must be all or some of ours, reuse off, not theirs"),
    ],
)
def test_what_cannot_be_played_is_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        CoordinationRestartBench(**wrong)


def test_arms_are_chosen() -> None:
    assert CoordinationRestartBench().chosen_arms() == [OURS, "reuse off"]
    assert CoordinationRestartBench(arms=("reuse off",)).chosen_arms() == ["reuse off"]


@pytest.mark.long
def test_a_killed_server_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Talk.round_until_killed

    def kill_behind_what_is_durable(talk: Talk, client: Client, server: ServerProcess) -> Kill:
        until_durable(client)  # KV of the rounds before; of the round that is broken nothing is waited for
        return kill(talk, client, server)

    monkeypatch.setattr(Talk, "round_until_killed", kill_behind_what_is_durable)
    out, written = tmp_path / "lines.jsonl", StringIO()
    settings = Settings.load({"threads": 1, "hot_bytes": "64MiB"})
    options = CoordinationRestartBench(agents=3, rounds=1, restarts=1, history=1500, tokens=60, arms=(OURS,), out=out)
    assert run_coordination_restart(settings, options, Console(file=written, width=160)) == 0
    told = written.getvalue()
    assert all(f"  {phase} " in told for phase in (BEFORE, FIRST, AFTER)) and "FAILS" not in told
    # The server goes on until the kill arrives: Ben may be done by then, and after Cleo the round has no rest.
    assert re.match("ours: restart 1 of 1, killed while (Ben|Cleo) spoke, ready after ", told)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert {(line["bench"], line["arm"]) for line in lines} == {("coordination-restart", OURS)}
    assert all(line["settings"]["agents"] == 3 and line["values"] and "commit" in line for line in lines)
    values = {line["measure"]: line["values"] for line in lines}
    assert values["messages received"][0] >= 1 + 3 + 1, "the host, a round, and who spoke before the one in the middle"
    assert values["messages found"] == values["messages received"] and values["messages received"][1] == 1 + 3 * 3
    for what in ("lost", "changed", "doubled"):
        assert values[f"messages {what}"] == [0.0, 0.0]
    assert values["agents that heard wrongly"] == [0.0]
    assert values[f"reused share of a turn's prompt, {FIRST}"][0] >= 0.9
    assert values[f"from disk at a turn, {FIRST}"][0] > 0
    assert values["SIGKILL to first token"][0] > values["SIGKILL to ready"][0] > 0
    assert len(values[f"computed at a turn, {AFTER}"]) == 3
