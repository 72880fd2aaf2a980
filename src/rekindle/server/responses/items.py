"""Items of the responses API: what callers send, in the one form that is stored, and the conversation they make.

Owns which items are accepted, what is stored of each, and how items join to messages: a reply is one message, however
many items hold its reasoning, text and calls. What cannot be shown is left out, what cannot be served is refused by its
index. Knows no HTTP and no store.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import BadRequest
from rekindle.server.responses.call_items import (
    BY_CALL,
    BY_OUTPUT,
    arguments_of,
    name_of,
    output_text,
    read_call,
    read_output,
)
from rekindle.server.responses.item_fields import Item, item_id
from rekindle.text.messages import Message, ToolCall, check_text, content_text
from rekindle.text.omissions import Omissions

SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, "user", "assistant")
PREFIXES = {"message": "msg", "reasoning": "rs"}
ITEM_TYPES = (*PREFIXES, *BY_CALL, *BY_OUTPUT)
_SEALED = "rekindle-thoughts-1:"


def sealed(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send nothing else back: encoded, not secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def opened(text: str) -> str | None:
    """The text that `sealed` encoded; None for anything else, such as content another provider encrypted."""
    if not text.startswith(_SEALED):
        return None
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class ItemReader:
    """Reads the items of one request. `find` returns the stored item of an id, or None."""

    find: Callable[[str], Item | None]
    omissions: Omissions

    def read(self, given: str | Sequence[Mapping[str, Any]] | None) -> list[Item]:
        """Return every item in the form that is stored; BadRequest names the first that cannot be served."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        read = (self._item(item, f"input[{index}]") for index, item in enumerate(given or ()))
        return [item for item in read if item is not None]

    def _item(self, item: Mapping[str, Any], where: str) -> Item | None:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        match kind:
            case "message":
                return _message(item, where, self.omissions)
            case str() if kind in BY_CALL:
                return read_call(item, where)
            case str() if kind in BY_OUTPUT:
                return read_output(item, where, self.omissions)
            case "reasoning":
                return self._reasoning(item, where)
            case "item_reference":
                return self._referenced(item, where)
        self.omissions.whole(item, where)
        return None

    def _reasoning(self, item: Mapping[str, Any], where: str) -> Item:
        content, encrypted = item.get("content"), item.get("encrypted_content")
        stored = self.find(item["id"]) if isinstance(item.get("id"), str) else None
        if content:
            if not isinstance(content, list) or any(not isinstance(part, Mapping) for part in content):
                raise BadRequest(f"{where}.content must be a list of parts", param=f"{where}.content")
            texts = [part.get("text") for part in content]
            if any(not isinstance(text, str) for text in texts):
                raise BadRequest(f"{where}.content: every part needs its text", param=f"{where}.content")
            text = check_text("".join(texts), f"{where}.content")
        elif isinstance(encrypted, str) and (inside := opened(encrypted)) is not None:
            text = check_text(inside, f"{where}.encrypted_content")
        elif stored is not None and stored["type"] == "reasoning":
            text = reasoning_of(stored)
        else:
            text = ""
            if encrypted or item.get("summary"):  # encrypted elsewhere, or a summary of what is not here
                self.omissions.whole(item, where)
        return reasoning_item(item_id(item, PREFIXES["reasoning"]), text)

    def _referenced(self, item: Mapping[str, Any], where: str) -> Item:
        wanted = item.get("id")
        found = self.find(wanted) if isinstance(wanted, str) else None
        if found is None:
            message = f"{where}: item {str(wanted)[:100]!r} is not stored here: send the item itself"
            raise BadRequest(message, param=f"{where}.id")
        return found


def _message(item: Mapping[str, Any], where: str, omissions: Omissions) -> Item:
    role = item.get("role")
    if role not in ROLES:
        message = f"{where}.role is {str(role)[:100]!r}: use one of {', '.join(ROLES)}"
        raise BadRequest(message, param=f"{where}.role")
    text = content_text(item.get("content"), f"{where}.content", omissions)
    own_id = item_id(item, PREFIXES["message"])
    if role == "assistant":
        return message_item(own_id, text)
    part = {"type": "input_text", "text": text}
    head = {"id": own_id, "type": "message", "status": "completed"}
    return {**head, "role": role, "content": [part]}


def message_item(id: str, text: str) -> Item:
    """A message item: text of a reply."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": id, "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def reasoning_item(id: str, text: str) -> Item:
    """A reasoning item of a reply."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "status": "completed", "summary": [], "content": content}


def reasoning_of(item: Item) -> str:
    """The text of a stored reasoning item."""
    return "".join(part["text"] for part in item["content"])


def check_outputs(history: Iterable[Item], items: Sequence[Item]) -> None:
    """BadRequest if an output answers no earlier call: the conversation is incomplete."""
    called = {call_id for item in history for call_id in _ids_of_call(item)}
    for index, item in enumerate(items):
        called.update(_ids_of_call(item))
        if item["type"] in BY_OUTPUT and item["call_id"] not in called:
            where = f"input[{index}]"
            message = (
                f"{where}: no function call with call_id {item['call_id'][:100]!r} comes before its output: send the "
                "call's item, too, or previous_response_id"
            )
            raise BadRequest(message, param=f"{where}.call_id")


def _ids_of_call(item: Item) -> tuple[str, ...]:
    """The ids by which outputs name a call: results of a local shell may have that of its item."""
    return (item["call_id"], item["id"]) if item["type"] in BY_CALL else ()


@dataclass(slots=True)
class _Turn:
    """A reply under construction. Text before and after a call or reasoning joins into one message."""

    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    last: str = ""

    def continues(self, item: Item) -> bool:
        """Whether `item` belongs to the same reply: two messages in a row are two replies."""
        return item["type"] != "message" or self.last != "message"

    def take(self, item: Item) -> None:
        self.last = item["type"]
        if self.last == "reasoning":
            self.reasoning.append(reasoning_of(item))
        elif self.last == "message":
            self.texts.append(item["content"][0]["text"])
        else:
            self.calls.append(ToolCall(item["call_id"], name_of(item), arguments_of(item)))

    def message(self) -> Message:
        reasoning = "".join(self.reasoning)
        return Message("assistant", "".join(self.texts), tool_calls=tuple(self.calls), reasoning=reasoning or None)


def _is_of_reply(item: Item) -> bool:
    return item["type"] == "reasoning" or item["type"] in BY_CALL or item.get("role") == "assistant"


def messages_of(items: Iterable[Item], instructions: str | None) -> tuple[Message, ...]:
    """Join stored items to a conversation; `instructions` and system messages at its head are one system message."""
    head = [instructions] if instructions else []
    messages: list[Message] = []
    turn: _Turn | None = None
    call_ids: dict[str, str] = {}  # by every id that an output may have
    for item in items:
        for each in _ids_of_call(item):
            call_ids.setdefault(each, item["call_id"])
        if turn is not None and not (_is_of_reply(item) and turn.continues(item)):
            messages.append(turn.message())
            turn = None
        if _is_of_reply(item):
            turn = turn or _Turn()
            turn.take(item)
        elif item["type"] in BY_OUTPUT:
            call_id = call_ids.get(item["call_id"], item["call_id"])
            messages.append(Message("tool", output_text(item), tool_call_id=call_id))
        elif item["role"] in SYSTEM_ROLES and not messages:
            head.append(item["content"][0]["text"])
        else:
            role = "system" if item["role"] in SYSTEM_ROLES else item["role"]
            messages.append(Message(role, item["content"][0]["text"]))
    if turn is not None:
        messages.append(turn.message())
    return ((Message("system", "\n\n".join(head)),) if head else ()) + tuple(messages)
