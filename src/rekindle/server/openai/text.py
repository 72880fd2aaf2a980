"""OpenAI's text completions, whole and in chunks, encoded from deltas.

Where the prompt is echoed, its tokens come first in the logprobs, too; the first of them has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, FinishReason, Progress
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.answer import Stamp
from rekindle.server.answers.choice import Choice
from rekindle.server.openai.calls import CompletionCall
from rekindle.server.openai.replies import DataEvents, PromptProgress, TextOffsets, prompt_logprobs, usage_of
from rekindle.text.messages import Message

KIND = "text_completion"


class _TextChoice:
    def __init__(self, choice: Choice, *, by_id: bool) -> None:
        self.choice = choice
        self.has_chunk = False
        self.texts: list[str] = []
        self.offsets = TextOffsets(by_id=by_id)


class CompletionReply(DataEvents):
    """The answer to one completion call, choices in the order of prompts.

    `decode` turns prompts of ids into text, `token_bytes` a token.
    """

    def __init__(
        self,
        stamp: Stamp,
        call: CompletionCall,
        generations: Sequence[Generation],
        *,
        decode: Callable[[Sequence[int]], str],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._stamp = stamp
        self.id = stamp.id
        self._call = call
        self._progress = PromptProgress()
        self._decode = decode
        self._token_bytes = token_bytes
        self._choices = [
            _TextChoice(Choice(index, generation), by_id=call.tokens_by_id)
            for index, generation in enumerate(generations)
        ]

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return one chunk for a delta that has text or ends the choice; the first one begins with the echo."""
        choice = self._choices[index]
        is_first = not choice.has_chunk
        text = delta.text if choice.texts else self._echo(index) + delta.text
        choice.texts.append(text)
        choice.choice.add(delta)
        if not text and delta.finish_reason is None:
            return []
        choice.has_chunk = True
        new = choice.choice.new_logprobs()
        entry: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(choice, choice.offsets, new, from_start=is_first),
            "finish_reason": None if delta.finish_reason is None else self._reason(choice),
        }
        if self._call.adds_ids:
            entry["token_ids"] = choice.choice.new_ids()
            if is_first:
                entry["prompt_token_ids"] = list(choice.choice.generation.prompt_ids)
        chunk = self._chunk(entry)
        if delta.finish_reason is not None and choice.choice.report is not None:
            chunk["rekindle"] = choice.choice.described(return_ids=self._call.return_ids)
        return [chunk]

    def _chunk(self, entry: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._stamp.head(KIND), "choices": [entry]}
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        return chunk

    def progressed(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """Return a chunk without text."""
        said = self._progress.of(index, progress)
        entry = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        return [] if said is None else [{**self._chunk(entry), **said}]

    def _echo(self, index: int) -> str:
        """Return the prompt of a choice if echo was requested; the engine has accepted its ids by now."""
        asked = self._call.requests[index // self._call.num_choices]
        if not self._call.echo:
            return ""
        return asked.text if asked.text is not None else self._decode(asked.token_ids or ())

    def _logprobs(
        self, choice: _TextChoice, offsets: TextOffsets, tokens: Sequence[TokenLogprob], *, from_start: bool
    ) -> dict[str, Any] | None:
        """Return the `logprobs` object of `tokens`; `from_start`: an echoed prompt comes before them."""
        if not self._call.has_logprobs:
            return None
        generation = choice.choice.generation
        if not (from_start and self._call.echo) or generation.prompt_logprobs is None:
            return offsets.encode(tokens)
        num_top = self._call.num_logprobs
        prompt = [replace(each, top=each.top[:num_top]) for each in generation.prompt_logprobs if each is not None]
        first = generation.prompt_ids[0]
        return offsets.encode([*prompt, *tokens], first=TokenLogprob(first, 0.0, self._token_bytes(first)))

    def _reason(self, choice: _TextChoice) -> FinishReason | None:
        """Return why a choice ended; a reply of no tokens has reached its length."""
        asked = self._call.requests[choice.choice.index // self._call.num_choices]
        return "length" if asked.task == "prefill" and choice.choice.reason == "stop" else choice.choice.reason

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
                "logprobs": self._logprobs(
                    choice, TextOffsets(by_id=self._call.tokens_by_id), choice.choice.logprobs, from_start=True
                ),
                "finish_reason": self._reason(choice),
                **self._of_prompt(choice),
                **({"rekindle": described[choice.choice.index]} if len(self._choices) > 1 else {}),
            }
            for choice in self._choices
        ]
        return {**self._stamp.head(KIND), "choices": choices, "usage": self._usage(), "rekindle": described[0]}

    def _of_prompt(self, choice: _TextChoice) -> dict[str, Any]:
        """Return the ids and the prompt's logprobs of a choice, as vLLM writes them, where they were requested."""
        generation, found = choice.choice.generation, dict[str, Any]()
        if self._call.adds_ids:
            found |= {"token_ids": list(choice.choice.token_ids), "prompt_token_ids": list(generation.prompt_ids)}
        if self._call.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(generation, self._call.num_prompt_logprobs)
        return found

    def _usage(self) -> dict[str, Any]:
        return usage_of([choice.choice for choice in self._choices], self._call.num_choices)
