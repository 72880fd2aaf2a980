"""The output of a response as it grows: its items, and the events for each step.

Owns which item a delta of the reply belongs to and the order of events around it: an item is added, then its parts;
they grow, and all are done before the next item begins. The reply numbers the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from rekindle.server.responses.call_items import BY_CALL, CUSTOM, FUNCTION, call_item, held_of
from rekindle.server.responses.item_fields import Item, new_item_id
from rekindle.server.responses.items import PREFIXES, message_item, reasoning_item, sealed
from rekindle.server.responses.tools import OfferedTool
from rekindle.text.replies import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta

Status = Literal["completed", "incomplete"]
Events = list[dict[str, Any]]


class Output:
    """Items of one reply. `seals`: reasoning is also sent as `encrypted_content`."""

    def __init__(self, tools: Mapping[str, OfferedTool], *, seals: bool) -> None:
        self.items: list[Item] = []
        self._tools = tools
        self._seals = seals
        self._texts: list[str] = []  # of the growing item
        self._is_growing = False
        self._kind = FUNCTION  # of the growing call

    def take(self, event: Event) -> Events:
        """Add a delta of the reply; return its events."""
        match event:
            case ReasoningDelta(text=text) if text:
                return [*self._at("reasoning"), self._grown("response.reasoning_text.delta", text, part=True)]
            case TextDelta(text=text) if text:
                begun = self._at("message")
                return [*begun, self._grown("response.output_text.delta", text, part=True) | {"logprobs": []}]
            case CallStart():
                return [*self.close("completed"), *self._called(event)]
            case ArgumentsDelta(text=text) if text and self._kind is FUNCTION:
                return [self._grown("response.function_call_arguments.delta", text)]
            case ArgumentsDelta(text=text):
                self._texts.append(text)
            case CallEnd():
                return self.close("completed" if event.whole else "incomplete")
        return []

    def finish(self, status: Status) -> Events:
        """End the reply; an empty one becomes an empty message."""
        begun = [] if self.items else self._at("message")
        return [*begun, *self.close(status)]

    def close(self, status: Status) -> Events:
        """End the growing item, if there is one."""
        if not self._is_growing:
            return []
        self._is_growing = False
        text = "".join(self._texts)
        done = self._ended_call(text) if self.items[-1]["type"] in BY_CALL else self._ended_part(text)
        item = self.items[-1]
        item["status"] = status
        return [*done, self._item_event("response.output_item.done", item)]

    def _ended_part(self, text: str) -> Events:
        """End the one part of a message or of reasoning."""
        item = self.items[-1]
        is_message, part = item["type"] == "message", item["content"][0]
        part["text"] = text
        if not is_message and self._seals:
            item["encrypted_content"] = sealed(text)
        kind = "output_text" if is_message else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if is_message else {}
        return [
            self._step(f"response.{kind}.done", content_index=0, text=text, **more),
            self._step("response.content_part.done", content_index=0, part=deepcopy(part)),
        ]

    def _called(self, event: CallStart) -> Events:
        """Begin a call. Shells and patches are announced at their end: only then is it known whether they are such."""
        tool = self._tools.get(event.name) or OfferedTool(event.name)
        self._kind = tool.kind
        is_named = tool.kind in (FUNCTION, CUSTOM)
        item = call_item(tool.kind if is_named else FUNCTION, event.id, tool.name, "", namespace=tool.namespace)
        added = self._added(item)
        return added if is_named else []

    def _ended_call(self, arguments: str) -> Events:
        """End a call; one of a shell or a patch whose arguments do not have their form is a function's."""
        item, kind = self.items[-1], self._kind
        if kind is FUNCTION:
            item["arguments"] = arguments
            return [self._step("response.function_call_arguments.done", arguments=arguments)]
        held = held_of(kind, arguments)
        if kind is CUSTOM:
            item["input"] = held
            grown = self._step("response.custom_tool_call_input.delta", delta=held)
            return [grown, self._step("response.custom_tool_call_input.done", input=held)]
        item["arguments"] = arguments
        if held is not None:
            item = self.items[-1] = call_item(kind, item["call_id"], kind.tool, held)
        return [self._item_event("response.output_item.added", {**item, "status": "in_progress"})]

    def _at(self, kind: Literal["reasoning", "message"]) -> Events:
        """Begin an item of this kind with one empty part, unless one is already growing."""
        if self._is_growing and self.items[-1]["type"] == kind:
            return []
        make = message_item if kind == "message" else reasoning_item
        item = make(new_item_id(PREFIXES[kind]), "")
        part = item["content"].pop()
        events = [*self.close("completed"), *self._added(item)]
        item["content"].append(part)
        return [*events, self._step("response.content_part.added", content_index=0, part=deepcopy(part))]

    def _added(self, item: Item) -> Events:
        item["status"] = "in_progress"
        self.items.append(item)
        self._texts = []
        self._is_growing = True
        return [self._item_event("response.output_item.added", item)]

    def _item_event(self, kind: str, item: Item) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": deepcopy(item)}

    def _grown(self, kind: str, text: str, *, part: bool = False) -> dict[str, Any]:
        self._texts.append(text)
        return self._step(kind, delta=text, **({"content_index": 0} if part else {}))

    def _step(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}
