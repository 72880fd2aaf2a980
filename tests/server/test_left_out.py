"""What a text model cannot see, and what nobody knows, does not end a conversation: it is left out and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.logged import listening, text
from tests.server.test_hints import until
from tests.text.test_omissions import NOT_SHOWN, PNG

LINE = f"[image, 64 x 48 png{NOT_SHOWN}"
URL = f"data:image/png;base64,{PNG}"
CHAT = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "pic.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [BLOCK]}
READ = {"name": "Read", "input_schema": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": '{"path": "pic.png"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URL}]}
SHOW = {"role": "user", "content": "Look at pic.png."}
# For each dialect: a body whose prompt has a picture, and the same with the line that takes its place.
BODIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look:"}, CHAT]}]},
        {"messages": [{"role": "user", "content": f"Look:\n{LINE}"}]},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [SHOW, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}],
         "tools": [READ]},
        {"messages": [SHOW, {"role": "assistant", "content": [USE]},
                      {"role": "user", "content": [{**RESULT, "content": LINE}]}], "tools": [READ]},
    ),
    "responses": (
        "/v1/responses",
        {"input": [SHOW, CALL, OUTPUT], "store": False},
        {"input": [SHOW, CALL, {**OUTPUT, "output": LINE}], "store": False},
    ),
}  # fmt: skip


def asked(served: Served, path: str, body: dict[str, Any], **headers: str) -> Any:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = served.send("POST", path, {"model": "default", limit: 4, **body}, **headers)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("dialect", BODIES)
def test_a_picture_becomes_a_line_and_the_next_turns_go_on(served: Served, dialect: str) -> None:
    path, shown, plain = BODIES[dialect]
    first = asked(served, path, shown, x_agent_id=f"seen-{dialect}")["rekindle"]
    (image,) = first["left_out"]
    assert (image["kind"], image["count"], image["text"]) == ("image", 1, LINE)
    again = asked(served, path, plain, x_agent_id=f"seen-{dialect}")["rekindle"]
    assert again["left_out"] == [] and again["outcome"] == "exact", "the line is the prompt"


def test_it_is_named_in_the_log_and_by_why(served: Served) -> None:
    path, shown, _ = BODIES["chat"]
    with listening() as heard:
        asked(served, path, {**shown, "colour": "red"}, x_agent_id="logged", x_request_id="mine")
        (record,) = heard.until(served, "mine")
    assert "not shown: image (1), ignored: colour" in text(record)
    (entry,) = served.send("GET", "/v1/agents/logged/why").json["data"]
    assert entry["left_out"][0]["param"] == "messages[0].content[1]" and entry["ignored"] == ["colour"]


@pytest.fixture(scope="module")
def strict(served: Served) -> Iterator[Served]:
    with serving(served.engine, ServerSettings(strict=True)) as running:
        yield running


@pytest.mark.parametrize("dialect", BODIES)
def test_a_strict_server_refuses_both(strict: Served, dialect: str) -> None:
    path, shown, plain = BODIES[dialect]
    for body in (shown, {**plain, "colour": "red"}):
        answer = strict.send("POST", path, {"max_tokens": 4, **body} if path != "/v1/responses" else body)
        assert answer.status == 400 and ("image" in answer.json["error"]["message"] or b"colour" in answer.body)


def test_the_official_clients_show_pictures(served: Served) -> None:
    ours = served.client("official")
    reply = ours.chat.completions.create(
        model="default", max_tokens=4, messages=[{"role": "user", "content": [CHAT]}], extra_body={"top_k": -1}
    )
    assert reply.usage is not None and reply.usage.prompt_tokens > 10
    response = ours.responses.create(
        model="default", max_output_tokens=4,
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": URL, "detail": "auto"}]}],
    )  # fmt: skip
    assert response.status == "incomplete"
    theirs = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    message = theirs.messages.create(
        model="claude-x",
        max_tokens=4,
        messages=[{"role": "user", "content": [BLOCK]}],
    )
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 10


def test_a_search_that_anthropics_servers_would_run_is_answered_as_unavailable(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    body: dict[str, Any] = {
        "model": "claude-x",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "Search for lamps."}],
        "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    }
    forced = {**body, "tool_choice": {"type": "tool", "name": "web_search"}}
    whole = client.messages.create(**forced)
    with client.messages.stream(**forced) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        content: list[Any] = message.content
        use, result, text = content
        assert use.type == "server_tool_use" and use.name == "web_search"
        assert result.type == "web_search_tool_result" and result.tool_use_id == use.id
        assert result.content.error_code == "unavailable"
        assert text.type == "text" and "not available" in text.text and message.stop_reason == "end_turn"
    free = client.messages.create(**body)
    (tool,) = free.model_dump()["rekindle"]["left_out"]
    assert (tool["kind"], tool["param"], tool["text"]) == ("web_search_20250305", "tools[0]", "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124"])
def test_what_is_unavailable_is_answered_with_usage_and_report(served: Served, stream: bool, kind: str) -> None:
    name, agent = kind.rpartition("_")[0], f"no-{kind}-{stream}"
    said = {"messages": [{"role": "user", "content": f"{agent}: find lamps."}], "tools": [{"type": kind, "name": name}]}
    control = {"action": "close", "session_id": agent}
    body = {**said, "max_tokens": 64, "colour": "red", "nvext": {"foo": 1, "session_control": control},
            "tool_choice": {"type": "tool", "name": name}, "stream": stream}  # fmt: skip
    answer = served.send("POST", "/v1/messages", {"model": "claude-x", **body})
    assert answer.status == 200, answer.body
    if stream:
        events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: ")]
        assert events[0]["message"]["usage"].items() <= events[-2]["usage"].items()
        message = {**events[-2], **events[-2]["delta"]}
        texts = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    else:
        message = answer.json
        texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    assert texts == [f"{name} is not available on this server."] and message["stop_reason"] == "end_turn"
    assert message["rekindle"]["ignored"] == ["colour", "nvext.foo"]
    assert [each["kind"] for each in message["rekindle"]["left_out"]] == [kind]
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    counted = served.send("POST", "/v1/messages/count_tokens", {"model": "claude-x", **said}).json["input_tokens"]
    assert prompt == counted and usage["output_tokens"] == 0
    until(lambda: not served.send("GET", f"/v1/agents/{agent}").json["hot_tokens"])


def test_threads_are_refused_as_anthropics_library_expects(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model="claude-x", max_tokens=4, messages=[{"role": "user", "content": "Hi"}],
            extra_body={"thread": {"type": "create"}},
        )  # fmt: skip
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_the_context_is_full_in_words_that_clients_know(served: Served) -> None:
    import re

    long: Any = {"role": "user", "content": "word " * 20_000}
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = served.send("POST", path, {"max_tokens": 4, "messages": [long]})
        found = re.search(
            r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", answer.json["error"]["message"], re.IGNORECASE
        )
        assert answer.status == 400 and found is not None
        assert int(found[1]) > int(found[2]) == served.engine.max_context - 1
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(model="default", messages=[long])
    assert caught.value.code == "context_length_exceeded"


HALF = "a picture \ud83d of \ufdd0"
CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [SHOW, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "Read"}}]},
                      {"role": "tool", "tool_call_id": "c1", "content": HALF}]},
    ),
    "messages": (
        "/v1/messages",
        {"messages": [SHOW, {"role": "assistant", "content": [USE]},
                      {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": HALF}]}]}],
         "tools": [READ]},
    ),
    "arguments": (
        "/v1/messages",
        {"messages": [SHOW, {"role": "assistant", "content": [{**USE, "input": {"path": HALF}}]},
                      {"role": "user", "content": [{**RESULT, "content": "no"}]}], "tools": [READ]},
    ),
    "responses": ("/v1/responses", {"input": [SHOW, CALL, {**OUTPUT, "output": HALF}], "store": False}),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": HALF}], "stream": False}),
    "completions": ("/v1/completions", {"prompt": HALF}),
}  # fmt: skip


@pytest.mark.parametrize("name", CUT)
def test_half_an_emoji_is_replaced_and_named(served: Served, strict: Served, name: str) -> None:
    """Clients in JavaScript cut texts by UTF-16 units, and send the half again in every turn."""
    path, body = CUT[name]
    written = json.loads(json.dumps({"model": "default", "max_tokens": 4, **body}).replace("max_tokens", {
        "/v1/responses": "max_output_tokens", "/api/chat": "keep_alive"}.get(path, "max_tokens")))  # fmt: skip
    answer = served.send("POST", path, written)
    assert answer.status == 200, answer.body
    (left,) = answer.json["rekindle"]["left_out"]
    assert (left["kind"], left["text"]) == ("characters", "\ufffd")
    plain = json.loads(json.dumps(written, ensure_ascii=False).replace("\ud83d", "\ufffd").replace("\ufdd0", "\ufffd"))
    again = served.send("POST", path, plain).json["rekindle"]
    assert (again["prompt_tokens"], again["left_out"]) == (answer.json["rekindle"]["prompt_tokens"], [])
    refused = strict.send("POST", path, written)
    assert refused.status == 400, refused.body


@pytest.mark.parametrize("name", CUT)
def test_a_whole_number_may_be_written_as_a_float(served: Served, name: str) -> None:
    path, body = CUT[name]
    limit = {"/v1/responses": "max_output_tokens", "/api/chat": "keep_alive"}.get(path, "max_tokens")
    assert served.send("POST", path, {"model": "default", **body, limit: 4.0}).status == 200
    if path.startswith("/v1/"):
        assert served.send("POST", path, {"model": "default", **body, limit: 4.5}).status == 400


LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
FOREIGN = {"type": "code_interpreter", "container": {"type": "auto"}}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": LOOK}
OFFERED: dict[str, tuple[dict[str, Any], Any]] = {
    "/v1/chat/completions": ({"messages": [SHOW]}, CHAT_TOOL),
    "/v1/responses": ({"input": [SHOW], "store": False}, {"type": "function", **LOOK}),
    "/v1/messages": ({"messages": [SHOW]}, {"name": "look", "input_schema": {"type": "object"}}),
    "/api/chat": ({"messages": [SHOW], "stream": False}, CHAT_TOOL),
    "/v1/agents/offered/prefill": ({"messages": [SHOW]}, CHAT_TOOL),
}


@pytest.mark.parametrize("path", OFFERED)
def test_a_tool_of_a_kind_that_nobody_knows_is_left_out(served: Served, strict: Served, path: str) -> None:
    body, tool = OFFERED[path]
    body |= {"max_tokens": 4} if path in ("/v1/messages", "/v1/chat/completions") else {}
    report = {}
    for name, tools in {"known": [tool], "both": [FOREIGN, tool], "foreign": [FOREIGN], "none": []}.items():
        answer = served.send("POST", path, {**body, "tools": tools})
        assert answer.status == 200, answer.body
        report[name] = answer.json["rekindle"]
    assert report["both"]["prompt_tokens"] == report["known"]["prompt_tokens"], "the model sees the others"
    assert report["foreign"]["prompt_tokens"] == report["none"]["prompt_tokens"]
    (left_out,) = report["both"]["left_out"]
    assert (left_out["kind"], left_out["param"]) == ("code_interpreter", "tools[0]")
    refused = strict.send("POST", path, {**body, "tools": [tool, FOREIGN]})
    assert refused.status == 400 and b"tools[1] is of type 'code_interpreter'" in refused.body
