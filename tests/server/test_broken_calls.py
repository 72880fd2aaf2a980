"""Calls that are not JSON: put right where they can be read in one way, else never a call that a client would run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.scripted import serving, write_scripted_model

READ = {"path": "C:\\Users\nold\\xy"}
TORN = """{"path": "a", 'dry': true}"""
LIMITS = {"max_tokens": 60, "temperature": 0}


def offered(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("broken")
    model = write_scripted_model(directory / "model")
    with serving(model=str(model), store=directory / "store", threads=1, hot_bytes="64MiB", block_tokens=16) as running:
        yield running


def sent(served: Served, path: str, body: dict[str, Any], agent: str = "ada") -> Any:
    answer = served.send("POST", path, body, x_agent_id=agent)
    assert answer.status == 200, answer.body
    return answer.json


def chat(served: Served, word: str, *more: Any, agent: str = "ada") -> Any:
    messages = [{"role": "user", "content": f"{word} please"}, *more]
    body = {"messages": messages, "tools": [offered("enter"), offered("rm")], **LIMITS}
    return sent(served, "/v1/chat/completions", body, agent)


def messages(served: Served, word: str) -> Any:
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("enter", "rm")]
    body = {"model": "default", "messages": [{"role": "user", "content": f"{word} please"}], "tools": tools, **LIMITS}
    return sent(served, "/v1/messages", body)


def ollama(served: Served, word: str) -> Any:
    asked = [{"role": "user", "content": f"{word} please"}]
    body = {"model": "default", "messages": asked, "tools": [offered("enter"), offered("rm")], "stream": False,
            "options": {"temperature": 0, "num_predict": 60}}  # fmt: skip
    return sent(served, "/api/chat", body)


def test_a_backslash_that_escapes_nothing_is_one(served: Served) -> None:
    whole = chat(served, "paths")["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == READ
    reply = messages(served, "paths")
    assert (reply["content"][0]["input"], reply["stop_reason"]) == (READ, "tool_use")
    assert ollama(served, "paths")["message"]["tool_calls"][0]["function"]["arguments"] == READ


@pytest.mark.parametrize("written", [None, json.dumps(READ), json.dumps(READ, separators=(",", ":"))])
def test_what_was_put_right_is_found_again(served: Served, written: str | None) -> None:
    agent = f"agent-{written and len(written)}"
    message = chat(served, "paths", agent=agent)["choices"][0]["message"]
    if written is not None:
        message["tool_calls"][0]["function"]["arguments"] = written
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"talk {written}"}
    again = chat(served, "paths", message, result, agent=agent)["rekindle"]
    assert again["outcome"] in ("exact", "extend"), again


def test_what_cannot_be_read_is_no_call_and_said(served: Served) -> None:
    whole = chat(served, "tear")
    choice = whole["choices"][0]
    assert (choice["finish_reason"], whole["rekindle"]["broken_calls"]) == ("stop", ["rm"])
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == TORN, "as it was written"
    reply = messages(served, "tear")
    assert (reply["stop_reason"], reply["rekindle"]["broken_calls"]) == ("end_turn", ["rm"])
    assert reply["content"][0]["input"] == {"path": "a", "arguments": TORN}, "not the beginning alone"
    told = ollama(served, "tear")
    assert TORN in told["message"]["content"]
    assert (told["message"].get("tool_calls"), told["rekindle"]["broken_calls"]) == (None, ["rm"])
    body = {"input": "tear please", "tools": [{"type": "function", "name": "rm", "parameters": {"type": "object"}}]}
    response = sent(served, "/v1/responses", {**body, "temperature": 0, "max_output_tokens": 60})
    (item, *_) = response["output"]
    assert (item["type"], item["status"], item["arguments"]) == ("function_call", "incomplete", TORN)
    assert response["rekindle"]["broken_calls"] == ["rm"]
