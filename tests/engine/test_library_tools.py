"""Tools of the library's chats: their calls are bound as those of the routes are."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import ChatResult
from rekindle.errors import BadRequest
from rekindle.text.replies import ParsedReply, ReplyStream

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["attic", "cellar"]}, "floor": {"type": "integer"}},
    "required": ["place", "floor"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
ASKED = [{"role": "user", "content": "Look at the attic."}]


def calls_in(engine: Engine, result: ChatResult) -> list[tuple[str, str]]:
    said, stream = ParsedReply(), ReplyStream(engine.reply_format, tools=[LOOK])
    for event in stream.push(result.text) + stream.finish():
        said.take(event)
    return [(call.name, call.arguments) for call in said.message().tool_calls]


def test_calls_of_a_strict_tool_have_arguments_of_its_schema() -> None:
    with Engine.from_pretrained(store="off", threads=1, hot_bytes="64MiB") as engine:
        begins = int(engine.encoder.encode(engine.encoder.render_text("<tool_call>"))[0])
        options: dict[str, Any] = {"temperature": 1.5, "max_tokens": 200, "logit_bias": [(begins, 8.0)]}
        ada = engine.agent("ada")
        ways: tuple[Callable[..., ChatResult], ...] = (lambda *a, **o: engine.chat(None, *a, **o), ada.chat)
        called = []
        for seed in range(8):
            for chat in ways:
                result = chat(ASKED, tools=[LOOK], seed=seed, **options)
                if result.finish_reason == "stop":
                    called += calls_in(engine, result)
        assert len(called) >= 4, "the model is pushed to call"
        for name, arguments in called:
            given = json.loads(arguments)
            assert name == "look" and set(given) == {"place", "floor"}
            assert given["place"] in ("attic", "cellar") and isinstance(given["floor"], int)
        unenforced = {**LOOK["function"], "parameters": {"type": "array", "uniqueItems": True}}
        with pytest.raises(BadRequest, match=r"^tools\[0\]\.function\.parameters: "):
            engine.chat(None, ASKED, tools=[{"type": "function", "function": unenforced}], max_tokens=1)
        wrong: tuple[Any, ...] = ({"name": "look"}, {"type": "function", "function": {}}, "look")
        for tool in wrong:
            with pytest.raises(BadRequest, match=r"^tools\[1\]: a tool is"):
                engine.chat(None, ASKED, tools=[LOOK, tool], max_tokens=1)
