"""Live replay: an agent's own replies in later prompts are those this server gave, and only those."""

from __future__ import annotations

from typing import Any

from rekindle.server.dayfile import RecordedRequest
from rekindle_lab.bench.replay.live import LiveReplies

SYSTEM = {"role": "system", "content": "Today is Friday."}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def request(*messages: Any, answer: Any, agent: str = "a", system: Any = SYSTEM) -> RecordedRequest:
    return RecordedRequest(0.0, {"messages": [system, *messages], "max_tokens": 4}, answer, agent=agent)


FIRST = request(user("hi"), answer=says("hello"))
SECOND = request(user("hi"), says("hello"), user("who?"), answer=says("Nadia"))
THIRD = request(user("hi"), says("hello"), user("who?"), says("Nadia"), user("bye"), answer=says("bye"))


def test_own_replies_are_replaced_and_the_rest_stays() -> None:
    live = LiveReplies("live")
    assert live.body(FIRST) == FIRST.body
    live.answered(FIRST, says("good day"))
    live.answered(SECOND, says("I am Nadia"))
    sent = live.body(THIRD)["messages"]
    assert [message["content"] for message in sent[1:]] == ["hi", "good day", "who?", "I am Nadia", "bye"]
    assert (live.num_replaced, live.num_kept) == (2, 0)
    assert THIRD.messages[2]["content"] == "hello", "the recording itself was changed"


def test_recorded_mode_changes_nothing() -> None:
    live = LiveReplies("recorded")
    live.answered(FIRST, says("good day"))
    assert live.body(SECOND) == SECOND.body


def test_a_reply_that_did_not_come_stays_as_recorded() -> None:
    live = LiveReplies("live")
    live.answered(SECOND, says("I am Nadia"))
    assert [message["content"] for message in live.body(THIRD)["messages"][1:]] == [
        "hi", "hello", "who?", "I am Nadia", "bye",
    ]  # fmt: skip
    assert (live.num_replaced, live.num_kept) == (1, 1)
    live.answered(FIRST, says(""))
    assert live.body(SECOND) == SECOND.body


def test_the_same_words_elsewhere_are_left_alone() -> None:
    live = LiveReplies("live")
    live.answered(FIRST, says("good day"))
    other_start = request(user("hey"), says("hello"), user("who?"), answer=says("x"))
    other_agent = request(user("hi"), says("hello"), user("who?"), answer=says("x"), agent="b")
    quoted = request(user("hello"), answer=says("x"))
    for item in (other_start, other_agent, quoted):
        assert live.body(item) == item.body


def test_a_new_date_in_the_system_prompt_keeps_the_replies() -> None:
    live = LiveReplies("live")
    live.answered(FIRST, says("good day"))
    system = {"role": "system", "content": "Today is Saturday."}
    later = request(user("hi"), says("hello"), user("who?"), answer=says("x"), system=system)
    assert [message["content"] for message in live.body(later)["messages"]] == [
        "Today is Saturday.", "hi", "good day", "who?",
    ]  # fmt: skip


def test_calls_keep_the_ids_that_their_results_name() -> None:
    live = LiveReplies("live")
    asked = request(user("add"), answer=says("", tool_calls=[CALL]))
    result = {"role": "tool", "tool_call_id": "call-1", "content": "2"}
    # the recorded client sent its null content back
    after = request(user("add"), {**says("", tool_calls=[CALL]), "content": None}, result, answer=says("2"))
    own = {"id": "own-7", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    live.answered(asked, says("", tool_calls=[own]))
    message = live.body(after)["messages"][2]
    assert message["tool_calls"] == [{**own, "id": "call-1"}]


def test_a_text_does_not_stand_for_a_call_nor_a_call_for_a_text() -> None:
    live = LiveReplies("live")
    asked = request(user("add"), answer=says("", tool_calls=[CALL]))
    after = request(user("add"), says("", tool_calls=[CALL]), user("and?"), answer=says("2"))
    live.answered(asked, says("I cannot add"))
    live.answered(FIRST, says("", tool_calls=[CALL]))
    assert live.body(after) == after.body
    assert live.body(SECOND) == SECOND.body
