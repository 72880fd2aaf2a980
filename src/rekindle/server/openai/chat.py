"""Chat completions as OpenAI spells them, whole and in chunks, out of deltas.

Thoughts stand in `reasoning_content`, as servers of open models have it: OpenAI shows none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.server.answers.reply import Stamp
from rekindle.server.openai.calls import ChatCall
from rekindle.server.openai.parts import DataEvents, chat_logprobs, message_of, usage_of
from rekindle.text.messages import Message
from rekindle.text.replies import ArgumentsDelta, CallStart, Event, ReasoningDelta, ReplyFormat, TextDelta

CHUNK = "chat.completion.chunk"


class ChatReply(DataEvents):
    """The answer to one chat call."""

    def __init__(self, stamp: Stamp, call: ChatCall, generations: Sequence[Generation], *, form: ReplyFormat) -> None:
        self._stamp = stamp
        self._call = call
        self._begun: set[int] = set()
        self._choices = [
            ReplyParser(Choice(index, generation), form, tools=call.read_tools, parallel=call.parallel)
            for index, generation in enumerate(generations)
        ]

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The role first, `rekindle` beside `finish_reason`; none for a delta without text that ends nothing."""
        reading = self._choices[index]
        choice = reading.choice
        pieces = [] if index in self._begun else [{"role": "assistant", "content": ""}]
        self._begun.add(index)
        chunks = [self._chunk(index, piece) for piece in pieces]
        news = [piece for event in reading.take(delta) if (piece := _piece(event)) is not None]
        chunks += [self._chunk(index, piece) for piece in news]
        if reading.reason is not None:
            last = self._chunk(index, {}, reading.reason)
            if choice.report is not None:
                last["rekindle"] = choice.described(return_ids=self._call.return_ids)
            chunks.append(last)
        if len(chunks) > len(pieces) and (new := choice.new_logprobs()):
            chunks[len(pieces)]["choices"][0]["logprobs"] = chat_logprobs(new)
        return chunks

    def has_ended(self, index: int) -> bool:
        """Whether the one call that was wanted is complete."""
        return self._choices[index].has_ended

    def message(self, index: int) -> Message:
        """Text, thoughts and calls of a choice."""
        return self._choices[index].parsed.message()

    def ending(self) -> list[dict[str, Any]]:
        """One without choices, if it was asked for."""
        if not self._call.include_usage:
            return []
        return [{**self._stamp.head(CHUNK), "choices": [], "usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """The completion; `rekindle` is that of choice 0, and where there are more each has its own."""
        described = [reading.choice.described(return_ids=self._call.return_ids) for reading in self._choices]
        choices = [
            {
                "index": index,
                "message": _message(reading.parsed.message()),
                "logprobs": chat_logprobs(reading.choice.logprobs) if self._call.has_logprobs else None,
                "finish_reason": reading.reason,
                **({"rekindle": described[index]} if len(self._choices) > 1 else {}),
            }
            for index, reading in enumerate(self._choices)
        ]
        head = self._stamp.head("chat.completion")
        return {**head, "choices": choices, "usage": self._usage(), "rekindle": described[0]}

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([reading.choice for reading in self._choices], len(self._choices))
        thought = sum(reading.num_reasoning_tokens for reading in self._choices)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": thought}}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._stamp.head(CHUNK), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk


def _message(said: Message) -> dict[str, Any]:
    """The whole message; a reply of calls alone has no content."""
    content = said.content or None if said.tool_calls else said.content
    return message_of(said) | {"content": content, "refusal": None}


def _piece(event: Event) -> dict[str, Any] | None:
    """The `delta` of a chunk for what a client sees of an event."""
    match event:
        case TextDelta():
            return {"content": event.text} if event.text else None
        case ReasoningDelta():
            return {"reasoning_content": event.text} if event.text else None
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ArgumentsDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
