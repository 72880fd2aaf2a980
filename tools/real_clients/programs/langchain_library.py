"""LangChain and LangGraph: tools, streams, structured output by its default method, an agent with memory."""

from __future__ import annotations

from typing import Any

from checks import AGE, HELLO, LOOK, MORE, NAME, PERSON, SAID, SUNNY, SYSTEM, TALK, URL, expect, run, weather
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

options: Any = {"base_url": f"{URL}/v1", "api_key": "none"}
model = ChatOpenAI(model="default", **options)


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


def agent_with_memory() -> None:
    """An agent of LangGraph: a tool's call, its result, two turns."""
    agent: Any = create_agent(model, [weather], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    for asked, wanted in ((LOOK, SUNNY), (MORE, SAID)):
        found = agent.invoke({"messages": [{"role": "user", "content": asked}]}, config)
        expect(found["messages"][-1].text, wanted)


def stream() -> None:
    """A streamed answer, with its usage."""
    chunks = list(model.stream([("system", SYSTEM), ("user", TALK)]))
    expect("".join(each.text for each in chunks), HELLO)


def structured_output() -> None:
    """`with_structured_output` as it is called by default."""
    asked = [("system", SYSTEM), ("user", PERSON)]
    expect(model.with_structured_output(Person).invoke(asked), Person(name=NAME, age=AGE))


def structured_output_by_function() -> None:
    """`with_structured_output` by a tool."""
    chosen = model.with_structured_output(Person, method="function_calling")
    expect(chosen.invoke([("system", SYSTEM), ("user", "Who? step:call-person")]), Person(name=NAME, age=AGE))


def structured_agent() -> None:
    """An agent whose answer has a format."""
    agent: Any = create_agent(model, [weather], system_prompt=SYSTEM, response_format=Person)
    found = agent.invoke({"messages": [{"role": "user", "content": "Who? step:agent-person"}]})
    expect(found["structured_response"], Person(name=NAME, age=AGE))


def responses() -> None:
    """The responses API."""
    chat = ChatOpenAI(model="default", use_responses_api=True, **options)
    expect(chat.invoke([("system", SYSTEM), ("user", TALK)]).text, HELLO)


run(agent_with_memory, stream, structured_output, structured_output_by_function, structured_agent, responses)
