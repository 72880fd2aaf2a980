"""What all of OpenAI's replies are made of: the stamp, usage, logprobs, and our report beside them.

Spells values of the engine; knows no HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.model.logprobs import TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class Reply(Protocol):
    """An answer in one of the dialects, made of the deltas of its choices."""

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunks that one delta of a choice makes."""

    def has_ended(self, index: int) -> bool:
        """Whether this choice is complete before its generation is."""

    def usage_chunks(self) -> list[dict[str, Any]]:
        """What follows the last choice, when all of them have finished."""

    def whole(self) -> dict[str, Any]:
        """The whole answer, when all choices have finished."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every piece of one completion repeats: its id, when it was made (Unix seconds), the served model."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """The common start of a completion or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Choice:
    """What one choice has brought so far, whatever the dialect."""

    index: int
    generation: Generation
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_spelled: int = 0  # of the logprobs
    report: Report | None = None
    reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        """Note ids, logprobs and the end."""
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.report = delta.report or self.report
        self.reason = delta.finish_reason or self.reason

    def new_logprobs(self) -> list[TokenLogprob]:
        """Those that no chunk has held yet."""
        new = self.logprobs[self.num_spelled :]
        self.num_spelled = len(self.logprobs)
        return new

    def described(self, *, return_ids: bool) -> dict[str, Any]:
        """The `rekindle` object of this choice."""
        assert self.report is not None, f"choice {self.index} has no report"
        described = self.report.as_dict()
        if return_ids:
            described |= {"prompt_ids": list(self.generation.prompt_ids), "completion_ids": list(self.token_ids)}
        return described


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


def headers_of(report: Report) -> dict[str, str]:
    """The outcome for clients that drop unknown fields."""
    return {
        "X-Rekindle-Outcome": report.outcome,
        "X-Rekindle-Reused": str(report.reused_tokens),
        "X-Rekindle-Source": report.source or "none",
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

    def spell(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            self._at += len(self._decoder.decode(token.text))
        return {
            "tokens": [_spelled(token.text) for token in tokens],
            "token_logprobs": [_finite(token) for token in tokens],
            "top_logprobs": [
                {_spelled(each.text): _finite(each) for each in (*reversed(token.top), token)} for token in tokens
            ],
            "text_offset": offsets,
        }


def _finite(token: TokenLogprob) -> float:
    return max(token.logprob, LEAST_LOGPROB)


def _spelled(text: bytes) -> str:
    """A token as a key: bytes that are no text alone are written as OpenAI writes them."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
