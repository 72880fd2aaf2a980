"""Answers to requests that force a tool of Anthropic's servers, such as a search in the web, which nobody runs here.

Clients send a request of its own to search, and show what it returns. They get the tool's own error, and a sentence
where they show text alone. Nothing is generated: a model without the tool would make results up.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.server.answers.reply import Stamp
from rekindle.server.answers.sse import event
from rekindle.server.anthropic.bodies import ToolChoice
from rekindle.server.anthropic.known_tools import described
from rekindle.server.anthropic.usage import usage_of

# The tools whose results have an error that says so.
_RESULTS = ("web_search", "web_fetch", "code_execution")


def forced_server_tool(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> str | None:
    """Return the name of the tool that must be called and that only Anthropic's servers run; None: there is none."""
    left_out = [tool for tool in tools if tool.get("type") not in (None, "custom") and described(tool) is None]
    if choice is None or choice.type not in ("any", "tool"):
        return None
    if choice.type == "any" and len(left_out) < len(tools):
        return None
    wanted = choice.name if choice.type == "tool" else None
    return next((str(tool.get("name")) for tool in left_out if wanted in (None, tool.get("name"))), None)


class UnavailableAnswer:
    """The answer for the tool `name`, whole or as events."""

    def __init__(self, stamp: Stamp, name: str) -> None:
        self._head = {"id": stamp.id, "type": "message", "role": "assistant", "model": stamp.model}
        self._usage = usage_of(None, ())
        self._content = [*_result(name), {"type": "text", "text": f"{name} is not available on this server."}]

    def whole(self) -> dict[str, Any]:
        """Return the message."""
        return self._head | {
            "content": self._content,
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": self._usage,
        }

    def events(self) -> list[bytes]:
        """Return the same message as encoded events of a stream."""
        start: dict[str, Any] = self._head | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage,
        }
        events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
        for index, block in enumerate(self._content):
            is_text = block["type"] == "text"
            opened = block | {"text": ""} if is_text else block
            events.append({"type": "content_block_start", "index": index, "content_block": opened})
            if is_text:
                delta = {"type": "text_delta", "text": block["text"]}
                events.append({"type": "content_block_delta", "index": index, "delta": delta})
            events.append({"type": "content_block_stop", "index": index})
        stopped = {"stop_reason": "end_turn", "stop_sequence": None}
        events += [{"type": "message_delta", "delta": stopped, "usage": self._usage}, {"type": "message_stop"}]
        return [event(each, each["type"]) for each in events]


def _result(name: str) -> list[dict[str, Any]]:
    """Return the call of the tool and its error, in the shape of its results; nothing for tools without one."""
    if name not in _RESULTS:
        return []
    call_id = f"srvtoolu_{uuid.uuid4().hex[:24]}"
    failure = {"type": f"{name}_tool_result_error", "error_code": "unavailable"}
    return [
        {"type": "server_tool_use", "id": call_id, "name": name, "input": {}},
        {"type": f"{name}_tool_result", "tool_use_id": call_id, "content": failure},
    ]
