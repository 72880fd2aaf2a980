"""LangChain's chat model for OpenAI over a real socket: what agents built on it use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server.conftest import Served
from tests.server.scripted import LOOK, SCRIPTS, serving, write_scripted_model

SYSTEM = SystemMessage("You look after the house and know where everything stands. " * 6)


@tool
def look(place: str) -> str:
    """Look at a place in the house."""
    return place


@tool
def add(a: int) -> int:
    """Add things up."""
    return a


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("langchain")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def chat(served: Served, agent: str = "chain", **more: Any) -> ChatOpenAI:
    given = {
        "base_url": f"{served.url}/v1",
        "api_key": "unused",
        "model": "default",
        "temperature": 0,
        "max_retries": 0,
    }
    return ChatOpenAI(**given, default_headers={"X-Agent-ID": agent}, **more)


def added(chunks: Iterator[Any]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    assert isinstance(first, AIMessageChunk)
    return first


def test_a_reply_with_its_usage(scripted: Served) -> None:
    said = [SYSTEM, HumanMessage("talk please")]
    first, second = (chat(scripted).invoke(said) for _ in range(2))
    assert first.content == second.content == "".join(SCRIPTS["talk"])
    assert second.response_metadata["finish_reason"] == "stop"
    usage = second.usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1
    assert usage["output_token_details"]["reasoning"] == 0


def test_tools_make_a_round(scripted: Served) -> None:
    model = chat(scripted, "rounds").bind_tools([look, add])
    said = [SYSTEM, HumanMessage("look for the lamp")]
    for _ in range(2):
        called = model.invoke(said)
        assert isinstance(called, AIMessage)
        (call,) = called.tool_calls
        assert (call["name"], call["args"]["place"]) == ("look", "attic </tool_call>")
        said += [called, ToolMessage("look again", tool_call_id=call["id"])]
    answer = model.invoke([*said, HumanMessage("talk then")])
    assert answer.content == "".join(SCRIPTS["talk"])
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0


def test_a_stream_says_the_same(scripted: Served) -> None:
    model = chat(scripted, "streams", stream_usage=True).bind_tools([look, add])
    whole = added(model.stream([SYSTEM, HumanMessage("look for the lamp")]))
    assert whole.content == "Let me look."
    assert [(call["name"], call["args"]) for call in whole.tool_call_chunks] == [("look", LOOK)]
    assert whole.response_metadata["finish_reason"] == "tool_calls"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len(SCRIPTS["look"])


@pytest.mark.parametrize(("choice", "place"), [("look", "cellar"), ("any", "loft")])
def test_a_call_can_be_wanted(scripted: Served, choice: str, place: str) -> None:
    model = chat(scripted).bind_tools([look, add], tool_choice=choice)
    (call,) = model.invoke([HumanMessage("talk please")]).tool_calls
    assert (call["name"], call["args"]) == ("look", {"place": place})


async def _astreamed(model: ChatOpenAI) -> str:
    return "".join([str(chunk.content) async for chunk in model.astream([HumanMessage("talk please")])])


def test_without_blocking(scripted: Served) -> None:
    assert asyncio.run(_astreamed(chat(scripted))) == "".join(SCRIPTS["talk"])


def test_errors_are_openais(scripted: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(scripted).bind(temperature=-1).invoke([HumanMessage("talk")])
    with pytest.raises(openai.NotFoundError):
        chat(scripted).model_copy(update={"model_name": "gpt-9"}).invoke([HumanMessage("talk")])
