"""Runs of sessions followed as they happen: events in order, watchers, interruptions, and clients that hang up."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from rekindle.server.answers.sse import EventStream
from rekindle.server.gate.limits import ShutdownGate
from rekindle_sessions.http.streaming import MOST_AHEAD, StreamSettings, listened, streamed
from rekindle_sessions.service.events import SessionEvent
from tests.server.conftest import Served
from tests.sessions.http.coordinating import NAMES, SESSIONS, Event, create

# Nobody waits for its end: it is cut, or left, long before.
LONG = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True, "min_tokens": 2000}


def kinds(told: list[Event]) -> list[str]:
    """Without tokens, whose number the model decides."""
    return [kind for kind, _ in told if kind != "token"]


def until(told: Iterator[Event], kind: str) -> dict[str, Any]:
    """The data of the next event of a kind."""
    return next(data for each, data in told if each == kind)


def test_a_round_is_told_as_it_happens(served: Served) -> None:
    session = create(served)
    told = session.run("/round")
    assert kinds(told) == ["turn_start", "turn_complete"] * 3 + ["round_complete"] or "token" in dict(told)
    started = [data for kind, data in told if kind == "turn_start"]
    complete = [data for kind, data in told if kind == "turn_complete"]
    assert [each["speaker"] for each in started] == [each["speaker"] for each in complete] == list(NAMES)
    for turn in complete:
        at = told.index(("turn_complete", turn))
        tokens = [data["text"] for kind, data in told[:at] if kind == "token" and data["turn"] == turn["turn"]]
        assert "".join(tokens).strip().startswith(turn["text"])
        assert told.index(("turn_start", started[complete.index(turn)])) < at
    assert told[-1][0] == "round_complete"
    assert told[-1][1]["num_turns"] == 3
    assert session.texts("?after=0") == [each["text"] for each in complete]


def test_a_turn_and_a_vote_are_told_as_they_happen(served: Served) -> None:
    session = create(served)
    assert [data["speaker"] for kind, data in session.run("/turn", {"speaker": "Bo"}) if kind == "turn_complete"] == [
        "Bo"
    ]
    told = session.run("/vote", {"question": "Tea or coffee?", "options": ["tea", "coffee"]})
    assert kinds(told)[0] == "message"
    decision = dict(told)["decision"]
    assert session.get()["decisions"] == [decision]
    assert kinds(told).count("turn_complete") == 3


@pytest.mark.parametrize("topology", ["turn_by_turn", "broadcast", "moderated", "whisper"])
def test_every_topology_plays_a_round(served: Served, topology: str) -> None:
    moderator = {"moderator": "Cy"} if topology == "moderated" else {}
    session = create(served, topology=topology, **moderator)
    told = session.run("/round")
    complete = [data for kind, data in told if kind == "turn_complete" and data["purpose"] == "speak"]
    assert told[-1][0] == "round_complete"
    if topology == "moderated":
        assert len(complete) == 2 and {each["speaker"] for each in complete} <= {"Ada", "Bo"}
    else:
        assert [each["speaker"] for each in complete] == list(NAMES)
    if topology == "whisper":
        assert [each["to"] for each in complete] == [["Bo"], ["Cy"], ["Ada"]]
        assert len(session.texts("?hears=Ada&after=0")) == 2
    if topology == "broadcast":
        assert kinds(told)[:3] == ["turn_start"] * 3


def test_watchers_are_told_what_others_have_happen(served: Served) -> None:
    session = create(served)
    with session.stream("GET", "/events") as first, session.stream("GET", "/events") as second:
        run = session.run("/turn")
        session.post("/messages", {"text": "It rains."})
        for watcher in (first, second):
            seen = [next(watcher) for _ in run]
            assert seen == run
            assert until(watcher, "message")["utterance"]["text"] == "It rains."
        served.send("DELETE", f"{SESSIONS}/{session.id}")
        assert list(first) == list(second) == [], "the session is gone, and so the streams end"


@pytest.mark.parametrize("path", ["/turn", "/round"])
def test_who_hangs_up_ends_the_run_and_it_can_be_gone_on_with(served: Served, path: str) -> None:
    session = create(served)
    with session.stream("POST", f"{path}/stream", {"sampling": LONG}) as told:
        until(told, "token")
        assert session.send("POST", "/turn").status == 409, "one run at a time"
        running = session.get()["running"]
        assert [each["speaker"] for each in running] == ["Ada"]
    wait_for(lambda: session.get()["running"] == [])
    left = session.get()
    assert (left["is_unfinished"], left["num_turns"], left["num_messages"]) == (True, 1 if path == "/turn" else 3, 1)
    assert session.send("POST", "/round", {"speakers": ["Bo"]}).status == 409, "first goes on what was begun"
    told_again = session.run(path)
    speakers = [data["speaker"] for kind, data in told_again if kind == "turn_complete"]
    assert speakers == (["Ada"] if path == "/turn" else list(NAMES))
    assert session.get()["is_unfinished"] is False
    assert len(session.texts("?after=0")) == len(speakers), "nothing was said twice"


def test_who_hangs_up_without_a_stream_ends_the_run(served: Served) -> None:
    session = create(served)
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request("POST", f"{SESSIONS}/{session.id}/turn", body=json.dumps({"sampling": LONG}))
        wait_for(lambda: session.get()["running"] != [])
    wait_for(lambda: session.get()["running"] == [])
    left = session.get()
    assert (left["is_unfinished"], left["num_turns"], left["num_messages"]) == (True, 1, 1)


def test_an_interruption_ends_a_turn_or_all_of_the_round(served: Served) -> None:
    session = create(served)
    with session.stream("POST", "/round/stream", {"sampling": LONG}) as told:
        until(told, "token")
        session.post("/interrupt", {"text": "Quiet, please."})
        cut = until(told, "turn_complete")
        assert (cut["speaker"], cut["cut"]) == ("Ada", True)
        assert cut["num_tokens"] < LONG["max_tokens"]
        assert until(told, "token")["speaker"] == "Bo"
        session.post("/interrupt", {"text": "Enough.", "stop": "round"})
        rest = list(told)
    assert not {"round_complete", "error"} & set(dict(rest))
    assert [data["speaker"] for kind, data in rest if kind == "turn_complete"] == ["Bo"], "what was said stands"
    assert session.get()["is_unfinished"] is False
    assert {"Quiet, please.", "Enough."} <= set(session.texts("?hears=Cy"))


def test_signs_of_life(served: Served) -> None:
    session = create(served)
    with session.stream("GET", "/events") as told:
        threading.Thread(target=session.post, args=("/messages", {"text": "Hi."})).start()
        assert until(told, "message")["utterance"]["by"] == "Host"
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request("GET", f"{SESSIONS}/{session.id}/events")
        response = connection.getresponse()
        assert response.readline() == b": waiting\n", "the head and a sign of life come at once"


@pytest.mark.parametrize("opened", [streamed, listened])
def test_a_slow_reader_is_waited_for_and_misses_nothing(opened: Callable[..., Awaitable[EventStream]]) -> None:
    """Events are taken out of a session no faster than they are read."""
    num_events, num_taken, most_ahead, sent = 10 * MOST_AHEAD, 0, 0, b""

    async def happening() -> AsyncGenerator[SessionEvent, None]:
        nonlocal num_taken
        for number in range(num_events):
            num_taken += 1
            yield SessionEvent("token", {"number": number})

    async def receive() -> Message:
        await asyncio.Event().wait()  # it stays connected
        raise AssertionError("nobody says anything")

    async def send(message: Message) -> None:
        nonlocal most_ahead, sent
        sent += message.get("body", b"")
        for _ in range(8):  # whoever takes events out has its turn, and again
            await asyncio.sleep(0)
        most_ahead = max(most_ahead, num_taken - sent.count(b"data: "))

    async def read() -> None:
        scope: Scope = {"type": "http"}
        stream = await opened(Request(scope, receive), happening(), StreamSettings(ShutdownGate(), 60.0))
        await stream(scope, receive, send)

    asyncio.run(read())
    assert most_ahead in range(MOST_AHEAD, MOST_AHEAD + 3)
    told = [json.loads(line.removeprefix(b"data: ")) for line in sent.splitlines() if line.startswith(b"data: ")]
    assert [each["number"] for each in told] == list(range(num_events))


def wait_for(holds: Callable[[], bool]) -> None:
    """Ask until it holds; the test's own time limit ends it otherwise."""
    while not holds():
        pass
