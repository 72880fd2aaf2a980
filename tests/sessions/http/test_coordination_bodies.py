"""What bodies of sessions become, and what is refused of them before a session has seen it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from rekindle.errors import BadRequest
from rekindle.server.border import HttpError
from rekindle_sessions.http.bodies import (
    ImportBody,
    InterruptBody,
    MessageBody,
    SamplingOptions,
    SessionBody,
    VoteBody,
    WhisperBody,
    audience_of,
    plan_of,
    question_of,
    sampling_of,
)
from rekindle_sessions.http.described import as_body
from rekindle_sessions.http.observed import UNKNOWN, Figures
from rekindle_sessions.log.exported import ExportedSession
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.participants import check_plan
from rekindle_sessions.machine.types import Participant, Plan
from rekindle_sessions.service.events import SessionEvent

TWO: list[dict[str, Any]] = [{"name": "Ada"}, {"name": "Bo"}]


def plan(**fields: Any) -> Plan:
    made = plan_of(SessionBody.model_validate({"agents": TWO, **fields}))
    check_plan(made)
    return made


def test_a_body_of_names_is_a_plan() -> None:
    assert plan() == Plan((Participant("Ada"), Participant("Bo")))


def test_a_session_s_document_is_not_looked_at_on_the_event_loop() -> None:
    """Its values would be copied."""
    document = {"version": 1, "events": [{"kind": "Told", "body": {"by": "Host", "text": "a"}}]}
    assert ImportBody.model_validate({"session": document}).session["events"] is document["events"]


def test_a_version_is_quoted_as_far_as_it_is_short() -> None:
    with pytest.raises(BadRequest, match=r"of version 'xxx.*this Rekindle reads 1") as refused:
        ExportedSession.from_dict({"version": "x" * 1_000_000})
    assert len(str(refused.value)) < 1000


def test_a_plan_is_told_as_the_body_that_makes_it() -> None:
    body = {
        "agents": [{"name": "Ada", "persona": "Shy.", "role": "cook", "agent": "crew/ada"}, {"name": "Bo"}],
        "topology": "moderated",
        "title": "Dinner",
        "setting": "A kitchen.",
        "opening": "Hungry?",
        "host": "Chef",
        "moderator": "Bo",
        "sampling": {"temperature": 0, "stop": ["\n\n", "."], "max_tokens": 8},
        "listen": "later",
    }
    made = plan(**body)
    assert made.participants[0] == Participant("Ada", "Shy.", "cook", "crew/ada")
    assert dict(made.sampling) == {"temperature": 0, "stop": ("\n\n", "."), "max_tokens": 8}
    assert plan(**json.loads(json.dumps(as_body(made)))) == made


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"agents": TWO[:1]}, "agents"),
        ({"agents": []}, "agents"),
        ({"agents": [{"name": f"a{number}"} for number in range(31)]}, "agents"),
        ({"agents": [{"name": "Ada"}, {"name": "ada"}]}, "agents[1].name"),
        ({"agents": [{"name": "Ada"}, {"name": "Host"}]}, "agents[1].name"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo: yes"}]}, "agents[1].name"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo\u202e"}]}, "agents[1].name"),
        ({"agents": [{"name": "Ada", "agent": "a"}, {"name": "Bo", "agent": "a"}]}, "agents"),
        ({"agents": [{"name": "Ada", "agent": "a\x00"}, {"name": "Bo"}]}, "agents[0].agent"),
        ({"agents": [{"name": "Ada", "agent": "é" * 200}, {"name": "Bo"}]}, "agents[0].agent"),
        ({"host": "The\nhost"}, "host"),
        ({"topology": "moderated"}, "moderator"),
        ({"topology": "moderated", "moderator": "Cy"}, "moderator"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"stop": [""]}}, "sampling.stop"),
    ],
)
def test_what_no_session_can_be(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((BadRequest, HttpError)) as caught:
        plan(**fields)
    told = caught.value
    assert (told.problem.param if isinstance(told, HttpError) else told.param) == param


@pytest.mark.parametrize(
    "fields",
    [
        {"agents": [{"name": "x" * 65}, {"name": "Bo"}]},
        {"agents": [{"name": ""}, {"name": "Bo"}]},
        {"agents": [{"name": 7}, {"name": "Bo"}]},
        {"agents": [{"name": "Ada", "voice": "low"}, {"name": "Bo"}]},
        {"agents": None},
        {"topology": "ring"},
        {"title": "x" * 1001},
        {"listen": True},
        {"layout": "trailing_cue"},
        {"reuse": "off"},
        {"sampling": {"logprobs": 3}},
        {"sampling": {"max_tokens": "8"}},
        {"nonsense": 1},
    ],
)
def test_what_is_no_body_of_a_session(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SessionBody.model_validate({"agents": TWO, **fields})


def test_sampling_is_what_was_given() -> None:
    assert sampling_of(None) is None
    assert sampling_of(SamplingOptions()) == {}
    assert sampling_of(SamplingOptions(stop="x", seed=3)) == {"stop": ("x",), "seed": 3}


def vote(**fields: Any) -> Question | None:
    return question_of(VoteBody.model_validate(fields))


def test_a_vote_without_a_question_goes_on_with_one() -> None:
    assert vote() is None
    assert vote(sampling={"temperature": 0}) is None
    assert vote(mode=None) is None


def test_a_question() -> None:
    assert vote(question="Tea?", options=["yes", "no"]) == Question("Tea?", ("yes", "no"))
    asked = vote(
        question="Tea?",
        options=["yes", "no"],
        mode="consensus",
        threshold=0.75,
        max_rounds=2,
        is_open=True,
        voters=["Ada"],
    )
    assert asked == Question("Tea?", ("yes", "no"), "consensus", None, 2, 0.75, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": ["a", "b"]}, "question"),
        ({"voters": ["Ada"]}, "question"),
        ({"mode": "ranked"}, "question"),
        ({"question": "Tea?"}, "options"),
        ({"question": "Tea?", "options": ["yes"]}, "options"),
        ({"question": "Tea?", "options": ["yes", "Yes "]}, "options"),
        ({"question": " ", "options": ["yes", "no"]}, "text"),
        ({"question": "Tea?", "options": ["yes", "no"], "mode": "coordinator"}, "coordinator"),
        ({"question": "Tea?", "options": ["yes", "no"], "threshold": 0}, "threshold"),
    ],
)
def test_what_is_no_question(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        vote(**fields)
    assert caught.value.param == param


def test_words_are_said_by_and_to() -> None:
    told = MessageBody.model_validate({"text": "Hi", "from": "Zoe", "to": ["Ada", "Bo"]})
    assert (told.by, audience_of(told.to)) == ("Zoe", ("Ada", "Bo"))
    assert audience_of("Ada") == ("Ada",)
    assert audience_of(None) is None
    assert InterruptBody.model_validate({"text": "Stop"}).stop == "turn"
    with pytest.raises(ValidationError, match="to"):
        WhisperBody.model_validate({"text": "Hi"})
    with pytest.raises(ValidationError):
        MessageBody.model_validate({"text": "Hi", "by": "Zoe"})


def test_figures_are_kept_of_the_last_turns() -> None:
    figures = Figures(most=2)
    for turn in (1, 2, 3):
        data = {"turn": turn, "rekindle": {}, "gap_ms": None, "first_token_ms": 1.0 * turn, "taken_in_tokens": 0}
        figures.note("team", "s", SessionEvent("turn_complete", data))
    assert [figures.of("team", "s", turn)["first_token_ms"] for turn in (1, 2, 3)] == [None, 2.0, 3.0]
    assert figures.of("other", "s", 3) == figures.of("team", "s", None) == UNKNOWN
    figures.forget("team", "s")
    assert figures.of("team", "s", 3) == UNKNOWN
