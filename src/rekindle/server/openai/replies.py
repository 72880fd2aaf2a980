"""OpenAI's chat completions, and what they share with completions: messages, usage, logprobs and keep-alives.

Encodes values of the engine; knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Progress
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.answer import Stamp, progress_text
from rekindle.server.answers.choice import Choice, ReplyParser, finite, position_entry
from rekindle.server.answers.sse import comment
from rekindle.server.border import Problem
from rekindle.server.openai.calls import ChatCall
from rekindle.text.messages import Message
from rekindle.text.replies import ArgumentsDelta, CallStart, Event, ReasoningDelta, ReplyFormat, TextDelta

CHUNK = "chat.completion.chunk"


class PromptProgress:
    """How far the prompts of an answer are, as llama.cpp counts: `processed` includes what was in the `cache`.

    A request that makes room for others begins again from what is stored: nothing is said until it is further on.
    """

    def __init__(self) -> None:
        self._said: dict[int, tuple[int, int]] = {}  # by choice: from the cache, and processed so far

    def of(self, index: int, progress: Progress) -> dict[str, Any] | None:
        """Return the fields of a chunk for a choice, in tokens and milliseconds; None if it is not further."""
        processed = progress.reused_tokens + progress.computed_tokens
        cached, before = self._said.get(index, (progress.reused_tokens, -1))
        if processed <= before:
            return None
        self._said[index] = cached, processed
        time_ms = round(progress.elapsed_s * 1e3)
        entry = {"total": progress.prompt_tokens, "cache": cached, "processed": processed, "time_ms": time_ms}
        return {"prompt_progress": entry}


class DataEvents:
    """The behaviour that streams of chat and text completions share."""

    events: Literal["data"] = "data"

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return nothing: OpenAI's chunks have no field for progress."""
        return []

    def beat(self, progress: Progress | None) -> bytes:
        """Return a comment, which clients ignore."""
        return comment(progress_text(progress) if progress is not None else "waiting")

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """Return the error in the shape that OpenAI's clients expect."""
        return [problem.body()]


def message_of(reply: Message) -> dict[str, Any]:
    """Encode a reply as a chat message, whatever dialect it was answered in."""
    message: dict[str, Any] = {"role": reply.role, "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
    return message


def usage_of(choices: Sequence[Choice], num_choices: int = 1) -> dict[str, Any]:
    """Return the exact `usage`: reused tokens count as part of the prompt. Each prompt has `num_choices` choices.

    A prompt is counted once, by its first choice; completions are summed, as far as they have come.
    """
    known = [(choice.report, len(choice.token_ids)) for choice in choices if choice.report is not None]
    prompts = [report for report, _ in known[::num_choices]]
    prompt_tokens = sum(report.prompt_tokens for report in prompts)
    completion_tokens = sum(max(report.completion_tokens, num_ids) for report, num_ids in known)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.reused_tokens for report in prompts)},
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` object of chat completions."""
    return {"content": [position_entry(token) for token in tokens], "refusal": None}


class TextOffsets:
    """Encodes the `logprobs` of completions, with each token's offset in the text, in characters.

    `by_id`: tokens are named by their ids instead of their text, which several may have.
    """

    def __init__(self, *, by_id: bool = False) -> None:
        self._by_id = by_id
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, tokens: Sequence[TokenLogprob], *, first: TokenLogprob | None = None) -> dict[str, Any]:
        """Return the `logprobs` object of the next tokens; `first` is one before them, which has none."""
        before = [] if first is None else [first]
        offsets = []
        for token in (*before, *tokens):
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.text))
        none: list[Any] = [None] * len(before)
        return {
            "tokens": [self._key(token) for token in (*before, *tokens)],
            "token_logprobs": none + [finite(token) for token in tokens],
            "top_logprobs": none
            + [{self._key(each): finite(each) for each in (*reversed(token.top), token)} for token in tokens],
            "text_offset": offsets,
        }

    def _key(self, token: TokenLogprob) -> str:
        return f"token_id:{token.token_id}" if self._by_id else _token_key(token.text)


def prompt_logprobs(generation: Generation, num_top: int) -> list[dict[str, Any] | None] | None:
    """Return the log probabilities of a prompt's tokens as vLLM writes them, by id, each with `num_top` alternatives;
    None for the first. None at all if the prompt was not computed to its end."""
    if generation.prompt_logprobs is None:
        return None
    return [
        None
        if token is None
        else {
            str(each.token_id): {
                "logprob": finite(each),
                "rank": each.rank,
                "decoded_token": each.text.decode("utf-8", "replace"),
            }
            for each in (token, *token.top[:num_top])
        }
        for token in generation.prompt_logprobs
    ]


def _token_key(text: bytes) -> str:
    """Return a token as a JSON key; bytes that are not valid text are escaped as OpenAI does."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


# OpenAI's chat completions, whole and in chunks, encoded from deltas.
#
# Reasoning is in `reasoning_content` and, for newer clients, in `reasoning`, as other servers of open models have it:
# OpenAI returns none.


class ChatReply(DataEvents):
    """The answer to one chat call."""

    def __init__(self, stamp: Stamp, call: ChatCall, generations: Sequence[Generation], *, form: ReplyFormat) -> None:
        self._stamp = stamp
        self.id = stamp.id
        self._call = call
        self._progress = PromptProgress()
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

    def progressed(self, index: int, progress: Progress) -> list[dict[str, Any]]:
        """Return a chunk with an empty delta: the role comes once, as clients join what deltas say."""
        said = self._progress.of(index, progress)
        return [] if said is None else [{**self._chunk(index, {}), **said}]

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
