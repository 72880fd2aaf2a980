"""The made-up day: the same for a seed, within its context, with everything a day should have."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import ConfigError
from rekindle.server.dayfile import Day, RecordedRequest, read_day
from rekindle.text.messages import normalise_messages
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.replay.day import SCALES, SHARES, DayPlan, make_day, parts_of, write_day
from rekindle_lab.bench.replay.day_sessions import MAX_TOKENS
from rekindle_pocket import MODEL_DIR

LONGEST_REPLY = " 7" * (MAX_TOKENS // 2)  # two tokens each


@pytest.fixture(scope="module")
def day() -> Day:
    return make_day(DayPlan(seed=7))


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder.from_dir(MODEL_DIR)


def num_tokens(encoder: PromptEncoder, request: RecordedRequest) -> int:
    """With every reply in the prompt at its longest, and room for one more."""
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        is_text = message["role"] == "assistant" and not message.get("tool_calls")
        messages.append({**message, "content": LONGEST_REPLY} if is_text else message)
    prompt = encoder.render_chat(normalise_messages(messages), tools=request.body.get("tools"))
    return len(encoder.encode(prompt)) + request.body["max_tokens"]


def test_the_same_seed_gives_the_same_file(tmp_path: Path, day: Day) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_day(tmp_path / name, make_day(DayPlan(seed=seed)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    read = read_day(tmp_path / "a")
    assert [replace(item, id="") for item in read.requests] == list(day.requests)
    assert (read.header, read.events) == (day.header, day.events)


@pytest.mark.parametrize("plan", [DayPlan(seed=7), DayPlan(seed=1, context=2048), DayPlan(seed=3, context=3000)])
def test_every_prompt_fits_whatever_the_replies(encoder: PromptEncoder, plan: DayPlan) -> None:
    context = plan.context or SCALES[plan.scale].context
    sizes = [num_tokens(encoder, request) for request in make_day(plan).requests]
    assert max(sizes) <= context
    assert max(sizes) > 0.6 * context, "the day leaves too much of the context empty"


def test_a_full_day_has_dozens_of_turns_and_fits(encoder: PromptEncoder) -> None:
    day = make_day(DayPlan(scale="full"))
    desks = [request for request in day.requests if request.agent == "desk-1"]
    assert len(desks) >= 48
    assert num_tokens(encoder, desks[-1]) <= SCALES["full"].context


def test_it_has_every_ingredient(day: Day) -> None:
    assert [event.kind for event in day.events] == ["pause", "kill", "restart"]
    agents = {request.agent or "" for request in day.requests}
    assert {"desk-1", "desk-2", "desk-3", "chat-1", "chat-2"} < agents
    assert len([agent for agent in agents if agent.startswith("talk/")]) == 4
    for number in (1, 2, 3):
        helpers = [request for request in day.requests if (request.agent or "").startswith(f"desk-{number}/helper")]
        own = next(request for request in day.requests if request.agent == f"desk-{number}")
        assert helpers and helpers[0].session == own.session
        assert helpers[0].body["tools"] == own.body["tools"]
    assert len(day.requests) <= 150
    calls = {call["function"]["name"] for r in day.requests for call in (r.answer or {}).get("tool_calls", ())}
    assert calls == {"add", "report", "delegate"}


def test_the_desks_share_their_system_prompt_and_its_date_changes_at_midnight(day: Day) -> None:
    midnight = day.header.about["midnight_s"]
    desks = [request for request in day.requests if request.session.startswith("desk")]
    before = {r.messages[0]["content"] for r in desks if r.at_s < midnight}
    after = {r.messages[0]["content"] for r in desks if r.at_s >= midnight}
    (evening,), (morning,) = before, after
    assert "Friday, 20 November 2026" in evening
    assert evening.replace("Friday, 20 November", "Saturday, 21 November") == morning


def test_every_session_speaks_in_every_part_of_the_day(day: Day) -> None:
    bounds = [0.0, *(event.at_s for event in day.events), float("inf")]
    for session in {request.session for request in day.requests}:
        times = [request.at_s for request in day.requests if request.session == session]
        assert all(any(a <= at < b for at in times) for a, b in pairwise(bounds)), session
        assert times == sorted(times)


def test_a_turn_extends_the_one_before(day: Day) -> None:
    last: dict[str, list[Any]] = {}
    for request in day.requests:
        rest, agent = request.messages[1:], request.agent or ""
        before = last.get(agent, [])
        assert rest[: len(before)] == before
        last[agent] = [*rest, request.answer]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 40])
def test_no_turn_is_lost_between_the_parts(count: int) -> None:
    turns: list[Any] = [[number] for number in range(count)]
    parts = parts_of(turns)
    assert [turn for part in parts for turn in part] == turns
    assert len(parts) == len(SHARES)
    assert count < len(SHARES) or all(parts)


@pytest.mark.parametrize("given", [{"scale": "huge"}, {"context": 100}])
def test_what_cannot_be_made_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DayPlan(**given)
