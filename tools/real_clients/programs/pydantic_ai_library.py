"""pydantic-ai: chat, responses and Anthropic models; tools, streams, output by tool, by format and by prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import AsyncAnthropic
from checks import AGE, HELLO, LOOK, MORE, NAME, PERSON, SAID, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

asyncio.set_event_loop(asyncio.new_event_loop())  # of all checks: the clients belong to one
provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none"))
chat: Any = OpenAIChatModel("default", provider=provider)
responses: Any = OpenAIResponsesModel("default", provider=provider)
claude: Any = AnthropicModel(
    "claude-opus-4-8", provider=AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, auth_token="none"))
)


class Person(BaseModel):
    """What a structured answer holds."""

    name: str
    age: int


def with_tools(model: Any) -> None:
    """A tool's call, its result, two turns."""
    agent = Agent(model, system_prompt=SYSTEM, tools=[weather])
    first = agent.run_sync(LOOK)
    expect(first.output, SUNNY)
    expect(agent.run_sync(MORE, message_history=first.all_messages()).output, SAID)


def chat_tools() -> None:
    """Chat completions."""
    with_tools(chat)


def responses_tools() -> None:
    """Responses."""
    with_tools(responses)


def anthropic_tools() -> None:
    """Anthropic's messages."""
    with_tools(claude)


def output_by_tool() -> None:
    """A pydantic model as the arguments of a call."""
    agent = Agent(chat, system_prompt=SYSTEM, output_type=Person)
    expect(agent.run_sync("Who? step:final-person").output, Person(name=NAME, age=AGE))


def native_output() -> None:
    """A pydantic model as format."""
    for model in (chat, responses):
        agent = Agent(model, system_prompt=SYSTEM, output_type=NativeOutput(Person))
        expect(agent.run_sync(PERSON).output, Person(name=NAME, age=AGE))


def prompted_output() -> None:
    """A pydantic model described in the prompt."""
    agent = Agent(chat, system_prompt=SYSTEM, output_type=PromptedOutput(Person))
    expect(agent.run_sync(PERSON).output, Person(name=NAME, age=AGE))


def stream() -> None:
    """A streamed run."""

    async def talk() -> None:
        async with Agent(chat, system_prompt=SYSTEM).run_stream(TALK) as result:
            expect(await result.get_output(), HELLO)

    asyncio.get_event_loop().run_until_complete(talk())


run(chat_tools, responses_tools, anthropic_tools, output_by_tool, native_output, prompted_output, stream)
