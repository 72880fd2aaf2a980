"""The last requests of an agent: a few of them, for a bounded number of agents."""

from __future__ import annotations

from rekindle.engine.recent import MAX_ENTRIES
from rekindle.errors import BadRequest
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.history import History


def fail(history: History, caller: Caller, number: int) -> None:
    history.began(caller, "/v1/chat/completions", {}).failed(number, BadRequest("no"))


def test_requests_are_numbered_by_namespace() -> None:
    """The engine's own number says how many requests everybody has made."""
    history = History()
    for number in range(5):
        fail(history, Caller("left", "ada"), 1000 + number)
        fail(history, Caller("left", None), 1000 + number)
    fail(history, Caller("right", "bo"), 1031)
    assert [entry["request"] for entry in history.of("left", "ada")] == [9, 7, 5, 3, 1]
    assert [entry["request"] for entry in history.of("right", "bo")] == [1]


def test_the_newest_come_first_and_the_oldest_go() -> None:
    history = History(clock=lambda: 5.0)
    for number in range(MAX_ENTRIES + 3):
        fail(history, Caller("default", "ada"), number)
    entries = history.of("default", "ada")
    assert [entry["request"] for entry in entries] == list(range(MAX_ENTRIES + 3, 3, -1))
    assert entries[0]["at"] == 5.0


def test_agents_used_longest_ago_make_room() -> None:
    history = History(max_agents=2)
    for agent in ("a", "b", "a", "c"):
        fail(history, Caller("default", agent), 1)
    assert [len(history.of("default", agent)) for agent in "abc"] == [2, 0, 1]


def test_namespaces_are_apart_and_the_unnamed_are_not_kept() -> None:
    history = History()
    fail(history, Caller("left", "ada"), 1)
    fail(history, Caller("right", "bo"), 1)
    fail(history, Caller("left", None), 1)
    assert history.of("right", "ada") == history.of("default", "ada") == []
    history.forget("right", "ada")
    assert len(history.of("left", "ada")) == 1
    history.forget("left", "ada")
    assert history.of("left", "ada") == []
