"""Arguments of calls as their schemas say, in all dialects, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.server.conftest import Served

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"enum": ["attic", "cellar"]},
        "floors": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["place", "floors"],
    "additionalProperties": False,
}
OTHER = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ASKED: Any = [{"role": "user", "content": "Say something about the weather."}]


def functions(*, strict: bool) -> Any:
    schemas = {"look": SCHEMA, "add": OTHER}
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, **({"strict": True} if strict else {})}}
        for name, schema in schemas.items()
    ]


def check(name: str, arguments: Any) -> None:
    if name == "add":
        assert list(arguments) == ["a"] and isinstance(arguments["a"], bool)
        return
    assert name == "look" and set(arguments) == {"place", "floors"}
    assert arguments["place"] in ("attic", "cellar") and len(arguments["floors"]) <= 3
    assert all(isinstance(each, int) and 0 <= each <= 9 for each in arguments["floors"])


def chat(served: Served, tools: Any, **parameters: Any) -> Any:
    given = {"model": "default", "messages": ASKED, "temperature": 1.5, "max_tokens": 300, **parameters}
    return served.client().chat.completions.create(tools=tools, **given)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_forced_calls_of_chats_have_valid_arguments(served: Served, choice: Any, strict: bool) -> None:
    answer = chat(served, functions(strict=strict), tool_choice=choice, seed=3, n=4)
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        calls = each.message.tool_calls or []
        assert calls and (choice == "required" or len(calls) == 1)
        for call in calls:
            assert call.type == "function"
            check(call.function.name, json.loads(call.function.arguments))


def test_a_stream_of_a_forced_call_is_valid(served: Served) -> None:
    arguments = ""
    choice = {"type": "function", "function": {"name": "look"}}
    for chunk in chat(served, functions(strict=True), tool_choice=choice, seed=5, stream=True):
        for each in chunk.choices:
            arguments += "".join(
                (call.function and call.function.arguments) or "" for call in each.delta.tool_calls or []
            )
    check("look", json.loads(arguments))


def messages(served: Served, **parameters: Any) -> Any:
    client = anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0)
    return client.messages.create(model="default", messages=ASKED, **{"max_tokens": 300, **parameters})


def test_strict_tools_leave_text_as_it_is(served: Served) -> None:
    """Here `strict` is no part of the prompt."""
    texts = [
        messages(
            served,
            extra_body={"temperature": 0},
            max_tokens=24,
            tools=[{"name": "look", "input_schema": SCHEMA, "strict": strict}],
        )
        .content[0]
        .text
        for strict in (True, False)
    ]
    assert texts[0] == texts[1] != ""


def test_one_of_the_allowed_tools_is_called(served: Served) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    answer = chat(served, functions(strict=False), tool_choice=choice, seed=1)
    calls = answer.choices[0].message.tool_calls or []
    assert {call.function.name for call in calls if call.type == "function"} == {"add"}


def test_messages_and_responses_do_the_same(served: Served) -> None:
    message = messages(
        served,
        extra_body={"temperature": 1.0},
        tools=[{"name": "look", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    (block,) = (each for each in message.content if each.type == "tool_use")
    check(block.name, block.input)
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    response = served.client().responses.create(
        model="default",
        input="Say something.",
        tools=[tool],
        tool_choice={"type": "function", "name": "look"},
        temperature=1.5,
        max_output_tokens=300,
    )
    (call,) = (item for item in response.output if item.type == "function_call")
    check(call.name, json.loads(call.arguments))
    assert response.tools[0].model_dump()["strict"] is True


def test_a_strict_schema_that_cannot_be_enforced_is_refused_with_its_path(served: Served) -> None:
    schema = {"type": "object", "properties": {"all": {"type": "array", "uniqueItems": True}}}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}]
    with pytest.raises(openai.BadRequestError) as caught:
        chat(served, tools)
    assert caught.value.param == "tools[0].function.parameters.properties.all"
