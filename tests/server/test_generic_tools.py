"""A model whose template has no tools, called in every dialect: valid calls, and histories that continue."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from rekindle.cli.why import request_lines
from tests.server.conftest import Served
from tests.server.scripted import serving
from tests.tiny_models import tiny_model_dir

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["attic", "cellar"]}, "floor": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place", "floor"],
    "additionalProperties": False,
}
OTHER = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = {"look": SCHEMA, "add": OTHER}
FUNCTIONS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASKED: Any = [{"role": "user", "content": "Where is the key?"}]
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("tiny"))
    with serving(model=str(model), store="off", threads=1, hot_bytes="64MiB") as running:
        yield running
        running.engine.check()


def check(name: str, arguments: Any) -> None:
    if name == "add":
        assert list(arguments) == ["a"] and isinstance(arguments["a"], bool)
        return
    assert name == "look" and list(arguments) == ["place", "floor"]
    assert arguments["place"] in ("attic", "cellar") and arguments["floor"] in range(10)


def chat(served: Served, agent: str | None = None, **parameters: Any) -> Any:
    given = {"model": "default", "messages": ASKED, "tools": FUNCTIONS, "temperature": 1.5, "max_tokens": 60}
    return served.client(agent).chat.completions.create(**{**given, **parameters})


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_of_chats_are_valid(served: Served, choice: Any) -> None:
    answer = chat(served, tool_choice=choice, seed=3, n=4)
    for each in answer.choices:
        (call,) = each.message.tool_calls
        assert each.finish_reason == "tool_calls" and (choice == "required" or call.function.name == "look")
        check(call.function.name, json.loads(call.function.arguments))
    assert answer.rekindle["generic_tools"] is True


def test_streams_have_the_same_calls(served: Served) -> None:
    name, arguments = "", ""
    for chunk in chat(served, tool_choice="required", seed=5, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    check(name, json.loads(arguments))
    (call,) = chat(served, tool_choice="required", seed=5).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (name, arguments)


def test_responses_and_messages_have_them_too(served: Served) -> None:
    tools: Any = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    given: Any = {"model": "default", "input": "Look.", "tools": tools, "tool_choice": "required"}
    response = served.client().responses.create(**given, max_output_tokens=60)
    (item,) = response.output
    assert item.type == "function_call"
    check(item.name, json.loads(item.arguments))
    claude = anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0)
    offered: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        asked: Any = {"messages": ASKED, "tools": offered, "tool_choice": choice}
        answer = claude.messages.create(model="claude-x", max_tokens=60, **asked)
        (block,) = answer.content
        assert answer.stop_reason == "tool_use" and block.type == "tool_use"
        check(block.name, block.input)


def test_ollama_shows_tools_and_takes_results(served: Served) -> None:
    assert "tools" in served.send("POST", "/api/show", {"model": "default"}).json["capabilities"]
    call = {"function": {"name": "look", "arguments": {"place": "attic", "floor": 1}}}
    said = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said += [{"role": "tool", "tool_name": "look", "content": "Only dust."}]
    options = {"temperature": 0, "num_predict": 4}
    body = {"messages": said, "tools": FUNCTIONS, "stream": False, "options": options, "rekindle": {"return_ids": True}}
    answer = served.send("POST", "/api/chat", body).json
    prompt = served.engine.encoder.decode(answer["rekindle"]["prompt_ids"])
    assert '<tool_call>\n{"name": "look", "arguments": {"place": "attic", "floor": 1}}\n</tool_call>' in prompt
    assert '<tool_response name="look">\nOnly dust.\n</tool_response>' in prompt
    assert answer["rekindle"]["generic_tools"] is True


def turn(served: Served, said: list[Any], **parameters: Any) -> Any:
    """A turn of a conversation that its client sends back; one that is not forced is computed again without reuse."""
    options = {"return_ids": True}
    answer = chat(served, "ada", messages=said, temperature=0, extra_body={"rekindle": options}, **parameters)
    if parameters["tool_choice"] == "auto":
        again = {**options, "reuse": "off", "prompt_ids": answer.rekindle["prompt_ids"]}
        cold = chat(served, messages=said, temperature=0, extra_body={"rekindle": again}, **parameters)
        assert answer.rekindle["completion_ids"] == cold.rekindle["completion_ids"]
    return answer


def test_a_growing_conversation_computes_its_new_tokens_alone(served: Served) -> None:
    said = list(ASKED)
    known = 0
    for number in range(4):
        choice = "required" if number % 2 == 0 else "auto"
        answer = turn(served, said, tool_choice=choice, max_tokens=60 if choice == "required" else 8)
        report = answer.rekindle
        assert number == 0 or report["outcome"] == "extend"
        assert report["reused_tokens"] >= known
        known = report["prompt_tokens"] + report["completion_tokens"] - 2  # not the last token, nor one that ended it
        message = answer.choices[0].message
        said.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        for call in message.tool_calls or []:
            said.append({"role": "tool", "tool_call_id": call.id, "content": f"Result {number}: dust."})
        if not message.tool_calls:
            said.append({"role": "user", "content": f"And place {number}?"})
    assert known > 400


def test_calls_that_a_client_parsed_continue_as_well(served: Served) -> None:
    """Anthropic's clients send arguments back as an object: they are written with the blanks that they had."""
    claude = anthropic.Anthropic(base_url=served.url, api_key="u", max_retries=0, default_headers={"X-Agent-ID": "eve"})
    tools: Any = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    given: Any = {"model": "claude-x", "max_tokens": 60, "tools": tools, "tool_choice": {"type": "any"}}
    first = claude.messages.create(messages=ASKED, **given)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "Only dust."}
    blocks = [block.model_dump() for block in first.content]
    second = claude.messages.create(
        messages=[*ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}], **given
    )
    report = second.model_extra["rekindle"]
    assert report["outcome"] == "extend"
    assert report["reused_tokens"] >= first.model_extra["rekindle"]["prompt_tokens"] + first.usage.output_tokens - 2


def test_why_says_whose_form_it_was(served: Served) -> None:
    chat(served, "kim", tool_choice="required")
    requests = served.send("GET", "/v1/agents/kim/why").json["data"]
    assert any("template has no tools" in line for line in request_lines(requests[0], time.time()))
    assert any("tools: the template has none" in note for note in served.engine.notes)
    plain = served.chat("Hello", agent="lou")
    assert plain.json["rekindle"]["generic_tools"] is False


def test_replies_without_an_end_of_their_own_are_not_bound(served: Served) -> None:
    for more in ({"min_tokens": 5}, {"ignore_eos": True}):
        answer = chat(served, max_tokens=8, extra_body=more)
        assert answer.choices[0].finish_reason == "length" or answer.usage.completion_tokens >= 5


def test_a_tool_that_is_not_there_is_refused(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="no tool 'fly'"):
        chat(served, tool_choice={"type": "function", "function": {"name": "fly"}})
