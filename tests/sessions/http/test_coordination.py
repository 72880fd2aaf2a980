"""Sessions over HTTP: begun, shown, spoken in, told things, forked, deleted, and what is refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.server.conftest import Served
from tests.sessions.http.coordinating import NAMES, SESSIONS, SHORT, Session, create


def test_a_session_is_shown_listed_and_deleted(served: Served) -> None:
    agents = [{"name": "Ada", "role": "cook", "persona": "Shy."}, {"name": "Bo", "agent": "crew/bo"}]
    body = {"agents": agents, "title": "Dinner", "setting": "A kitchen.", "topology": "turn_by_turn"}
    made = served.send("POST", SESSIONS, body)
    assert made.status == 200
    made_id = made.json["id"]
    assert made_id.startswith("sess_")
    assert (made.json["title"], made.json["topology"], made.json["names"]) == ("Dinner", "turn_by_turn", ["Ada", "Bo"])
    assert [(each["agent"], each["is_permanent"]) for each in made.json["agents"]] == [
        (f"{made_id}/Ada", False),
        ("crew/bo", True),
    ]
    assert made.json["layout"]["extends"] is True
    session = Session(served, made_id)
    assert session.get()["plan"] == made.json["plan"]
    again = served.send("POST", SESSIONS, made.json["plan"]).json
    assert again["plan"] == made.json["plan"], "a plan can be sent back"
    listed = [each["id"] for each in served.send("GET", SESSIONS).json["data"]]
    assert listed.index(again["id"]) < listed.index(made_id), "the newest first"
    assert "Shy." not in served.send("GET", SESSIONS).body.decode()
    for each in (made_id, again["id"]):
        gone = served.send("DELETE", f"{SESSIONS}/{each}")
        assert gone.json == {"id": each, "object": "coordination.session", "deleted": True}
        assert served.send("GET", f"{SESSIONS}/{each}").status == 404
    assert not {made_id, again["id"]} & {each["id"] for each in served.send("GET", SESSIONS).json["data"]}


def test_turns_and_rounds_are_answered_whole(served: Served) -> None:
    session = create(served, setting="A harbour.", opening="Where do we moor?")
    run = session.post("/turn")
    (turn,) = run["turns"]
    assert (turn["speaker"], turn["to"], turn["cut"]) == ("Ada", None, False)
    assert turn["rekindle"]["prompt_tokens"] > 0
    assert 1 <= turn["num_tokens"] <= SHORT["max_tokens"]
    assert run["error"] is None and run["decision"] is None and run["session"] == session.id
    run = session.post("/round")
    assert [each["speaker"] for each in run["turns"]] == ["Bo", "Cy", "Ada"]
    (figures,) = run["rounds"]
    assert figures["num_turns"] == 3
    assert figures["reused_share"] == pytest.approx(figures["reused_tokens"] / figures["prompt_tokens"], abs=1e-3)
    assert all(each["gap_ms"] is not None for each in run["turns"][1:])
    again = run["turns"][2]["rekindle"]
    assert again["outcome"] == "extend" and again["reused_tokens"] > turn["rekindle"]["prompt_tokens"]
    shown = session.get()
    assert (shown["num_rounds"], shown["num_turns"], shown["is_unfinished"]) == (2, 4, False)
    assert shown["expected"] == ["Bo"]
    assert {each["name"]: each["num_tokens"] is not None for each in shown["agents"]} == dict.fromkeys(NAMES, True)


def test_turns_are_followed_like_requests(served: Served) -> None:
    session = create(served)
    run = session.post("/round")
    agent = next(each["agent"] for each in session.get()["agents"] if each["name"] == "Bo")
    (entry,) = served.send("GET", f"/v1/agents/{quote(agent, safe='')}/why").json["data"]
    turn = next(each for each in run["turns"] if each["speaker"] == "Bo")
    assert entry["endpoint"] == SESSIONS and entry["error"] is None
    assert {name: entry[name] for name in ("outcome", "reused_tokens", "prompt_tokens")} == {
        name: turn["rekindle"][name] for name in ("outcome", "reused_tokens", "prompt_tokens")
    }


def test_who_speaks_to_whom_and_how_can_be_said(served: Served) -> None:
    session = create(served)
    (turn,) = session.post("/turn", {"speaker": "Cy", "to": "Ada", "sampling": {"max_tokens": 2, "temperature": 0}})[
        "turns"
    ]
    assert (turn["speaker"], turn["to"]) == ("Cy", ["Ada"])
    assert turn["num_tokens"] <= 2
    run = session.post("/round", {"speakers": ["Bo", "Ada"], "to": ["Cy", "Ada"]})
    assert [(each["speaker"], each["to"]) for each in run["turns"]] == [(name, ["Cy", "Ada"]) for name in ("Bo", "Ada")]
    heard = {name: {each["number"] for each in session.get(f"/messages?hears={name}")["data"]} for name in NAMES}
    assert turn["number"] in heard["Ada"] and turn["number"] in heard["Cy"] and turn["number"] not in heard["Bo"]


def test_a_vote(served: Served) -> None:
    session = create(served)
    run = session.post("/vote", {"question": "Tea or coffee?", "options": ["tea", "coffee"], "voters": ["Ada", "Cy"]})
    assert [each["speaker"] for each in run["turns"]] == ["Ada", "Cy"]
    assert {each["purpose"] for each in run["turns"]} == {"ballot"}
    assert run["decision"]["question"]["options"] == ["tea", "coffee"]
    assert len(run["decision"]["ballots"]) == 2
    assert session.get()["decisions"] == [run["decision"]]
    assert [each["utterance"]["by"] for each in run["messages"]] == ["Host", "Host"], "asked, and announced"


def test_words_are_put_in(served: Served) -> None:
    session = create(served)
    told = session.post("/messages", {"text": "It rains."})
    assert told == {
        "number": 1,
        "by": "Host",
        "text": "It rains.",
        "to": None,
        "turn": None,
        "purpose": "speak",
        "cut": False,
    }
    assert session.post("/messages", {"text": "I am late.", "from": "Zoe", "to": ["Ada", "Bo"]})["by"] == "Zoe"
    assert session.post("/whisper", {"text": "A secret.", "from": "Zoe", "to": "Cy"})["to"] == ["Cy"]
    assert session.texts("?after=0") == ["It rains.", "I am late.", "A secret."]
    assert session.texts("?after=2") == ["A secret."]
    assert session.texts("?hears=Ada&after=0") == ["It rains.", "I am late."]
    assert session.texts("?hears=Cy&after=0") == ["It rains.", "A secret."]
    assert len(session.texts()) == 4, "the opening is said, too"


def test_agents_are_forked_rewound_merged_and_compared(served: Served) -> None:
    session = create(served)
    session.post("/round")
    shown = session.post("/agents/Ada/fork", {"target": "Ada no"})
    assert shown["names"] == [*NAMES, "Ada no"]
    (turn,) = session.post("/turn", {"speaker": "Ada no"})["turns"]
    assert turn["rekindle"]["reused_tokens"] > 0, "what was forked is reused"
    (again,) = session.post("/turn", {"speaker": "Bo"})["turns"]
    session.post("/agents/Ada%20no/rewind", {"turns": 1})
    assert again["number"] in {each["number"] for each in session.get("/messages?hears=Cy")["data"]}
    session.post("/whisper", {"text": "A secret.", "to": "Bo"})
    session.post("/agents/Cy/merge", {"source": "Bo"})
    compared = session.get("/compare?agents=Ada,Ada%20no")
    assert compared["agents"] == ["Ada", "Ada no"]
    assert 0 < compared["shared_tokens"] <= min(compared["num_tokens"].values())


def test_a_name_is_percent_encoded(served: Served) -> None:
    session = create(served, "é/ü", "100%")
    assert session.post("/agents/%C3%A9%2F%C3%BC/fork", {"target": "a/b"})["names"] == ["é/ü", "100%", "a/b"]
    assert session.send("POST", "/agents/100%25/rewind").status == 400, "it has not spoken yet"
    agents = [each["agent"] for each in session.get()["agents"]]
    session.post("/round")
    for agent in agents:
        assert served.engine.agent(agent).info().num_tokens > 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/turn", {"speaker": "Zoe"}, 404, None),
        ("POST", "/turn", {"speaker": ""}, 400, "speaker"),
        ("POST", "/turn", {"agent": "Ada"}, 400, "agent"),
        ("POST", "/turn", {"sampling": {"top_p": 2}}, 400, "sampling.top_p"),
        ("POST", "/turn", {"sampling": {"n": 2}}, 400, "sampling.n"),
        ("POST", "/turn/stream", {"speaker": "Zoe"}, 404, None),
        ("POST", "/turn/stream", {"to": ["Zoe"]}, 404, None),
        ("POST", "/round", {"speakers": []}, 400, "speakers"),
        ("POST", "/round", {"speakers": ["Ada", "Zoe"]}, 404, None),
        ("POST", "/round/stream", {"speakers": ["Zoe"]}, 404, None),
        ("POST", "/vote", {"question": "Tea?", "options": ["yes"]}, 400, "options"),
        ("POST", "/vote", {"question": " ", "options": ["yes", "no"]}, 400, "question"),
        ("POST", "/vote", {"options": ["yes", "no"]}, 400, "question"),
        ("POST", "/vote/stream", {"question": "Tea?", "options": ["yes", "no"], "voters": ["Zoe"]}, 404, None),
        ("POST", "/vote", None, 400, "question"),
        ("POST", "/messages", {"text": " "}, 400, "text"),
        ("POST", "/messages", {"text": "Hi", "to": "Zoe"}, 404, None),
        ("POST", "/messages", {"text": "Hi", "from": " "}, 400, "from"),
        ("POST", "/whisper", {"text": "Hi"}, 400, "to"),
        ("POST", "/interrupt", {"text": "Hi", "stop": "all"}, 400, "stop"),
        ("GET", "/messages?hears=Zoe", None, 404, None),
        ("GET", "/messages?after=x", None, 400, "after"),
        ("GET", "/compare", None, 400, "agents"),
        ("GET", "/compare?agents=Ada,Zoe", None, 404, None),
        ("GET", "/compare?agents=Ada", None, 400, "agents"),
        ("POST", "/agents/Zoe/fork", {"target": "Yve"}, 404, None),
        ("POST", "/agents/Ada/fork", {"target": "Bo"}, 400, None),
        ("POST", "/agents/Ada/rewind", {"turns": 0}, 400, "turns"),
        ("POST", "/agents/Ada/rewind", None, 400, "turns"),
        ("POST", "/agents/Ada/merge", {"source": "Ada"}, 400, "source"),
        ("POST", "/agents/%FF/rewind", None, 400, "name"),
    ],
)
def test_what_is_refused(served: Served, method: str, path: str, body: Any, status: int, param: str | None) -> None:
    session = create(served)
    answer = session.send(method, path, body)
    assert answer.status == status, answer.body
    assert answer.error["message"]
    if param is not None:
        assert answer.error["param"] == param
    assert session.texts()[1:] == [], "nothing was said"
    assert session.get()["num_turns"] == 0
    served.send("DELETE", f"{SESSIONS}/{session.id}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "agents"),
        ([], None),
        ({"agents": [{"name": "Ada"}]}, "agents"),
        ({"agents": [{"name": f"a{number}"} for number in range(31)]}, "agents"),
        ({"agents": [{"name": "Ada"}, {"name": "ADA"}]}, "agents[1].name"),
        ({"agents": [{"name": "Ada"}, {"name": 3}]}, "agents.1.name"),
        ({"agents": [{"name": "Ada"}, {"name": "\ud800"}]}, "agents.1.name"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo"}], "topology": "ring"}, "topology"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo"}], "topology": "moderated"}, "moderator"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo"}], "id": "mine"}, "id"),
        ({"agents": [{"name": "Ada"}, {"name": "Bo"}], "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ],
)
def test_what_no_session_can_be(served: Served, body: Any, param: str | None) -> None:
    num_before = len(served.send("GET", SESSIONS).json["data"])
    answer = served.send("POST", SESSIONS, body)
    assert answer.status == 400
    if param is not None:
        assert answer.error["param"] == param
    assert len(served.send("GET", SESSIONS).json["data"]) == num_before


def test_an_agent_of_a_session_is_nobody_elses_identity(served: Served) -> None:
    session = create(served)
    agents = [{"name": "Ada"}, {"name": "Bo", "agent": f"{session.id}/Bo"}]
    answer = served.send("POST", SESSIONS, {"agents": agents})
    assert (answer.status, answer.error["param"]) == (400, "agents[1].agent")


def test_a_session_that_is_not_there(served: Served) -> None:
    ask = {"question": "Tea?", "options": ["yes", "no"]}
    for method, path, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/turn", None),
        ("POST", "/turn/stream", None),
        ("POST", "/round", None),
        ("POST", "/round/stream", None),
        ("POST", "/vote", ask),
        ("POST", "/vote/stream", ask),
        ("POST", "/messages", {"text": "Hi"}),
        ("POST", "/whisper", {"text": "Hi", "to": "Ada"}),
        ("POST", "/interrupt", {"text": "Hi"}),
        ("GET", "/messages", None),
        ("GET", "/events", None),
        ("POST", "/agents/Ada/fork", {"target": "Bo"}),
        ("POST", "/agents/Ada/rewind", None),
        ("POST", "/agents/Ada/merge", {"source": "Bo"}),
        ("GET", "/compare?agents=Ada,Bo", None),
    ):
        answer = served.send(method, f"{SESSIONS}/sess_0{path}", body)
        assert (answer.status, answer.error["code"]) == (404, "not_found"), f"{method} {path}"


def test_what_cannot_fit_the_context_is_refused_when_it_comes(served: Served) -> None:
    session, long = create(served), "word " * 40_000
    for path, body in {
        "/messages": {"text": long},
        "/interrupt": {"text": long},
        "/agents/Ada/fork": {"target": "Ida", "persona": long},
        "/vote": {"question": long, "options": ["a", "b"]},
    }.items():
        answer = served.send("POST", f"{SESSIONS}/{session.id}{path}", body)
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded", (path, answer.body)
    for name in ("setting", "opening"):
        answer = served.send("POST", SESSIONS, {"agents": [{"name": "Ada"}, {"name": "Bo"}], name: long})
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded", (name, answer.body)
    assert session.texts() == ["Let us begin."] and session.get()["names"] == list(NAMES), "and nothing has changed"


def test_half_an_emoji_is_replaced_in_what_a_session_is_told(served: Served) -> None:
    session = create(served, setting="A harbour \ud83d.")
    session.post("/messages", {"text": "Look \ud83d and \ufdd0!"})
    assert session.texts()[-1] == "Look \ufffd and \ufffd!" and session.get()["plan"]["setting"] == "A harbour \ufffd."
