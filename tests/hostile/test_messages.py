"""Bodies in Anthropic's dialect that no client sends by accident: refused in its shape, or answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.server.anthropic.bodies import MessagesBody
from tests.hostile.conftest import Target
from tests.hostile.test_bodies import WRONG, nested

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
GOOD: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}]}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
BLOCKS: tuple[dict[str, Any], ...] = (
    {"type": "text", "text": "Hi."},
    {"type": "tool_use", "id": "t", "name": "look", "input": {}},
    {"type": "tool_result", "tool_use_id": "t", "content": "Hi.", "is_error": False},
    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    {"type": "redacted_thinking", "data": "x"},
)


def check(target: Target, path: str, body: Any) -> int:
    """Send it: answered, or refused in the dialect's shape."""
    answer = target.send("POST", path, body)
    assert answer.status < 500, f"{answer.status}: {answer.body[:300]!r} to {str(body)[:300]}"
    if answer.status != 200:
        told = answer.json
        assert (set(told), told["type"]) == ({"type", "error", "request_id"}, "error")
        assert set(told["error"]) == {"type", "message"}
        assert told["error"]["message"]
    return answer.status


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        nested(100_000).encode(),
        b'{"max_tokens": 1, "messages": ' + nested(50_000).encode() + b"}",
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": ' + nested(50_000).encode() + b"}]}",
    ],
    ids=range(9),
)
def test_what_is_no_request_is_refused(target: Target, path: str, body: bytes) -> None:
    assert 400 <= check(target, path, body) < 500


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [*MessagesBody.model_fields, "metadata", "mcp_servers", "what"])
def test_any_value_of_any_parameter(target: Target, path: str, name: str) -> None:
    for value in WRONG:
        check(target, path, {**GOOD, "stream": False, name: value})


@pytest.mark.parametrize("block", BLOCKS, ids=[block["type"] for block in BLOCKS])
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_any_value_in_any_block(target: Target, block: dict[str, Any], role: str) -> None:
    for name in (*block, "cache_control", "content"):
        for value in WRONG:
            message = {"role": role, "content": [{**block, name: value}]}
            last = {"role": "user", "content": "Hi."}
            check(target, PATHS[1], {**GOOD, "messages": [message, last]})


def test_any_value_in_a_tool(target: Target) -> None:
    for name in (*TOOL, "type", "cache_control", "strict", "input_examples", "defer_loading", "what"):
        for value in WRONG:
            for choice in ({"type": "none"}, {"type": "tool", "name": "look"}):
                check(target, PATHS[0], {**GOOD, "tools": [{**TOOL, name: value}], "tool_choice": choice})


def test_arguments_and_schemas_that_are_nested_deeply(target: Target) -> None:
    deep = json.loads(nested(900))
    for depth in (200, 900):
        value = json.loads(nested(depth))
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {"a": value}}
        said = [*GOOD["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": "Hi."}]
        check(target, PATHS[0], {**GOOD, "messages": said})
        tool = {**TOOL, "input_schema": {"type": "object", "properties": {"a": value}}}
        check(target, PATHS[0], {**GOOD, "tools": [tool], "tool_choice": {"type": "none"}})
    check(target, PATHS[0], {**GOOD, "context_management": {"edits": [{"type": "x", "keep": deep}]}})


def test_many_blocks_and_marks(target: Target) -> None:
    many = [{"type": "text", "text": ""}] * 20_000
    assert check(target, PATHS[1], {**GOOD, "messages": [{"role": "user", "content": many}]}) in (200, 400)
    marked = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}] * 20_000
    assert check(target, PATHS[0], {**GOOD, "messages": [{"role": "user", "content": marked}]}) == 400
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 5_000
    check(target, PATHS[0], {**GOOD, "messages": [*turns, {"role": "user", "content": "b"}]})
