"""The client side of a session: what it sends, whatever the model says. No server."""

from __future__ import annotations

import base64
import io
import itertools
import json
from datetime import date
from typing import Any

import pytest
from PIL import Image

from benchmarks.coding_day.agent import MIN_TURNS, REMIND_EVERY, SUMMARISE, Request, Session, SessionPlan, picture
from benchmarks.coding_day.client import Heard
from benchmarks.coding_day.templates import Habit
from rekindle.errors import ConfigError


def says(text: str) -> Heard:
    return Heard([{"type": "text", "text": text}], "end_turn")


def calls(number: int) -> Heard:
    content = [
        {"type": "thinking", "thinking": "Hmm.", "signature": "s"},
        {"type": "tool_use", "id": f"toolu_{number}", "name": "Read", "input": {"file_path": "a.py"}},
    ]
    return Heard(content, "tool_use")


def play(turns: int = 40, seed: int = 0, answer_every: int = 5, habit: Habit | None = None) -> list[Request]:
    """A session with a model that answers every few requests and calls a tool otherwise."""
    sent: list[Request] = []

    def ask(request: Request) -> Heard:
        sent.append(request)
        return says("Done.") if len(sent) % answer_every == 0 else calls(len(sent))

    Session(SessionPlan(turns, seed), ask, habit).run()
    return sent


def texts(body: Any) -> list[str]:
    """Every text of a body's system prompt and messages."""
    found = [block["text"] for block in body["system"]]
    for message in body["messages"]:
        found += [block.get("text") or str(block.get("content") or "") for block in message["content"]]
    return found


def test_a_session_has_its_turns_and_three_helpers() -> None:
    sent = play()
    by_agent = {who: [each for each in sent if each.who == who] for who in {each.who for each in sent}}
    assert sorted(by_agent) == ["helper-1", "helper-2", "helper-3", "main"]
    assert [each.turn for each in by_agent["main"]] == list(range(1, 41))
    assert all(len(requests) > 1 for requests in by_agent.values())


def test_helpers_name_their_parent_only_where_it_is_a_helper() -> None:
    sent = play()
    main = next(each.identity for each in sent if each.who == "main")
    first, second, third = (next(each.identity for each in sent if each.who == f"helper-{n}") for n in (1, 2, 3))
    assert set(main.headers) == {"x-claude-code-session-id"}
    assert "x-claude-code-parent-agent-id" not in first.headers and first.parent is None and third.parent is None
    assert second.headers["x-claude-code-parent-agent-id"] == first.agent
    assert len({each.identity.session for each in sent}) == 1
    assert len({each.agent for each in (first, second, third)}) == 3


def test_the_attribution_line_is_another_one_in_every_request() -> None:
    lines = [each.body["system"][0]["text"] for each in play()]
    assert all(line.startswith("x-anthropic-billing-header: ") and "\n" not in line for line in lines)
    assert len(set(lines)) == len(lines)


def test_the_date_changes_once_and_nothing_else_of_the_first_message_does() -> None:
    firsts = [each.body["messages"][0]["content"] for each in play() if each.who == "main"]
    notes = [blocks[0]["text"] for blocks in firsts]
    assert len(set(notes)) == 2
    assert [text.replace("2026-11-21", "2026-11-20") for text in notes] == [notes[0]] * 40
    assert {json.dumps(blocks[1]["text"]) for blocks in firsts} == {json.dumps(firsts[0][1]["text"])}
    dates = [each.at.date() for each in play() if each.who == "main"]
    assert dates == [date(2026, 11, 20)] * 20 + [date(2026, 11, 21)] * 20


def test_history_only_grows() -> None:
    main = [each for each in play() if each.who == "main"]
    for before, after in itertools.pairwise(main):
        known = [plain(message) for message in before.body["messages"]][1:]
        assert [plain(message) for message in after.body["messages"]][1 : len(known) + 1] == known


def plain(message: Any) -> Any:
    """A message without its marks for caching."""
    blocks = [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]
    return {**message, "content": blocks}


def test_what_is_sent_is_a_conversation() -> None:
    for request in play():
        messages = request.body["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2) + ["user"]
        for reply, after in zip(messages[1::2], messages[2::2], strict=True):
            called = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
            assert [b["tool_use_id"] for b in after["content"] if b["type"] == "tool_result"] == called
        marked = json.dumps(request.body).count('"cache_control"')
        assert 3 <= marked <= 4


def test_a_fork_goes_on_from_its_parents_conversation() -> None:
    sent = play()
    fork = next(each for each in sent if each.who == "helper-3")
    before = sent[sent.index(fork) - 1]
    assert before.who == "main"
    assert [plain(m) for m in fork.body["messages"]][: len(before.body["messages"])] == [
        plain(m) for m in before.body["messages"]
    ]
    assert fork.body["tools"] == before.body["tools"] and fork.body["system"][1:] == before.body["system"][1:]


def test_thinking_goes_back_as_it_came() -> None:
    last = [each for each in play() if each.who == "main"][-1]
    thoughts = [b for m in last.body["messages"] for b in m["content"] if b["type"] == "thinking"]
    assert len(thoughts) > 20 and all(block["signature"] == "s" for block in thoughts)


def test_reminders_stand_beside_messages_of_the_user() -> None:
    last = [each for each in play() if each.who == "main"][-1]
    reminded = [
        i for i, m in enumerate(last.body["messages"]) if "system-reminder" in str(m["content"][-1].get("text"))
    ]
    assert len(reminded) == 39 // REMIND_EVERY
    assert all(last.body["messages"][index]["role"] == "user" for index in reminded)


def test_the_same_seed_is_the_same_session_and_another_one_is_not() -> None:
    assert [each.body for each in play(12, 3)] == [each.body for each in play(12, 3)]
    assert play(12, 3)[0].body != play(12, 4)[0].body


def test_a_session_can_be_short_but_not_shorter() -> None:
    assert {each.who for each in play(MIN_TURNS)} == {"main", "helper-1", "helper-2", "helper-3"}
    with pytest.raises(ConfigError, match="--turns must be at least 4"):
        SessionPlan(3)


def test_a_line_of_the_log_holds_body_and_identity() -> None:
    line = json.loads(json.dumps(play(4)[0].line()))
    assert line["endpoint"] == "/v1/messages" and line["at"].startswith("2026-11-20T21:4")
    assert line["headers"].keys() == {"x-claude-code-session-id"}
    assert line["body"]["stream"] is True and texts(line["body"])


def test_the_state_of_the_repository_is_another_one_after_a_resume_and_in_a_new_conversation() -> None:
    sent = [each for each in play(20, habit="git-status") if each.who.startswith("main")]
    ends = [each.body["system"][-1]["text"].partition("gitStatus:")[2] for each in sent]
    assert len(sent) == 20 and len(set(ends)) == 3 and all(ends)
    assert [len(list(group)) for _, group in itertools.groupby(ends)] == [6, 6, 8]
    again = [each for each in sent if each.who != "main"]
    assert len(again) == 8 and again[0].identity.session != sent[0].identity.session
    assert len(again[0].body["messages"]) == 1 and len(sent[6].body["messages"]) == 13


def test_pictures_stand_before_the_text_of_results() -> None:
    main = [each for each in play(12, habit="image") if each.who == "main"]
    results = [b["content"] for m in main[-1].body["messages"] for b in m["content"] if b["type"] == "tool_result"]
    shown = [each for each in results if isinstance(each, list)]
    assert shown and len(shown) < len(results)
    assert [[block["type"] for block in each] for each in shown] == [["image", "text"]] * len(shown)
    opened = Image.open(io.BytesIO(base64.b64decode(picture(7)["source"]["data"])))
    opened.load()
    assert opened.size == (23, 23)


def test_a_summary_is_asked_for_without_tools_and_takes_the_place_of_the_history() -> None:
    sent = play(20, habit="compaction")
    asked = [at for at, each in enumerate(sent) if each.who == "main, summary"]
    assert len(asked) == 3
    for at in asked:
        before, summary, after = sent[at - 1].body, sent[at].body, sent[at + 1].body
        assert "tools" not in summary and len(summary["messages"]) >= len(before["messages"])
        assert summary["messages"][-1]["content"][-1]["text"] == SUMMARISE
        (first,) = after["messages"]
        assert first["content"][1]["text"].startswith("This conversation goes on") and after["tools"]
