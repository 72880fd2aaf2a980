"""Parts shared by all of OpenAI's replies: messages, usage, logprobs and keep-alives.

Encodes values of the engine; knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Progress
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.choice import Choice
from rekindle.server.answers.logprobs import finite, position_entry
from rekindle.server.answers.reply import progress_text
from rekindle.server.answers.sse import comment
from rekindle.server.errors import Problem
from rekindle.text.messages import Message


class DataEvents:
    """The behaviour that streams of chat and text completions share."""

    events: Literal["data"] = "data"

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return nothing: a chunk has no field for progress."""
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
