"""LangChain's ChatAnthropic over a real socket: text, tools, thinking, usage, errors, streaming and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from tests.server.conftest import Served
from tests.server.scripted import LOOK, SCRIPTS, serving, write_scripted_model

TALK = "".join(SCRIPTS["talk"])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"talk now, the {place} is empty"


@tool
def add(a: int) -> str:
    """Add a number."""
    return f"talk now, {a} it is"


def model(served: Served, agent: str | None = None, **more: Any) -> ChatAnthropic:
    headers = {"X-Agent-ID": agent} if agent else {}
    given = {"model": "claude-opus-5-5", "base_url": served.url, "api_key": "unused", "max_retries": 0, **more}
    return ChatAnthropic(default_headers=headers, max_tokens=64, **given)


def asked(chat: Any, messages: list[Any], *, stream: bool) -> AIMessage:
    """The reply, put together by LangChain out of its chunks or at once."""
    if not stream:
        answer = chat.invoke(messages)
        assert isinstance(answer, AIMessage)
        return answer
    whole: AIMessageChunk | None = None
    for chunk in chat.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_and_what_it_cost(scripted: Served, stream: bool) -> None:
    agent = f"ada-{stream}"
    said = [SystemMessage("Be brief."), HumanMessage("talk please, and tell me where it is")]
    first = asked(model(scripted, agent), said, stream=stream)
    assert first.text == TALK
    assert first.response_metadata["stop_reason"] == "end_turn"
    usage = first.usage_metadata
    assert usage is not None
    assert usage["output_tokens"] == len(SCRIPTS["talk"])
    turn = [*said, first, HumanMessage("smile then")]
    second = asked(model(scripted, agent), turn, stream=stream)
    assert second.text == "".join(SCRIPTS["smile"])
    told = second.usage_metadata
    assert told is not None
    details = told["input_token_details"]
    assert details["cache_read"] >= usage["input_tokens"] + usage["output_tokens"] - 1, "LangChain adds the cached ones"
    assert details.get("cache_creation") == 0
    assert told["total_tokens"] == told["input_tokens"] + told["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(scripted: Served, stream: bool) -> None:
    chat = model(scripted, f"bo-{stream}").bind_tools([look, add])
    said = [HumanMessage("look please")]
    first = asked(chat, said, stream=stream)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("look", json.loads(LOOK))
    assert first.response_metadata["stop_reason"] == "tool_use"
    result = look.invoke({"place": call["args"]["place"]})
    second = asked(chat, [*said, first, ToolMessage(result, tool_call_id=call["id"])], stream=stream)
    assert second.text == TALK


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_can_be_forced(scripted: Served, stream: bool) -> None:
    chat = model(scripted).bind_tools([look, add], tool_choice="look", parallel_tool_calls=False)
    (call,) = asked(chat, [HumanMessage("talk")], stream=stream).tool_calls
    assert (call["name"], call["args"]) == ("look", {"place": "cellar"})


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_goes_out_and_comes_back(scripted: Served, stream: bool) -> None:
    chat = model(scripted, f"cy-{stream}", thinking={"type": "adaptive"}).bind_tools([look, add])
    said = [HumanMessage("ponder please")]
    first = asked(chat, said, stream=stream)
    thoughts = [block for block in first.content if isinstance(block, dict) and block["type"] == "thinking"]
    assert [block["thinking"] for block in thoughts] == ["Sums need add."]
    assert all(block["signature"] for block in thoughts)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 4})
    turn = [*said, first, ToolMessage(add.invoke({"a": 4}), tool_call_id=call["id"])]
    second = asked(chat, turn, stream=stream)
    assert second.text == TALK
    before, told = first.usage_metadata, second.usage_metadata
    assert before is not None
    assert told is not None
    assert told["input_token_details"]["cache_read"] >= before["input_tokens"] + before["output_tokens"] - 1


def test_prompts_are_counted(scripted: Served) -> None:
    said = [SystemMessage("Be brief."), HumanMessage("talk please")]
    usage = asked(model(scripted), said, stream=False).usage_metadata
    assert usage is not None
    assert model(scripted).get_num_tokens_from_messages(said) == usage["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(scripted: Served, stream: bool) -> None:
    with pytest.raises(anthropic.NotFoundError):
        asked(model(scripted, model="gpt-9"), [HumanMessage("talk")], stream=stream)
    with pytest.raises(anthropic.BadRequestError) as caught:
        asked(model(scripted, stop_sequences=["a"] * 65), [HumanMessage("talk")], stream=stream)
    assert "stop_sequences" in str(caught.value)
