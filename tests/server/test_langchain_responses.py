"""The responses API through LangChain's chat model: what frameworks make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.server.conftest import Served
from tests.server.scripted import SCRIPTS, serving, write_scripted_model

FILLER = "There is a long letter on the table. " * 14


@tool
def add(a: int) -> str:
    """Add one."""
    return f"talk about {a + 1}"


@tool
def look(place: str) -> str:
    """Look somewhere."""
    return f"talk about the {place}"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("scripted")
    model = write_scripted_model(directory / "model")
    with serving(model=model, store=directory / "store", threads=1, hot_bytes="64MiB") as served:
        yield served


def chat(served: Served, agent: str, **options: Any) -> ChatOpenAI:
    headers = {"X-Agent-ID": agent}
    fixed: dict[str, Any] = {"base_url": f"{served.url}/v1", "api_key": "unused", "default_headers": headers}
    return ChatOpenAI(model="default", use_responses_api=True, temperature=0, max_retries=0, **fixed, **options)


def said(model: Any, messages: list[Any], *, stream: bool) -> AIMessage:
    """The reply, put together from its chunks where it is streamed."""
    if not stream:
        return model.invoke(messages)
    whole: Any = None
    for chunk in model.stream(messages):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store": False, "include": ["reasoning.encrypted_content"]},
        {"use_previous_response_id": True},
        {"output_version": "v1"},
    ],
    ids=["items", "stateless", "previous", "v1"],
)
def test_thoughts_and_calls_go_round(scripted: Served, options: dict[str, Any], stream: bool) -> None:
    """Whichever way the framework sends them back, the next turn goes on where the last one ended."""
    agent = f"{'-'.join(options) or 'items'}-{stream}"
    model = chat(scripted, agent, **options).bind_tools([add, look])
    messages: list[Any] = [SystemMessage(f"Be short. {agent}"), HumanMessage(f"ponder this. {FILLER}")]
    first = said(model, messages, stream=stream)
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 4})
    messages += [first, ToolMessage(add.invoke(call["args"]), tool_call_id=call["id"])]
    second = said(model, messages, stream=stream)
    assert second.text == "".join(SCRIPTS["talk"])
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    stored = first.usage_metadata["total_tokens"]
    cached = second.usage_metadata["input_token_details"]["cache_read"]
    respelled = "output_version" in options  # its arguments come back without blanks: that call is computed again
    assert stored - (4 if respelled else 1) <= cached
    assert 2 <= first.usage_metadata["output_token_details"]["reasoning"] < first.usage_metadata["output_tokens"]
    third = said(model, [*messages, second, HumanMessage("smile")], stream=stream)
    assert third.text == "".join(SCRIPTS["smile"])


def test_errors_are_the_clients(scripted: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(scripted, "wrong").bind(temperature=-1).invoke([HumanMessage("talk")])
    with pytest.raises(openai.NotFoundError):
        chat(scripted, "wrong").bind(model="gpt-9").invoke("talk")
