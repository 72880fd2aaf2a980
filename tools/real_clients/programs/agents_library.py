"""OpenAI Agents SDK: chat completions and responses, tools, streams, `output_type`, a session of two turns."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from checks import AGE, HELLO, LOOK, MORE, NAME, PERSON, SAID, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
loop = asyncio.new_event_loop()  # of all checks: the client belongs to one
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Person(BaseModel):
    """What a structured answer holds."""

    name: str
    age: int


def agent(kind: Any, **options: Any) -> Any:
    """Return an agent on a model of this kind."""
    return Agent(name="clerk", instructions=SYSTEM, model=kind(model="default", openai_client=client), **options)


def tools_and_session(kind: Any) -> None:
    """A tool's call, its result, two turns."""

    async def talk() -> None:
        clerk, session = agent(kind, tools=[function_tool(weather)]), SQLiteSession(kind.__name__)
        for asked, wanted in ((LOOK, SUNNY), (MORE, SAID)):
            expect((await Runner.run(clerk, asked, session=session)).final_output, wanted)

    loop.run_until_complete(talk())


def output_type(kind: Any) -> None:
    """A pydantic model as format."""
    found = loop.run_until_complete(Runner.run(agent(kind, output_type=Person), PERSON)).final_output
    expect(found, Person(name=NAME, age=AGE))


def stream(kind: Any) -> None:
    """A streamed run."""

    async def talk() -> None:
        result = Runner.run_streamed(agent(kind), TALK)
        async for _ in result.stream_events():
            pass
        expect(result.final_output, HELLO)

    loop.run_until_complete(talk())


def chat_tools() -> None:
    """Chat completions: tools."""
    tools_and_session(MODELS[0])


def chat_output_type() -> None:
    """Chat completions: a format."""
    output_type(MODELS[0])


def chat_stream() -> None:
    """Chat completions: a stream."""
    stream(MODELS[0])


def responses_tools() -> None:
    """Responses: tools."""
    tools_and_session(MODELS[1])


def responses_output_type() -> None:
    """Responses: a format."""
    output_type(MODELS[1])


def responses_stream() -> None:
    """Responses: a stream."""
    stream(MODELS[1])


run(chat_tools, chat_output_type, chat_stream, responses_tools, responses_output_type, responses_stream)
