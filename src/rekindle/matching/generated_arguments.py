"""Arguments of tool calls as the model generated them, for clients that write the same JSON anew.

A client that parses arguments and serializes them again sends `{"a":1}` for `{"a": 1}`: another text, so the whole call
and all after it would be computed again. Stored text that a call begins in the same way, and whose arguments are the
same JSON value, shows how they were written. Pure; knows no branches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rekindle.text.arguments import ValueScan, read_object
from rekindle.text.messages import GUARD, Message, ToolCall
from rekindle.text.vocabulary import MARK

Opening = Callable[[str], bytes | None]  # name of a tool -> how its calls begin in a key; None: not known


def with_generated_arguments(messages: Sequence[Message], stored: bytes, opening: Opening) -> tuple[Message, ...]:
    """Return the messages with the arguments of their calls as they are in the `stored` key of a conversation.

    Only text changes, never a value. Of several calls with one value, each gets the text of its turn.
    """
    found = _Generated(stored, opening)
    return tuple(
        replace(message, tool_calls=tuple(map(found.written, message.tool_calls))) if message.tool_calls else message
        for message in messages
    )


class _Generated:
    """The calls of one stored text, read as far as they are asked for."""

    def __init__(self, stored: bytes, opening: Opening) -> None:
        self._stored = stored
        self._opening = opening
        self._calls: dict[str, list[tuple[Any, str]]] = {}  # by name: value and text of each call
        self._seen: Counter[tuple[str, str]] = Counter()

    def written(self, call: ToolCall) -> ToolCall:
        """Return the call with its arguments as they were generated, if they are the same value."""
        value = read_object(call.arguments) if call.arguments.strip() else None
        if value is None:
            return call
        texts = [text for other, text in self._of(call.name) if is_same(value, other)]
        if not texts:
            return call
        turn = (call.name, json.dumps(value, sort_keys=True))
        at = min(self._seen[turn], len(texts) - 1)
        self._seen[turn] += 1
        return replace(call, arguments=texts[at])

    def _of(self, name: str) -> list[tuple[Any, str]]:
        if name not in self._calls:
            opening = self._opening(name)
            self._calls[name] = [] if not opening else self._read(opening)
        return self._calls[name]

    def _read(self, opening: bytes) -> list[tuple[Any, str]]:
        """Return the JSON objects that follow each occurrence of the opening."""
        found = []
        at = self._stored.find(opening)
        while at >= 0:
            start = at + len(opening)
            end = self._stored.find(MARK, start)
            text = self._stored[start : end if end >= 0 else None].decode("utf-8", "ignore").lstrip()
            scan = ValueScan(GUARD)
            text = text[: scan.read(text, 0)]
            value = read_object(text) if scan.done else None  # None: cut off, or not JSON
            if value is not None:
                found.append((value, text))
            at = self._stored.find(opening, start)
        return found


def is_same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same: numbers by value, members of objects in any order."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
