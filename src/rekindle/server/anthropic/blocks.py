"""The content blocks of a reply, built while it is streamed.

Owns the order that Anthropic's clients rely on: one block at a time, its deltas between its start and its stop, indices
from 0; the blocks in a stream are the same as those of the whole answer.
"""

from __future__ import annotations

from typing import Any

from rekindle.server.answers.arguments import ArgumentsJson
from rekindle.server.anthropic.signatures import sign
from rekindle.text.replies import ArgumentsDelta, CallEnd, CallStart, Event, ReasoningDelta, TextDelta

Events = list[dict[str, Any]]


class Blocks:
    """The blocks of one reply; `take` and `close` return stream events. `hidden` omits the text of thinking blocks."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []  # of the open block
        self._arguments = ArgumentsJson()
        self._is_open = False

    def content(self) -> Events:
        """Return all blocks; the last one must be closed."""
        assert not self._is_open, "a block is still open"
        return self._blocks

    def take(self, event: Event) -> Events:
        """Return the stream events that one event of the reply adds."""
        match event:
            case ReasoningDelta() if event.text:
                events = self._begin("thinking", {"thinking": "", "signature": ""})
                self._pieces.append(event.text)
                return events if self._hidden else events + self._delta("thinking_delta", thinking=event.text)
            case TextDelta() if event.text:  # a stray marker has no text, and clients refuse to send empty blocks back
                events = self._begin("text", {"text": ""})
                self._pieces.append(event.text)
                return events + self._delta("text_delta", text=event.text)
            case CallStart():
                self._arguments = ArgumentsJson()
                events = self.close()
                return events + self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
            case ArgumentsDelta():
                return self._json(self._arguments.push(event.text))
            case CallEnd():
                return self.close()
        return []

    def close(self) -> Events:
        """End the open block, if any."""
        if not self._is_open:
            return []
        block, text = self._blocks[-1], "".join(self._pieces)
        events: Events = []
        if block["type"] == "thinking":
            signature = sign(text, hidden=self._hidden)
            block |= {"thinking": "" if self._hidden else text, "signature": signature}
            events = self._delta("signature_delta", signature=signature)
        elif block["type"] == "text":
            block["text"] = text
        else:
            events = self._json(self._arguments.finish())
            block["input"] = self._arguments.value()
        self._is_open = False
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _begin(self, kind: str, empty: dict[str, Any]) -> Events:
        """Open a block of this kind, unless one is already open."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return []
        events, block = self.close(), {"type": kind, **empty}
        self._blocks.append(block)
        self._pieces, self._is_open = [], True
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _json(self, text: str) -> Events:
        return self._delta("input_json_delta", partial_json=text) if text else []

    def _delta(self, kind: str, **what: str) -> Events:
        index = len(self._blocks) - 1
        return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, **what}}]
