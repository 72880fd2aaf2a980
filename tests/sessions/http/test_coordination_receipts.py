"""Receipts of turns: named where a turn ends and is listed, found under that id, deleted with their session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rekindle.engine.types import Delta, FinishReason, Report, Timings
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId
from rekindle.text.messages import Message
from rekindle_sessions.http.observed import Figures, observed
from rekindle_sessions.machine.types import Turn
from rekindle_sessions.service.events import SessionEvent, Spoken, of_start
from tests.server.conftest import Answer, Served
from tests.sessions.http.coordinating import Event, Session, create
from tests.sessions.http.test_coordination_kept import TENANTS, running
from tests.sessions.http.test_coordination_streams import LONG, until


def asked(session: Session, id: str, key: str | None = None) -> Answer:
    return session.served.send("GET", f"/v1/receipts/{id}", key=key or session.key)


def receipt(session: Session, turn: dict[str, Any]) -> dict[str, Any]:
    """The receipt that a turn names; it says of the turn what its report says."""
    answer = asked(session, turn["receipt"])
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    report = turn["rekindle"]
    assert choice["read"]["tokens"] == report["reused_tokens"] and choice["prompt_tokens"] == report["prompt_tokens"]
    assert choice["computed"]["reply"] == turn["num_tokens"]
    agents = {each["name"]: each["agent"] for each in session.get()["agents"]}
    assert answer.json["agent"] == agents[turn["speaker"]]
    found: dict[str, Any] = answer.json
    return found


def ended(told: list[Event]) -> list[dict[str, Any]]:
    return [data for kind, data in told if kind == "turn_complete"]


def test_each_turn_has_a_receipt_however_it_is_played(served: Served) -> None:
    session = create(served, topology="broadcast")
    turns = session.post("/turn")["turns"]
    with session.stream("GET", "/events") as watched:
        turns += ended(session.run("/round"))
        seen = [until(watched, "turn_complete")["receipt"] for _ in range(3)]
    assert seen == [each["receipt"] for each in turns[1:]], "watchers are given the same ids"
    asks = {"question": "Tea or coffee?", "options": ["tea", "coffee"], "voters": ["Ada", "Bo"]}
    turns += session.post("/vote", asks)["turns"]
    for turn in turns:
        assert receipt(session, turn)["endpoint"] == "/v1/coordination/sessions"
    assert len({each["receipt"] for each in turns}) == len(turns) == 6
    with session.stream("POST", "/turn/stream", {"sampling": LONG}) as told:
        until(told, "token")
        session.post("/interrupt", {"text": "Quiet, please."})
        turns.append(until(told, "turn_complete"))
    assert receipt(session, turns[-1])["choices"][0]["finish_reason"] == "cancelled"
    listed = session.get("/messages")["data"]
    assert [each["receipt"] for each in listed if each["turn"]] == [each["receipt"] for each in turns]
    assert {each["receipt"] for each in listed if each["turn"] is None} == {None}, "what the host says is not generated"


def test_turns_of_another_server_name_no_receipt(tmp_path: Path) -> None:
    def listed(served: Served) -> list[tuple[int | None, str | None]]:
        return [(each["turn"], each["receipt"]) for each in Session(served, "moor").get("/messages")["data"]]

    with running(tmp_path) as served:
        past = create(served, "Ada", "Bo", topology="broadcast")
        past.post("/round")
        document = past.get("/export")
        cut = {**document, "events": [each for each in document["events"] if each["body"].get("turn") != 1]}
        answer = served.send("POST", "/v1/coordination/sessions/import", {"session": cut, "id": "moor"})
        assert answer.status == 200, answer.body
        session = Session(served, "moor")
        assert [receipt(session, turn)["id"] for turn in session.post("/round")["turns"]] == ["moor.1"]
        (turn,) = session.post("/turn")["turns"]
        assert turn["receipt"] == "moor.3"
        assert [each for each in listed(served) if each[0]] == [(1, "moor.1"), (2, None), (3, "moor.3")]
        before = listed(served)
    with running(tmp_path) as served:
        assert listed(served) == before


def test_receipts_are_in_one_namespace_and_go_with_their_session(tmp_path: Path) -> None:
    with running(tmp_path, TENANTS) as served:
        session = create(
            served, "Ada", "Bo", key="key-l", agents=[{"name": "Ada", "agent": "crew/ada"}, {"name": "Bo"}]
        )
        other = create(served, "Ada", "Bo", key="key-l")
        ids = [turn["receipt"] for turn in session.post("/round")["turns"]]
        (kept,) = [turn["receipt"] for turn in other.post("/turn")["turns"]]
        assert asked(session, ids[0], "key-r").status == 404
        assert served.app.responses.flush() and (tmp_path / "responses.db").is_file()
        ids += [turn["receipt"] for turn in session.post("/turn")["turns"]]
        assert [asked(session, each).status for each in ids] == [200] * 3
        assert session.send("DELETE").status == 200
        assert [asked(session, each).status for each in ids] == [404] * 3, "of permanent agents, too"
        assert asked(other, kept).status == 200
        assert served.send("DELETE", f"/v1/agents/{quote(f'{other.id}/Ada', safe='')}", key="key-l").status == 200
        assert asked(other, kept).status == 404, "a receipt goes with its agent"


class Ids:
    """An observer that notes under which ids turns were given out."""

    def __init__(self) -> None:
        self.seen: list[ReplyId | None] = []

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> Ids:
        return self

    def delta(self, choice: int, delta: Delta) -> None:
        raise AssertionError("turns are reported at their end")

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        self.seen.append(id)

    def failed(self, number: int | None, error: Exception) -> None:
        raise error


@pytest.mark.parametrize(("is_there", "seen"), [(True, [ReplyId("s.7", 0)]), (False, [None])])
def test_a_session_that_was_deleted_while_its_reader_slept_gets_no_receipt(
    is_there: bool, seen: list[ReplyId | None]
) -> None:
    turn, ids = Turn(7, "Ada"), Ids()
    report = Report("miss", None, 0, 3, 0, 0, 0, 3, 2, "canonical", Timings(0, 0, 0, 0, 0), None)
    data = {"turn": 7, "text": "", "rekindle": None, "gap_ms": None, "first_token_ms": None, "taken_in_tokens": 0}

    async def run() -> AsyncGenerator[SessionEvent, None]:
        yield of_start(turn, "s/Ada")
        yield SessionEvent("turn_complete", data, Spoken("s/Ada", 3, report, "stop"))

    async def follow() -> None:
        async for _ in observed(run(), ids, Figures(), "default", "s", is_there=lambda: is_there):
            pass

    asyncio.run(follow())
    assert ids.seen == seen
