"""What `rekindle analyze` reads: entries as loggers write them, files as they lie around."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import BadRequest, ConfigError
from rekindle.server.dayfile import DayWriter, Header, RecordedRequest
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import fit
from rekindle_lab.analyze.bodies import BodyReader, LoggedPrompt, session_of
from rekindle_lab.analyze.logfile import open_log
from rekindle_lab.analyze.shapes import Logged, moment, read_entry
from rekindle_pocket import MODEL_DIR

NOON = 1_700_000_000.0
CHAT = {"model": "m", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]}
CLAUDE = {"model": "c", "max_tokens": 9, "system": "Be kind.", "messages": [{"role": "user", "content": "Hello!"}]}
RESPONSES = {"model": "m", "instructions": "Be kind.", "input": "Hello!"}
SAID = {"choices": [{"message": {"role": "assistant", "content": "Hi."}}], "usage": {"prompt_tokens": 7}}

SHAPES: dict[str, tuple[Any, str]] = {
    "bare chat": (CHAT, "chat"),
    "bare Anthropic": (CLAUDE, "messages"),
    "bare responses": (RESPONSES, "responses"),
    "bare completion": ({"model": "m", "prompt": "Hello!"}, "completions"),
    "OpenAI batch": ({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}, "chat"),
    "OpenAI batch of responses": ({"custom_id": "1", "url": "/v1/responses", "body": RESPONSES}, "responses"),
    "Anthropic batch": ({"custom_id": "1", "params": CLAUDE}, "messages"),
    "claude-trace": (
        {"request": {"timestamp": NOON, "url": "https://api.anthropic.com/v1/messages?beta=true", "body": CLAUDE}},
        "messages",
    ),
    "LiteLLM's payload": (
        {"id": "1", "messages": CHAT["messages"], "model_parameters": {}, "response": SAID, "startTime": NOON},
        "chat",
    ),
    "LiteLLM's spend log": ({"request_id": "1", "proxy_server_request": json.dumps(CHAT), "messages": {}}, "chat"),
    "Helicone": (
        {"request_body": CLAUDE, "response_body": {}, "request_created_at": "2023-11-14T22:13:20Z"},
        "messages",
    ),
    "Langfuse, messages": ({"type": "GENERATION", "model": "m", "input": CHAT["messages"], "output": {"a": 1}}, "chat"),
    "Langfuse, a body": ({"type": "GENERATION", "model": "m", "input": CHAT, "startTime": "2024-01-01"}, "chat"),
    "OpenPipe": ({"input": CHAT, "output": SAID, "tags": {}}, "chat"),
    "a string": (json.dumps({"level": "info", "request": json.dumps(CHAT)}), "chat"),
    "HAR": ({"request": {"url": "http://x/v1/chat/completions", "postData": {"text": json.dumps(CHAT)}}}, "chat"),
    "Anthropic by its tools": (
        {"messages": CLAUDE["messages"], "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        "messages",
    ),
    "Anthropic by its blocks": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        "messages",
    ),
}
OLLAMA: dict[str, Any] = {**CHAT, "options": {"num_ctx": 4096}, "stream": False}
SHAPES |= {
    "bare Ollama": (OLLAMA, "ollama"),
    "Ollama's prompt": ({"url": "/api/generate", "body": {"prompt": "Hello!", "system": "Be kind."}}, "ollama"),
    "Ollama by its path": (
        {"path": "http://x:11434/api/chat", "request": CHAT, "response": {"message": SAID}},
        "ollama",
    ),
}
NO_REQUESTS = (
    {"method": "GET", "url": "/v1/models"},
    {"level": "info", "msg": "started"},
    {"messages": []},
    {"input": "just a word"},
    [1, 2],
    17,
    None,
)


@pytest.mark.parametrize("name", SHAPES)
def test_a_request_is_found_in_what_loggers_write(name: str) -> None:
    entry, dialect = SHAPES[name]
    logged = read_entry(entry)
    assert logged is not None
    assert logged.dialect == dialect
    asked = reader().read(logged)
    assert (
        asked.text == "Hello!"
        if dialect == "completions"
        else "Hello!" in [m.content for m in asked.messages] or (asked.messages[-1].role == "tool")
    )


@pytest.mark.parametrize("entry", NO_REQUESTS, ids=repr)
def test_everything_else_is_no_request(entry: Any) -> None:
    assert read_entry(entry) is None


def test_where_a_body_was_sent_decides_its_dialect() -> None:
    plain, odd = {"messages": CLAUDE["messages"]}, {"messages": CLAUDE["messages"], "thinking": {"type": "enabled"}}
    for url, body, dialect in (
        ("https://api.anthropic.com/v1/messages?beta=true", plain, "messages"),
        ("/v1/chat/completions", odd, "chat"),
        ("/other", plain, "chat"),
    ):
        logged = read_entry({"url": url, "body": body})
        assert logged is not None and logged.dialect == dialect


def test_tools_beside_the_messages_belong_to_them() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    logged = read_entry({"messages": CHAT["messages"], "model_parameters": {"tools": [tool]}, "startTime": NOON})
    assert logged is not None and logged.body["tools"] == [tool] and logged.at_s == NOON


def test_headers_sessions_times_and_answers_are_found_around_a_body() -> None:
    headers = [{"name": "X-Claude-Code-Session-Id", "value": "s1"}]
    logged = read_entry(
        {
            "request": {"timestamp": NOON * 1000, "headers": headers, "body": CLAUDE},
            "request_properties": {"Helicone-Session-Id": "mine"},
            "response": {"body": json.dumps(SAID)},
        }
    )
    assert logged is not None
    assert logged.at_s == NOON and logged.session == "mine"
    assert logged.headers == {"x-claude-code-session-id": "s1"}
    said = reader().answer(logged)
    assert said is not None and said.content == "Hi."


@pytest.mark.parametrize(
    "value",
    [NOON, NOON * 1e3, NOON * 1e6, NOON * 1e9, str(NOON), "2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00"],
)
def test_times_are_read_in_any_unit(value: Any) -> None:
    assert moment(value) == pytest.approx(NOON)


@pytest.mark.parametrize("value", [None, True, "yesterday", -5, "", [], float("nan"), float("inf")])
def test_what_is_no_time_is_none(value: Any) -> None:
    assert moment(value) is None


def reader() -> BodyReader:
    return BodyReader(*fit(PromptEncoder.from_dir(MODEL_DIR)))


def read(body: dict[str, Any], **around: Any) -> LoggedPrompt:
    logged = read_entry({"body": body, **around})
    assert logged is not None
    return reader().read(logged)


def test_the_three_dialects_say_the_same() -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    arguments = '{"place": "here"}'
    chat = {
        "messages": [
            *CHAT["messages"],
            {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "Nothing."},
        ],
        "tools": [{"type": "function", "function": function}, {"type": "web_search"}],
        "response_format": {"type": "json_object"},
        "metadata": {"user": 1},
    }
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {"place": "here"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Nothing."}]}
    claude = {
        **CLAUDE,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [
            {"name": "look", "description": "Looks.", "input_schema": schema, "cache_control": {"type": "ephemeral"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "context_management": {"edits": [{"type": "anything"}]},
    }
    responses = {
        **RESPONSES,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "Nothing."},
        ],
        "tools": [{"type": "function", **function}, {"type": "web_search"}],
        "text": {"format": {"type": "json_schema"}},
    }
    asked = [read(body) for body in (chat, claude, responses)]
    assert len(asked[0].messages) == 4
    assert asked[0].messages == asked[1].messages == asked[2].messages
    assert [list(each.tools or ()) for each in asked] == [[{"type": "function", "function": function}]] * 3


def test_ollamas_bodies_say_the_same_as_openais() -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    call = {"function": {"name": "look", "arguments": {"place": "here"}}}
    result = {"role": "tool", "content": "Nothing."}
    tools = [{"type": "function", "function": function}]
    said: list[Any] = [*CHAT["messages"], {"role": "assistant", "thinking": "Hm.", "tool_calls": [call]}]
    theirs = read({"messages": [*said, {**result, "tool_name": "look"}], "tools": tools, "options": {}, "think": "low"})
    openais = {"messages": [*said, {**result, "name": "look"}], "tools": tools, "reasoning_effort": "low"}
    assert theirs == read(openais)
    asked = {"prompt": "Hello!", "system": "Be kind."}
    assert read(asked, url="/api/generate") == read(CHAT)
    assert read({**asked, "think": False}, url="/api/generate").template_kwargs == {"enable_thinking": False}
    assert read({**asked, "raw": True}, url="/api/generate").text == "Hello!"
    pictures = [
        read({"messages": [{"role": "USER", "content": "Look", "images": [each]}], "options": {}}) for each in "ab"
    ]
    first, second = (each.messages[0].content for each in pictures)
    assert first != second and first.startswith("[image ") and first.endswith("]\nLook")


@pytest.mark.parametrize("answer", [{"message": {"role": "assistant", "content": "Hi."}}, {"response": "Hi."}])
def test_ollamas_answers_are_read(answer: dict[str, Any]) -> None:
    logged = read_entry({"url": "/api/chat", "body": OLLAMA, "response": {"model": "m", "done": True, **answer}})
    assert logged is not None
    said = reader().answer(logged)
    assert said is not None and said.content == "Hi."


def test_pictures_are_lines_that_differ_with_them() -> None:
    def shown(data: str) -> str:
        picture = {"type": "image", "source": {"type": "base64", "data": data}}
        return read({**CLAUDE, "messages": [{"role": "user", "content": [picture]}]}).messages[-1].content

    assert shown("one") == shown("one") != shown("two")
    assert shown("one").startswith("[image ")


def test_broken_unicode_and_the_guard_do_not_stop_a_log() -> None:
    asked = read({"messages": [{"role": "user", "content": "\ud800 \ufdd0"}]})
    assert asked.messages[0].content == "\ufffd \ufffd"


def test_responses_go_on_from_earlier_ones_of_the_log() -> None:
    bodies = reader()
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}]
    first = read_entry({"body": RESPONSES, "response": {"id": "resp_1", "output": output}})
    second = read_entry({"body": {"model": "m", "input": "More.", "previous_response_id": "resp_1"}})
    lost = read_entry({"body": {"model": "m", "input": "More.", "previous_response_id": "resp_0"}})
    assert first is not None and second is not None and lost is not None
    bodies.read(first)
    assert [message.content for message in bodies.read(second).messages] == ["Hello!", "Hi.", "More."]
    with pytest.raises(BadRequest, match="does not hold"):
        bodies.read(lost)


def test_answers_of_every_dialect_are_read() -> None:
    blocks = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hi."}]}
    items = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}]}
    for answer in (SAID, blocks, items, "Hi.", {"role": "assistant", "content": "Hi."}, {"content": {"text": "Hi."}}):
        said = reader().answer(Logged("chat", CHAT, answer=answer))
        assert said is not None and (said.role, said.content) == ("assistant", "Hi."), answer
    for answer in (None, {}, "data: {}\n\n", {"error": "no"}, 7, {"choices": []}, {"choices": [None]}):
        assert reader().answer(Logged("chat", CHAT, answer=answer)) is None, answer


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries))
    return path


def contents(path: Path) -> list[str]:
    return [logged.body["messages"][-1]["content"] for _, logged in open_log(path)]


def said_at(text: str, at_s: float | None) -> dict[str, Any]:
    return {"timestamp": at_s, "body": {"messages": [{"role": "user", "content": text}]}}


def test_broken_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "log.jsonl", said_at("a", None), '{"torn": \n', "\n", {"level": "info"}, said_at("b", 1), "x"
    )
    log = open_log(path)
    assert contents(path) == ["a", "b"]
    assert log.num_entries == 5
    assert {reason: (example.count, example.place) for reason, example in log.skipped.items()} == {
        "no JSON": (2, "line 2"),
        "no request with a prompt in it": (1, "line 4"),
    }


def test_requests_come_in_the_order_of_their_times_where_all_have_one(tmp_path: Path) -> None:
    assert contents(lines(tmp_path / "a.jsonl", said_at("b", 2), said_at("a", 1))) == ["a", "b"]
    assert contents(lines(tmp_path / "b.jsonl", said_at("b", 2), said_at("a", None))) == ["b", "a"]


def test_a_log_can_be_gone_through_again(tmp_path: Path) -> None:
    log = open_log(lines(tmp_path / "a.jsonl", said_at("b", 2), said_at("a", 1)))
    assert list(log) == list(log) and len(log) == 2


@pytest.mark.parametrize("indent", [None, 1])
def test_arrays_and_har_files_are_read_whole(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps([said_at("a", 1), said_at("b", 2)], indent=indent))
    assert contents(path) == ["a", "b"]
    path.write_text(json.dumps({"log": {"entries": [said_at("a", 1)]}}, indent=indent))
    assert contents(path) == ["a"]
    path.write_text(json.dumps(said_at("a", 1), indent=indent))
    assert contents(path) == ["a"]


def test_a_day_of_our_own_is_read_with_its_references(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    first: dict[str, Any] = {"messages": [{"role": "user", "content": "One."}]}
    answer = {"role": "assistant", "content": "Ha."}
    second = {"messages": [*first["messages"], answer, {"role": "user", "content": "Two."}]}
    with DayWriter(path, Header(NOON)) as day:
        day.request(RecordedRequest(0.0, first, answer, agent="me", usage={"prompt_tokens": 9}))
        day.request(RecordedRequest(1.0, second, answer, agent="me"))
    found = [logged for _, logged in open_log(path)]
    assert [len(logged.body["messages"]) for logged in found] == [1, 3]
    assert [(logged.session, logged.at_s) for logged in found] == [("me", NOON), ("me", NOON + 1)]
    said = reader().answer(found[0])
    assert said is not None and said.content == "Ha."


@pytest.mark.parametrize("text", ["", "\n\n", "Dear diary\n", '{"level": "info"}\n', "[]", "{", "[[["])
def test_a_file_without_requests_is_refused_with_what_it_holds(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="holds no request"):
        open_log(path)


def test_a_file_that_cannot_be_read_is_a_setting_to_change(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        open_log(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_log(tmp_path)


def test_headers_that_name_an_agent_name_the_conversation() -> None:
    named = Logged("chat", CHAT, headers={"x-agent-id": "ada", "x-title": "Grüße"}, session="s")
    assert session_of(named) == "ada"
    assert session_of(Logged("chat", CHAT, headers={"x-agent-id": "a" * 999}, session="s")) == "s"
    assert session_of(Logged("chat", CHAT)) is None
