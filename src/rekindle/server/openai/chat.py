"""OpenAI's chat completions, whole and in chunks, encoded from deltas.

Reasoning is in `reasoning_content` and, for newer clients, in `reasoning`, as other servers of open models have it:
OpenAI returns none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.server.answers.reply import Stamp
from rekindle.server.openai.calls import ChatCall
from rekindle.server.openai.parts import DataEvents, chat_logprobs, message_of, prompt_logprobs, usage_of
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
        """Return a delta's chunks: role first, `rekindle` with `finish_reason`; none if it adds and ends nothing."""
        reading = self._choices[index]
        choice = reading.choice
        pieces = [] if index in self._begun else [{"role": "assistant", "content": ""}]
        self._begun.add(index)
        chunks = [self._chunk(index, piece) for piece in pieces]
        events = [event for event in reading.take(delta) if self._is_shown(event)]
        news = [piece for event in events if (piece := _piece(event)) is not None]
        chunks += [self._chunk(index, piece) for piece in news]
        if reading.reason is not None:
            last = self._chunk(index, {}, reading.reason)
            if choice.report is not None:
                last["rekindle"] = reading.described(return_ids=self._call.return_ids)
            chunks.append(last)
        if len(chunks) > len(pieces):
            if new := choice.new_logprobs():
                chunks[len(pieces)]["choices"][0]["logprobs"] = chat_logprobs(new)
            if self._call.adds_ids:
                chunks[len(pieces)]["choices"][0]["token_ids"] = choice.new_ids()
        if pieces and self._call.adds_ids:
            chunks[0]["prompt_token_ids"] = list(choice.generation.prompt_ids)
        return chunks

    def has_ended(self, index: int) -> bool:
        """Whether the only allowed call is complete."""
        return self._choices[index].has_ended

    def message(self, index: int) -> Message:
        """Return text, reasoning and calls of a choice."""
        return self._choices[index].parsed.message()

    def ending(self) -> list[dict[str, Any]]:
        """Return the usage chunk, which has no choices, if it was requested."""
        if not self._call.include_usage:
            return []
        return [{**self._stamp.head(CHUNK), "choices": [], "usage": self._usage()}]

    def whole(self) -> dict[str, Any]:
        """Return the completion; `rekindle` is that of choice 0, and with several choices each has its own."""
        described = [reading.described(return_ids=self._call.return_ids) for reading in self._choices]
        choices = [
            {
                "index": index,
                "message": self._message(reading.parsed.message()),
                "logprobs": chat_logprobs(reading.choice.logprobs) if self._call.has_logprobs else None,
                "finish_reason": reading.reason,
                **({"token_ids": list(reading.choice.token_ids)} if self._call.adds_ids else {}),
                **({"rekindle": described[index]} if len(self._choices) > 1 else {}),
            }
            for index, reading in enumerate(self._choices)
        ]
        head = self._stamp.head("chat.completion")
        return {
            **head,
            "choices": choices,
            "usage": self._usage(),
            **self._of_prompt(self._choices[0].choice.generation),
            "rekindle": described[0],
        }

    def _of_prompt(self, generation: Generation) -> dict[str, Any]:
        """Return what was requested of the prompt, as vLLM writes it."""
        found: dict[str, Any] = {}
        if self._call.adds_ids:
            found["prompt_token_ids"] = list(generation.prompt_ids)
        if self._call.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(generation, self._call.num_prompt_logprobs)
        return found

    def _usage(self) -> dict[str, Any]:
        usage = usage_of([reading.choice for reading in self._choices], len(self._choices))
        num_reasoning_tokens = sum(reading.num_reasoning_tokens for reading in self._choices)
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._stamp.head(CHUNK), "choices": [choice]}
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        return chunk

    def _is_shown(self, event: Event) -> bool:
        return self._call.shows_reasoning or not isinstance(event, ReasoningDelta)

    def _message(self, reply: Message) -> dict[str, Any]:
        """Encode the whole message; a reply with only calls has null content."""
        content = reply.content or None if reply.tool_calls else reply.content
        shown = reply if self._call.shows_reasoning else replace(reply, reasoning=None)
        return message_of(shown) | _thought(shown.reasoning) | {"content": content, "refusal": None}


def _thought(reasoning: str | None) -> dict[str, str]:
    return dict.fromkeys(("reasoning_content", "reasoning"), reasoning) if reasoning else {}


def _piece(event: Event) -> dict[str, Any] | None:
    """Encode an event as a chunk's `delta`; None if clients do not see it."""
    match event:
        case TextDelta():
            return {"content": event.text} if event.text else None
        case ReasoningDelta():
            return _thought(event.text) if event.text else None
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case ArgumentsDelta():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
