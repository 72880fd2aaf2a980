"""The interface that each dialect implements to encode an answer.

The dialects encode the engine's deltas; `answer` reads the body, follows the generations and sends what the reply
returns. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rekindle.engine.types import Delta, Progress, Report
from rekindle.server.errors import Problem
from rekindle.text.messages import Message


@dataclass(frozen=True, slots=True)
class Stamp:
    """The fields that every chunk of a completion repeats: id, creation time (Unix seconds), served model."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """Return the common start of a completion or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Reply(Protocol):
    """One answer in one dialect, built from the deltas of its choices."""

    @property
    def events(self) -> Literal["data", "typed", "lines"]:
        """How a stream has its events: as bare data lines that end with [DONE], named by the `type` of their payload,
        or as lines of JSON."""

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events to send during prefill; called at most once, before the first delta."""

    def beat(self, progress: Progress | None) -> bytes:
        """Return an encoded keep-alive; `progress` None: prefill has not begun, or the reply is being generated."""

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of one delta of a choice."""

    def has_ended(self, index: int) -> bool:
        """Whether this choice is complete before its generation is."""

    def message(self, index: int) -> Message:
        """Return the content of a choice as a client would send it back."""

    def ending(self) -> list[dict[str, Any]]:
        """Return the closing events, when all choices have finished."""

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """Return the events that report an error after the head was sent."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, when all choices have finished."""


def headers_of(known: Report | Progress) -> dict[str, str]:
    """Return response headers with the outcome, for clients that drop unknown fields."""
    return {
        "X-Rekindle-Outcome": known.outcome,
        "X-Rekindle-Reused": str(known.reused_tokens),
        "X-Rekindle-Source": known.source or "none",
    }


def progress_text(progress: Progress) -> str:
    """Describe the progress of a prefill in words."""
    done = progress.reused_tokens + progress.computed_tokens
    return f"prefill {done} of {progress.prompt_tokens} tokens, {progress.reused_tokens} of them reused"
