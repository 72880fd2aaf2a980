"""The output of a response as it grows: its items, and the events for each step.

Owns which item a delta of the reply belongs to and the order of events around it: an item is added, then its parts;
they grow, and all are done before the next item begins. The reply numbers the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

from rekindle.server.responses.items import Item, call_item, message_item, new_item_id, reasoning_item, sealed
from rekindle.server.responses.tools import Function
from rekindle.text.replies import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta

Status = Literal["completed", "incomplete"]
Events = list[dict[str, Any]]


class Output:
    """Items of one reply. `seals`: reasoning is also sent as `encrypted_content`."""

    def __init__(self, functions: Mapping[str, Function], *, seals: bool) -> None:
        self.items: list[Item] = []
        self._functions = functions
        self._seals = seals
        self._texts: list[str] = []  # of the growing item
        self._is_growing = False

    def take(self, event: Event) -> Events:
        """Add a delta of the reply; return its events."""
        match event:
            case ReasoningDelta(text=text) if text:
                return [*self._at("reasoning"), self._grown("response.reasoning_text.delta", text, part=True)]
            case TextDelta(text=text) if text:
                begun = self._at("message")
                return [*begun, self._grown("response.output_text.delta", text, part=True) | {"logprobs": []}]
            case CallStart():
                namespace, name = self._functions.get(event.name, (None, event.name))
                item = call_item(new_item_id("function_call"), event.id, name, "", namespace=namespace)
                return [*self.close("completed"), *self._added(item)]
            case ArgumentsDelta(text=text) if text:
                return [self._grown("response.function_call_arguments.delta", text)]
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
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done = [self._step("response.function_call_arguments.done", arguments=text)]
        else:
            part = item["content"][0]
            part["text"] = text
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            done = [
                self._step(f"response.{kind}.done", content_index=0, text=text, **more),
                self._step("response.content_part.done", content_index=0, part=deepcopy(part)),
            ]
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        return [*done, self._item_event("response.output_item.done", item)]

    def _at(self, kind: Literal["reasoning", "message"]) -> Events:
        """Begin an item of this kind with one empty part, unless one is already growing."""
        if self._is_growing and self.items[-1]["type"] == kind:
            return []
        make = message_item if kind == "message" else reasoning_item
        item = make(new_item_id(kind), "")
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
