"""What all of OpenAI's replies are made of: usage, logprobs, and our report beside them.

Spells values of the engine; knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

from rekindle.engine.types import Progress
from rekindle.model.logprobs import TokenLogprob
from rekindle.server.answers.choice import Choice
from rekindle.server.answers.reply import progress_text
from rekindle.server.answers.sse import comment
from rekindle.server.errors import Problem
from rekindle.text.messages import Message

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class DataEvents:
    """What the streams of chat and text completions have in common."""

    events: Literal["data"] = "data"

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Nothing: a chunk has no place for it."""
        return []

    def beat(self, progress: Progress | None) -> bytes:
        """A comment, which clients pass over."""
        return comment(progress_text(progress) if progress is not None else "waiting")

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """The error, as OpenAI's clients expect it."""
        return [problem.body()]


def message_of(said: Message) -> dict[str, Any]:
    """A reply as the message of a chat, whatever the dialect it was given in."""
    message: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.tool_calls
        ]
    return message


def usage_of(choices: Sequence[Choice], num_choices: int = 1) -> dict[str, Any]:
    """Honest to the token: reused ones are part of the prompt, and 0 is 0. Each prompt has `num_choices` choices.

    A prompt is counted once, by its first choice; completions are summed.
    """
    reports = [choice.report for choice in choices if choice.report is not None]
    prompts = reports[::num_choices]
    prompt_tokens = sum(report.prompt_tokens for report in prompts)
    completion_tokens = sum(report.completion_tokens for report in reports)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(report.reused_tokens for report in prompts)},
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of chat completions; bytes tell apart what is no text alone."""

    def one(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text.decode("utf-8", "replace"), "logprob": _finite(token), "bytes": list(token.text)}

    content = [{**one(token), "top_logprobs": [one(each) for each in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


class TextOffsets:
    """The `logprobs` object of completions; counts where in the text, in characters, each token begins."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.text))
        return {
            "tokens": [_token_key(token.text) for token in tokens],
            "token_logprobs": [_finite(token) for token in tokens],
            "top_logprobs": [
                {_token_key(each.text): _finite(each) for each in (*reversed(token.top), token)} for token in tokens
            ],
            "text_offset": offsets,
        }


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST_LOGPROB)


def _token_key(text: bytes) -> str:
    """A token as a key: bytes that are no text alone are written as OpenAI writes them."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
