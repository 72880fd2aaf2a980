"""OpenAI's text completions, whole and in chunks, encoded from deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.server.answers.choice import Choice
from rekindle.server.answers.reply import Stamp
from rekindle.server.openai.calls import CompletionCall
from rekindle.server.openai.parts import DataEvents, TextOffsets, usage_of
from rekindle.text.messages import Message

KIND = "text_completion"


class _TextChoice:
    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.texts: list[str] = []
        self.offsets = TextOffsets()


class CompletionReply(DataEvents):
    """The answer to one completion call, choices in the order of prompts. `decode` turns prompts of ids into text."""

    def __init__(
        self,
        stamp: Stamp,
        call: CompletionCall,
        generations: Sequence[Generation],
        *,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._stamp = stamp
        self._call = call
        self._decode = decode
        self._choices = [_TextChoice(Choice(index, generation)) for index, generation in enumerate(generations)]

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return one chunk for a delta that has text or ends the choice; the first one begins with the echo."""
        choice = self._choices[index]
        text = delta.text if choice.texts else self._echo(index) + delta.text
        choice.texts.append(text)
        choice.choice.add(delta)
        if not text and delta.finish_reason is None:
            return []
        new = choice.choice.new_logprobs()
        entry = {
            "index": index,
            "text": text,
            "logprobs": choice.offsets.encode(new) if self._call.has_logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        chunk: dict[str, Any] = {**self._stamp.head(KIND), "choices": [entry]}
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        if delta.finish_reason is not None and choice.choice.report is not None:
            chunk["rekindle"] = choice.choice.described(return_ids=self._call.return_ids)
        return [chunk]

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice if echo was requested; the engine has accepted its ids by now."""
        asked = self._call.requests[index // self._call.num_choices]
        if not self._call.echo:
            return ""
        return asked.text if asked.text is not None else self._decode(asked.token_ids or ())

    def has_ended(self, index: int) -> bool:
        """Return False: a choice ends with its generation."""
        return False

    def message(self, index: int) -> Message:
        """Return the continuation, without the echo."""
        choice = self._choices[index]
        return Message("assistant", "".join(choice.texts)[len(self._echo(index)) :])

    def ending(self) -> list[dict[str, Any]]:
        """Return the usage chunk, which has no choices, if it was requested."""
        return [{**self._stamp.head(KIND), "choices": [], "usage": self._usage()}] if self._call.include_usage else []

    def whole(self) -> dict[str, Any]:
        """Return the completion; `rekindle` is that of choice 0, and with several choices each has its own."""
        described = [choice.choice.described(return_ids=self._call.return_ids) for choice in self._choices]
        choices = [
            {
                "index": choice.choice.index,
                "text": "".join(choice.texts),
                "logprobs": TextOffsets().encode(choice.choice.logprobs) if self._call.has_logprobs else None,
                "finish_reason": choice.choice.reason,
                **({"rekindle": described[choice.choice.index]} if len(self._choices) > 1 else {}),
            }
            for choice in self._choices
        ]
        return {**self._stamp.head(KIND), "choices": choices, "usage": self._usage(), "rekindle": described[0]}

    def _usage(self) -> dict[str, Any]:
        return usage_of([choice.choice for choice in self._choices], self._call.num_choices)
