"""openai: chat completions and responses, streamed and not, with tools, structured, several choices, logprobs."""

from __future__ import annotations

import json
from typing import Any

from checks import AGE, HELLO, LOOK, MORE, NAME, PERSON, SAID, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "weather", "description": "The weather", "parameters": SCHEMA}


class Person(BaseModel):
    """What a structured answer holds."""

    name: str
    age: int


def said(*texts: str) -> list[Any]:
    """Return a conversation of system and user, with replies between."""
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": SYSTEM}, *turns]


def chat_with_tools() -> None:
    """A tool's call, its result, two turns."""
    messages = said(LOOK)
    call = client.chat.completions.create(model="default", messages=messages, tools=[TOOL]).choices[0].message
    messages.append(call)
    for each in call.tool_calls or []:
        result = weather(**json.loads(each.function.arguments))
        messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    answer = client.chat.completions.create(model="default", messages=messages, tools=[TOOL]).choices[0].message
    expect(answer.content, SUNNY)
    messages += [answer, {"role": "user", "content": MORE}]
    again = client.chat.completions.create(model="default", messages=messages, tools=[TOOL])
    expect(again.choices[0].message.content, SAID)


def chat_stream_helper() -> None:
    """The helper that collects a stream, with a call in it."""
    with client.chat.completions.stream(model="default", messages=said(LOOK), tools=[TOOL]) as stream:
        for _ in stream:
            pass
        call = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    expect(json.loads(call.function.arguments), {"city": "Paris"})


def chat_parse() -> None:
    """A pydantic model as format."""
    answer = client.chat.completions.parse(model="default", messages=said(PERSON), response_format=Person)
    expect(answer.choices[0].message.parsed, Person(name=NAME, age=AGE))


def chat_choices_and_logprobs() -> None:
    """Two choices, with the likeliest tokens."""
    options: Any = {"n": 2, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(model="default", messages=said(TALK), **options)
    for choice in answer.choices:
        expect(choice.message.content, HELLO)
        assert choice.logprobs and choice.logprobs.content
    expect(len(answer.choices), 2)


def responses_with_tools() -> None:
    """A tool's call and result by `previous_response_id`."""
    options: Any = {"model": "default", "instructions": SYSTEM, "tools": [FLAT]}
    first = client.responses.create(input=LOOK, **options)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": weather(call.arguments)}
    expect(client.responses.create(input=[result], previous_response_id=first.id, **options).output_text, SUNNY)


def responses_stream() -> None:
    """A streamed response."""
    with client.responses.stream(model="default", instructions=SYSTEM, input=TALK) as stream:
        for _ in stream:
            pass
        expect(stream.get_final_response().output_text, HELLO)


def responses_parse() -> None:
    """A pydantic model as format of a response."""
    answer = client.responses.parse(model="default", instructions=SYSTEM, input=PERSON, text_format=Person)
    expect(answer.output_parsed, Person(name=NAME, age=AGE))


run(
    chat_with_tools,
    chat_stream_helper,
    chat_parse,
    chat_choices_and_logprobs,
    responses_with_tools,
    responses_stream,
    responses_parse,
)
