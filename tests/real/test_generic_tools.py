"""Tools with a real model whose template has none, through the official clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.real.conftest import FirstStart
from tests.server.conftest import Served
from tests.server.scripted import serving

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city today.", "parameters": SCHEMA},
}
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
RESULT = "Rain, 14 degrees."


@pytest.fixture(scope="module")
def served(
    smollm2: Path, first_start_of: Callable[[Path], FirstStart], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    store = first_start_of(smollm2).store(tmp_path_factory.mktemp("tools"))
    with serving(model=str(smollm2), store=str(store), threads=1, hot_bytes="64MiB") as running:
        yield running


def check(arguments: Any) -> None:
    assert list(arguments) == ["city", "unit"] and arguments["unit"] in ("celsius", "fahrenheit")
    assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 20


def test_openais_client_gets_valid_calls_and_continues_after_them(served: Served) -> None:
    create = served.client("ada").chat.completions.create
    given: Any = {"model": "default", "tools": [FUNCTION], "temperature": 0, "max_tokens": 48}
    first = create(messages=ASKED, tool_choice="required", **given)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    arguments = json.loads(call.function.arguments)
    check(arguments)
    assert arguments["city"] == "Paris"
    said = [*ASKED, message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)]
    said.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    second = create(messages=said, tool_choice="auto", **{**given, "max_tokens": 8})
    report = second.rekindle
    assert report["outcome"] == "extend" and report["generic_tools"] is True
    assert report["reused_tokens"] >= first.usage.total_tokens - 2


def test_anthropics_client_does_so_too(served: Served) -> None:
    claude = anthropic.Anthropic(base_url=served.url, api_key="u", max_retries=0, default_headers={"X-Agent-ID": "eve"})
    tool = {"name": "get_weather", "description": "The weather in a city today.", "input_schema": SCHEMA}
    given: Any = {"model": "claude-x", "tools": [tool], "extra_body": {"temperature": 0}}
    first = claude.messages.create(messages=ASKED, tool_choice={"type": "any"}, max_tokens=48, **given)
    (block,) = first.content
    assert first.stop_reason == "tool_use" and block.type == "tool_use"
    check(block.input)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
    said = [*ASKED, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=said, max_tokens=8, **given)
    report = second.model_extra["rekindle"]
    assert report["outcome"] == "extend"
    assert report["reused_tokens"] >= first.model_extra["rekindle"]["prompt_tokens"] + first.usage.output_tokens - 2
