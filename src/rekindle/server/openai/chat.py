"""Chat completions as OpenAI spells them, whole and in chunks, out of deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.server.openai.calls import ChatCall
from rekindle.server.openai.parts import Choice, Stamp, chat_logprobs, usage_of
from rekindle.text.tools import ArgumentsPiece, CallEnd, CallStart, Event, TextPiece, ToolFormat, ToolStream

CHUNK = "chat.completion.chunk"


class _ChatChoice:
    """One choice: its text and the calls in it."""

    def __init__(self, choice: Choice, stream: ToolStream | None) -> None:
        self.choice = choice
        self.has_begun = False
        self._stream = stream
        self._texts: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._num_whole = 0

    @property
    def has_ended(self) -> bool:
        """Whether no further call is wanted: what else is generated belongs to nobody."""
        return self._stream is not None and self._stream.ended

    @property
    def reason(self) -> str | None:
        """OpenAI's finish reason: a reply that called a tool and came to its end says so."""
        reason = "stop" if self.has_ended and self.choice.reason else self.choice.reason
        return "tool_calls" if reason == "stop" and self._num_whole else reason

    def take(self, delta: Delta) -> list[Event]:
        """What a delta adds to the message."""
        self.choice.add(replace(delta, logprobs=()) if self.has_ended else delta)
        events = self._events(delta)
        for event in events:
            if isinstance(event, TextPiece):
                self._texts.append(event.text)
            elif isinstance(event, CallStart):
                self._calls.append((event, []))
            elif isinstance(event, ArgumentsPiece):
                self._calls[event.index][1].append(event.text)
            elif isinstance(event, CallEnd):
                self._num_whole += event.whole
        return events

    def _events(self, delta: Delta) -> list[Event]:
        if self._stream is None:
            return [TextPiece(delta.text)] if delta.text else []
        events = self._stream.push(delta.text)
        return events + self._stream.finish() if delta.finish_reason is not None else events

    def message(self) -> dict[str, Any]:
        """The whole message."""
        text = "".join(self._texts)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if self._calls else text}
        message["refusal"] = None
        if self._calls:
            message["tool_calls"] = [
                {"id": start.id, "type": "function", "function": {"name": start.name, "arguments": "".join(pieces)}}
                for start, pieces in self._calls
            ]
        return message


class ChatReply:
    """The answer to one chat call. `form` None: calls are not looked for."""

    def __init__(
        self, stamp: Stamp, call: ChatCall, generations: Sequence[Generation], *, form: ToolFormat | None
    ) -> None:
        self._stamp = stamp
        self._call = call
        self._choices = [
            _ChatChoice(Choice(index, generation), ToolStream(form, parallel=call.parallel) if form else None)
            for index, generation in enumerate(generations)
        ]

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The role first, `rekindle` beside `finish_reason`; none for a delta without text that ends nothing."""
        choice = self._choices[index]
        pieces = [] if choice.has_begun else [{"role": "assistant", "content": ""}]
        choice.has_begun = True
        chunks = [self._chunk(index, piece) for piece in pieces]
        news = [piece for event in choice.take(delta) if (piece := _piece(event)) is not None]
        chunks += [self._chunk(index, piece) for piece in news]
        if choice.reason is not None:
            last = self._chunk(index, {}, choice.reason)
            if choice.choice.report is not None:
                last["rekindle"] = choice.choice.described(return_ids=self._call.return_ids)
            chunks.append(last)
        if len(chunks) > len(pieces) and (new := choice.choice.new_logprobs()):
            chunks[len(pieces)]["choices"][0]["logprobs"] = chat_logprobs(new)
        return chunks

    def has_ended(self, index: int) -> bool:
        """Whether the one call that was wanted is complete."""
        return self._choices[index].has_ended

    def usage_chunks(self) -> list[dict[str, Any]]:
        """One without choices, if it was asked for."""
        if not self._call.include_usage:
            return []
        return [{**self._stamp.head(CHUNK), "choices": [], "usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """The completion; `rekindle` is that of choice 0, and where there are more each has its own."""
        described = [choice.choice.described(return_ids=self._call.return_ids) for choice in self._choices]
        choices = [
            {
                "index": choice.choice.index,
                "message": choice.message(),
                "logprobs": chat_logprobs(choice.choice.logprobs) if self._call.has_logprobs else None,
                "finish_reason": choice.reason,
                **({"rekindle": described[choice.choice.index]} if len(self._choices) > 1 else {}),
            }
            for choice in self._choices
        ]
        head = self._stamp.head("chat.completion")
        return {**head, "choices": choices, "usage": self._usage(), "rekindle": described[0]}

    def _usage(self) -> dict[str, Any]:
        return usage_of([choice.choice for choice in self._choices], len(self._choices))

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._stamp.head(CHUNK), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk


def _piece(event: Event) -> dict[str, Any] | None:
    """The `delta` of a chunk for what a client sees of an event."""
    if isinstance(event, TextPiece):
        return {"content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ArgumentsPiece):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
