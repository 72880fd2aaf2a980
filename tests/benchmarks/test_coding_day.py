"""A coding agent's session over a real socket, on six chat templates: nearly all is known, all said as without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.coding_day.agent import Request, SessionPlan
from benchmarks.coding_day.bench import ARMS, CodingDayBench, replay, spread
from benchmarks.coding_day.client import Heard, Identity
from benchmarks.coding_day.report import Checked, Exchange, Replayed, measurements, share
from benchmarks.coding_day.templates import BEHAVIOURS, TEMPLATES, Behaviour, behaviour
from benchmarks.commands import app
from rekindle.config import Settings
from rekindle.errors import ConfigError

KNOWN = 0.95  # of all prompt tokens behind the session's first request, sub-agents included
# Files of tests run beside each other, and threads of two that wait for each other cost more than they compute.
SETTINGS = Settings.load({"threads": 1})


def of_agent(replayed: Replayed, who: str) -> list[Exchange]:
    return [each for each in replayed.exchanges if each.request.who == who]


LONG, SHORT = 40, 12  # turns
KNOWN_OF = {LONG: KNOWN, SHORT: 0.85}  # what sub-agents compute counts for more of a short session
DAYS = [pytest.param(each, LONG, marks=pytest.mark.long, id=each.name) for each in TEMPLATES]
SHORT_DAY = pytest.param(behaviour("append"), SHORT, id="append, short")


@pytest.mark.parametrize(("chosen", "turns"), [SHORT_DAY, *DAYS])
def test_a_day_stays_warm(chosen: Behaviour, turns: int) -> None:
    replayed = replay(chosen, "as served", SETTINGS, plan=SessionPlan(turns=turns, seed=0), checks=turns // 10)
    assert replayed.share >= KNOWN_OF[turns], [
        (e.request.who, e.request.turn, e.prompt_tokens, e.reused_tokens) for e in replayed.exchanges
    ]
    assert [each.exchange.request.turn for each in replayed.checked if not each.is_equal] == []
    assert replayed.num_wrong_usage == 0
    agents = {each.request.who for each in replayed.exchanges}
    assert len(of_agent(replayed, "main")) == turns and len(agents) == 4
    assert all(each.heard.calls or each.heard.text for each in replayed.exchanges)
    thoughts = [block for each in replayed.exchanges for block in each.heard.content if block["type"] == "thinking"]
    assert bool(thoughts) == chosen.thinking
    tools = {call["name"] for each in replayed.exchanges for call in each.heard.calls}
    assert tools == {"Read", "Grep", "Bash", "Edit"}
    # The fork of the conversation starts from it; midnight is named for what it is.
    assert share(of_agent(replayed, "helper-3")[:1]) > 0.9
    assert of_agent(replayed, "main")[turns // 2].cause == "date_line"


def of_client(name: str) -> Replayed:
    """Half as long a session with a client's habit, whose replies are as without reuse."""
    replayed = replay(behaviour(name), "as served", SETTINGS, plan=SessionPlan(turns=20), checks=2)
    assert replayed.num_equal == 2 and replayed.num_wrong_usage == 0
    return replayed


@pytest.mark.long
def test_a_changed_state_of_the_repository_leaves_the_tools_warm() -> None:
    replayed = of_client("git-status")
    resumed, (first, *later) = of_agent(replayed, "main")[6], of_agent(replayed, "main, again")
    assert len(later) == 7 and replayed.share >= 0.93
    for each in (resumed, first):
        assert each.reused_tokens > 4800, "all of the system text and the tools"
        assert [item["kind"] for item in each.heard.report["normalised"]] == ["attribution", "tail"]
    assert share([resumed]) > 0.9, "and the conversation, where the first state stays in its place"
    assert share(later) > 0.97


@pytest.mark.long
def test_a_conversation_goes_on_behind_pictures() -> None:
    replayed = of_client("image")
    (left_out,) = of_agent(replayed, "main")[-1].heard.report["left_out"]
    assert (left_out["kind"], left_out["text"][:7]) == ("image", "[image,") and left_out["count"] >= 3
    assert replayed.share >= KNOWN


@pytest.mark.long
def test_arguments_written_anew_cost_nothing() -> None:
    replayed = of_client("reserialised-arguments")
    assert replayed.share >= KNOWN
    assert {each.cause for each in of_agent(replayed, "main")[1:]} == {"", "date_line"}


@pytest.mark.long
def test_a_summary_is_asked_for_and_gone_on_from_without_computing_the_tools() -> None:
    replayed = of_client("compaction")
    summaries = of_agent(replayed, "main, summary")
    main = of_agent(replayed, "main")
    assert len(summaries) == 3 and share(summaries) > KNOWN
    firsts = [main[each.request.turn] for each in summaries]
    assert all(each.prompt_tokens < 5500 and share([each]) > KNOWN for each in firsts)
    assert replayed.share >= KNOWN


@pytest.mark.long
def test_without_normalising_nearly_nothing_is_known() -> None:
    plan = SessionPlan(turns=4)
    known = {
        arm: replay(behaviour("append"), arm, SETTINGS, plan=plan, checks=1) for arm in ("as served", "normalise off")
    }
    assert known["normalise off"].share < 0.5 < known["as served"].share
    assert all(each.num_equal == 1 for each in known.values())
    assert {each.cause for each in of_agent(known["normalise off"], "main")[1:2]} == {"attribution_header"}


@pytest.mark.long
def test_what_is_anticipated_is_not_computed_again() -> None:
    plan = SessionPlan(turns=6)
    on, off = (
        replay(behaviour("open-thinking"), arm, SETTINGS, plan=plan, checks=1)
        for arm in ("as served", "anticipate off")
    )
    assert on.anticipated_tokens > 0 == off.anticipated_tokens
    assert on.num_equal == off.num_equal == 1


def test_the_command_writes_a_log_and_lines(tmp_path: Path) -> None:
    log, out = tmp_path / "requests.jsonl", tmp_path / "bench.jsonl"
    given = ["--turns", "4", "--behaviour", "dated", "--checks", "1", "--log", str(log), "--out", str(out)]
    result = CliRunner(env={"COLUMNS": "220"}).invoke(app, ["coding-day", *given])
    assert result.exit_code == 0, result.output
    assert "dated, as served" in result.output and "1 of 1" in result.output and "adds up" in result.output
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["endpoint"] for line in lines} == {"/v1/messages"} and len(lines) > 4
    measured = {line["measure"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert len(measured["known of prompts"]["detail"]["turns"]) == len(lines)


@pytest.mark.parametrize("given", [{"behaviours": ("appendix",)}, {"arms": ("off",)}])
def test_unknown_names_are_refused_with_the_known_ones(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be all or some of"):
        CodingDayBench(SessionPlan(), **given)


def test_all_names_can_be_asked_for() -> None:
    options = CodingDayBench(SessionPlan(), behaviours=("all",), arms=("all",))
    assert options.chosen_behaviours() == list(BEHAVIOURS) and options.chosen_arms() == list(ARMS)
    assert CodingDayBench(SessionPlan(), behaviours=("dated", "append")).chosen_behaviours() == [
        behaviour("append"),
        behaviour("dated"),
    ]


def asked(prompt: int, reused: int, *, text: str = "Yes.", created: int = 0) -> Exchange:
    """A request with this outcome."""
    report = {
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "completion_tokens": 3,
        "outcome": "extend",
        "source": "own",
    }
    usage = {
        "input_tokens": prompt - reused - created,
        "cache_read_input_tokens": reused,
        "cache_creation_input_tokens": created,
        "output_tokens": 3,
    }
    heard = Heard([{"type": "text", "text": text}], "end_turn", usage, report, 0.1)
    return Exchange(Request("main", 1, {}, Identity("s"), SessionPlan().now(1)), heard, 0.0)


def test_the_share_leaves_out_the_first_request_and_nothing_else() -> None:
    replayed = Replayed("append", "as served", (asked(100, 0), asked(100, 90), asked(300, 290)), (), 0)
    assert replayed.share == 380 / 400
    assert next(measurements(replayed)).values == (380 / 400,)


def test_usage_adds_up_to_the_token_or_is_counted_as_wrong() -> None:
    good, lost = asked(100, 60, created=40), asked(100, 60)
    lost.heard.usage["input_tokens"] -= 1
    assert good.usage_adds_up() and not lost.usage_adds_up()
    assert Replayed("append", "as served", (good, lost), (), 0).num_wrong_usage == 1


def test_a_check_needs_the_same_words_computed_anew() -> None:
    known = asked(100, 60)
    assert Checked(known, asked(100, 0).heard).is_equal
    assert not Checked(known, asked(100, 0, text="No.").heard).is_equal
    assert not Checked(known, asked(100, 16).heard).is_equal
    assert not Checked(known, asked(101, 0).heard).is_equal


def test_checks_are_spread_over_the_session_and_end_with_its_last() -> None:
    all_of_it = [asked(number, 0) for number in range(1, 41)]
    assert [each.prompt_tokens for each in spread(all_of_it, 4)] == [10, 20, 30, 40]
    assert spread(all_of_it, 100) == all_of_it and spread(all_of_it, 0) == []
