"""Every dialect is answered by a front as by the server that computes for it: text, reasoning, calls, streams, ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.conftest import Pair, fronting
from tests.server.conftest import Served
from tests.server.scripted import serving

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "add")]
VOLATILE = {"id", "created", "created_at", "completed_at", "rekindle", "system_fingerprint", "usage", "total_duration"}
VOLATILE |= {"load_duration", "prompt_eval_duration", "eval_duration", "call_id", "item_id"}


def strict_tool() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}


def settled(value: Any) -> Any:
    """A body without what differs between two equal answers."""
    if isinstance(value, dict):
        return {name: settled(item) for name, item in value.items() if name not in VOLATILE}
    return [settled(item) for item in value] if isinstance(value, list) else value


def answered(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = served.send("POST", path, body)
    assert answer.status == 200, answer.body
    if b"data: " not in answer.body[:200] and b"event: " not in answer.body[:200]:
        lines = answer.body.splitlines()
        return settled([json.loads(line) for line in lines] if len(lines) > 1 else answer.json)
    found = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    return settled([json.loads(line) for line in found if line != "[DONE]"])


def joined(chunks: list[Any]) -> str:
    """The text of a stream of completions or chat, whatever its chunks."""
    deltas = (choice.get("delta") or choice for chunk in chunks for choice in chunk["choices"])
    return "".join(delta.get("content") or delta.get("text") or "" for delta in deltas)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("cue", ["talk", "smile", "muse", "look", "twice", "ponder", "hurt"])
def test_chat(pair: Pair, cue: str) -> None:
    body = {"messages": user(f"{cue} of this"), "temperature": 0, "tools": TOOLS, "max_tokens": 40}
    assert answered(pair.front, "/v1/chat/completions", body) == answered(pair.backend, "/v1/chat/completions", body)


@pytest.mark.parametrize("more", [{"max_tokens": 3}, {"stop": " attic"}, {"n": 2}, {"logit_bias": {"5": 1.0}}])
def test_ends_and_choices(pair: Pair, more: dict[str, Any]) -> None:
    body = {"messages": user("talk to me"), "temperature": 0, **more}
    assert answered(pair.front, "/v1/chat/completions", body) == answered(pair.backend, "/v1/chat/completions", body)


def test_a_stream(pair: Pair) -> None:
    body = {"messages": user("talk now"), "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    chunks = answered(pair.front, "/v1/chat/completions", body)
    assert joined(chunks) == "It is in the attic of the house." and len(chunks) > 5
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "stop"


def test_progress_that_the_backend_does_not_know_is_named(pair: Pair) -> None:
    body = {"messages": user("talk now"), "temperature": 0, "stream": True, "return_progress": True}
    answer = pair.front.send("POST", "/v1/chat/completions", body)
    chunks = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    assert chunks[-1]["rekindle"]["ignored"] == ["return_progress"]
    assert not any("prompt_progress" in chunk for chunk in chunks)


def test_hints_for_a_memory_that_is_elsewhere_are_named(pair: Pair) -> None:
    body = {"messages": user("talk now"), "max_tokens": 2, "nvext": {"agent_hints": {"speculative_prefill": True}}}
    answer = pair.front.send("POST", "/v1/chat/completions", body, x_agent_id="h", x_dynamo_session_final="true")
    assert answer.json["rekindle"]["ignored"] == ["nvext.agent_hints.speculative_prefill", "x-dynamo-session-final"]


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_completions(pair: Pair, kind: str) -> None:
    prompt: Any = "<|im_start|><|talk|>"
    if kind == "ids":
        prompt = pair.front.send("POST", "/v1/tokenize", {"text": prompt}).json["ids"]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    ours, theirs = (answered(each, "/v1/completions", body) for each in (pair.front, pair.backend))
    assert ours == theirs and len(ours["choices"][0]["token_ids"]) == 4


def test_anthropic(pair: Pair) -> None:
    body = {"model": "claude-x", "messages": user("muse on it"), "max_tokens": 40, "temperature": 0}
    assert answered(pair.front, "/v1/messages", body) == answered(pair.backend, "/v1/messages", body)
    events = answered(pair.front, "/v1/messages", body | {"stream": True})
    assert [event["type"] for event in events][:1] == ["message_start"] and events[-1]["type"] == "message_stop"


def test_responses(pair: Pair) -> None:
    body = {"input": "talk again", "temperature": 0}
    ours, theirs = (answered(each, "/v1/responses", body) for each in (pair.front, pair.backend))
    assert ours["output"] == theirs["output"]


def test_ollama(pair: Pair) -> None:
    body = {"model": "scripted", "messages": user("talk again"), "stream": False}
    ours, theirs = (answered(each, "/api/chat", body) for each in (pair.front, pair.backend))
    assert ours["message"] == theirs["message"]


def test_log_probabilities(pair: Pair) -> None:
    body = {"messages": user("talk of them"), "temperature": 0, "logprobs": True, "top_logprobs": 3}
    ours, theirs = (answered(each, "/v1/chat/completions", body) for each in (pair.front, pair.backend))
    assert ours == theirs and len(ours["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3


def test_a_constraint_reaches_the_backend(pair: Pair) -> None:
    body = {"messages": user("talk or choose"), "temperature": 0, "structured_outputs": {"choice": ["It is", "No"]}}
    ours, theirs = (answered(each, "/v1/chat/completions", body) for each in (pair.front, pair.backend))
    assert ours == theirs and ours["choices"][0]["message"]["content"] == "It is"


SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["cellar", "loft"]}, "n": {"$ref": "#/$defs/n"}},
    "required": ["place", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},  # or the model writes digits without an end
}
FORCED = [
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tool_choice": "required", "parallel_tool_calls": False},
]


@pytest.fixture(scope="module")
def pocket() -> Iterator[Served]:
    """A server of a model that does not think, as our own would let reasoning come before what is constrained."""
    with serving(model="pocket", store="off", threads=1, hot_bytes="16MiB") as backend:
        yield backend


def is_right(given: Any) -> None:
    assert set(given) == {"place", "n"} and given["place"] in ("cellar", "loft") and isinstance(given["n"], int)


@pytest.mark.parametrize("more", FORCED)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_a_forced_call_has_arguments_of_its_schema(
    pocket: Served, tmp_path: Path, more: dict[str, Any], kind: str
) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    tools = [look] if more["tool_choice"] == "required" else [look, TOOLS[1]]
    asked = user("Where is the lamp?")
    body = {"messages": asked, "temperature": 0, "tools": tools, "max_tokens": 300, **more}
    with fronting(Path("pocket"), pocket, tmp_path, kind) as front:
        (choice,) = front.send("POST", "/v1/chat/completions", body).json["choices"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        (call,) = choice["message"]["tool_calls"]
        given = json.loads(call["function"]["arguments"])
        assert call["function"]["name"] == "look"
        is_right(given)
        chunks = answered(front, "/v1/chat/completions", body | {"stream": True})
        deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
        assert json.loads("".join(piece["function"].get("arguments", "") for piece in pieces)) == given
        tool = {"name": "look", "input_schema": SCHEMA}
        anthropic = {
            "model": "claude-x",
            "messages": asked,
            "max_tokens": 300,
            "tools": [tool],
            "tool_choice": {"type": "any"},
        }
        answer = front.send("POST", "/v1/messages", {**anthropic, "temperature": 0}).json
        assert answer.get("stop_reason") == "tool_use", answer
        is_right(answer["content"][-1]["input"])
        history = [*asked, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "It is there."}]
        follow = front.send("POST", "/v1/chat/completions", {**body, "messages": history, "tool_choice": "auto"})
        assert follow.status == 200 and follow.json["choices"][0]["finish_reason"] == "stop", follow.body


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [strict_tool()], "tool_choice": "auto"}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_asked_of_another_server_is_refused(pair: Pair, more: dict[str, Any], param: str) -> None:
    answer = pair.front.send("POST", "/v1/chat/completions", {"messages": user("talk"), **more})
    assert answer.status == 400 and answer.error["param"] == param, answer.body
