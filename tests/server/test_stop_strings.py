"""Stop strings end the text of an answer: they are nothing in reasoning, in calls and in constrained replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.scripted import LOOK, serving, write_scripted_model

LOOKS = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory: Path = tmp_path_factory.mktemp("stops")
    model = write_scripted_model(directory / "model")
    with serving(model=str(model), store=directory / "store", threads=1, hot_bytes="64MiB", block_tokens=16) as running:
        yield running


def choice(served: Served, word: str, stop: list[str], **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": f"{word} please"}], "stop": stop, "temperature": 0}
    answer = served.send("POST", "/v1/chat/completions", {**body, "max_tokens": 60, **more})
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


@pytest.mark.parametrize("stop", ["weigh", "</think>", "\n\n", "Lamps", "A feather", "less"])
def test_reasoning_is_no_place_to_stop(served: Served, stop: str) -> None:
    found = choice(served, "muse", [stop])
    assert found["message"]["reasoning_content"] == "Lamps weigh little."
    assert found["message"]["content"] == "A feather weighs less.".partition(stop)[0]
    assert found["finish_reason"] == "stop"


def test_nor_in_the_other_dialects(served: Served) -> None:
    asked = [{"role": "user", "content": "muse please"}]
    body = {"model": "default", "messages": asked, "stop_sequences": ["weigh"], "max_tokens": 60, "temperature": 0}
    reply = served.send("POST", "/v1/messages", body).json
    assert [block["type"] for block in reply["content"]] == ["thinking", "text"]
    assert reply["content"][1]["text"] == "A feather "
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "weigh")
    options = {"stop": ["weigh"], "temperature": 0, "num_predict": 60}
    body = {"model": "default", "messages": asked, "stream": False, "options": options, "think": True}
    message = served.send("POST", "/api/chat", body).json["message"]
    assert (message["thinking"], message["content"]) == ("Lamps weigh little.", "A feather ")


@pytest.mark.parametrize("stop", ["attic", '"', "}", "\n", "call>", "look."])
def test_nor_is_a_call(served: Served, stop: str) -> None:
    found = choice(served, "look", [stop], tools=[LOOKS])
    calls = found["message"].get("tool_calls", [])
    if stop == "look.":
        assert (found["message"]["content"], calls) == ("Let me ", [])
    else:
        assert [call["function"]["arguments"] for call in calls] == [LOOK]


def test_nor_a_call_that_is_forced(served: Served) -> None:
    forced = {"type": "function", "function": {"name": "look"}}
    found = choice(served, "talk", ["cellar", "}", '"'], tools=[LOOKS], tool_choice=forced)
    assert [json.loads(call["function"]["arguments"]) for call in found["message"]["tool_calls"]] == [
        {"place": "cellar"}
    ]


def test_nor_a_reply_of_a_schema(served: Served) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    found = choice(served, "talk", ['"', "a", "}", "e"], response_format=shape)
    assert json.loads(found["message"]["content"]).keys() == {"a"}


def test_a_completion_has_text_only(served: Served) -> None:
    body = {"prompt": "<|im_start|><|muse|>", "stop": ["weigh"], "temperature": 0, "max_tokens": 60}
    assert "little" not in served.send("POST", "/v1/completions", body).json["choices"][0]["text"]
