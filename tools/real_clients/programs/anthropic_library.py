"""anthropic: messages, streamed and not, with tools; `messages.parse`, the beta tool runner, token counts."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, beta_tool
from checks import AGE, HELLO, LOOK, MORE, NAME, PERSON, SAID, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from pydantic import BaseModel

client = Anthropic(base_url=URL, auth_token="none")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "The weather", "input_schema": SCHEMA}]
OPTIONS: Any = {"model": "claude-opus-4-8", "max_tokens": 200, "system": SYSTEM}


class Person(BaseModel):
    """What a structured answer holds."""

    name: str
    age: int


def messages_with_tools() -> None:
    """A tool's call, its result, two turns."""
    turns: list[Any] = [{"role": "user", "content": LOOK}]
    call = client.messages.create(messages=turns, tools=TOOLS, **OPTIONS)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": weather(**block.input)}
        for block in call.content
        if block.type == "tool_use"
    ]
    turns += [{"role": "assistant", "content": call.content}, {"role": "user", "content": results}]
    answer = client.messages.create(messages=turns, tools=TOOLS, **OPTIONS)
    expect(answer.content[-1].text, SUNNY)
    turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": MORE}]
    expect(client.messages.create(messages=turns, tools=TOOLS, **OPTIONS).content[-1].text, SAID)


def messages_stream() -> None:
    """The helper that collects a stream."""
    with client.messages.stream(messages=[{"role": "user", "content": TALK}], **OPTIONS) as stream:
        expect("".join(stream.text_stream), HELLO)


def messages_parse() -> None:
    """A pydantic model as format."""
    turns: Any = [{"role": "user", "content": PERSON}]
    expect(
        client.messages.parse(messages=turns, output_format=Person, **OPTIONS).parsed_output, Person(name=NAME, age=AGE)
    )


def tool_runner() -> None:
    """The loop of the library's own."""
    turns: Any = [{"role": "user", "content": LOOK}]
    runner = client.beta.messages.tool_runner(messages=turns, tools=[beta_tool(weather)], **OPTIONS)
    expect(runner.until_done().content[-1].text, SUNNY)


def token_count_and_models() -> None:
    """Counts and the list of models."""
    turns: Any = [{"role": "user", "content": TALK}]
    assert client.messages.count_tokens(model="claude-opus-4-8", system=SYSTEM, messages=turns).input_tokens > 500
    assert list(client.models.list())


run(messages_with_tools, messages_stream, messages_parse, tool_runner, token_count_and_models)
