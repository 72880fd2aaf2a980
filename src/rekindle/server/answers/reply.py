"""What an answer is made of, whatever the dialect.

The dialects spell deltas of the engine; `answer` reads the body, follows the generations and sends what the
reply gives it. Knows no HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rekindle.engine.types import Delta, Progress, Report
from rekindle.server.errors import Problem
from rekindle.text.messages import Message


@dataclass(frozen=True, slots=True)
class Stamp:
    """What every piece of one completion repeats: its id, when it was made (Unix seconds), the served model."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """The common start of a completion or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Reply(Protocol):
    """One answer in one dialect, made of the deltas of its choices."""

    @property
    def events(self) -> Literal["data", "typed"]:
        """Bare data lines, closed by [DONE], or events named by the `type` of what they hold."""

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """What can be said while the prompt is still computed; asked once at most, before the first delta."""

    def beat(self, progress: Progress | None) -> bytes:
        """A sign of life, as it is sent; `progress` None: the prompt has not begun, or the reply is under way."""

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The events that one delta of a choice makes."""

    def has_ended(self, index: int) -> bool:
        """Whether this choice is complete before its generation is."""

    def message(self, index: int) -> Message:
        """What a choice has said, as a caller would send it back."""

    def ending(self) -> list[dict[str, Any]]:
        """What follows when all choices have finished."""

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """What tells of an error once the head is out."""

    def whole(self) -> dict[str, Any]:
        """The whole answer, when all choices have finished."""


def headers_of(known: Report | Progress) -> dict[str, str]:
    """The outcome for clients that drop unknown fields."""
    return {
        "X-Rekindle-Outcome": known.outcome,
        "X-Rekindle-Reused": str(known.reused_tokens),
        "X-Rekindle-Source": known.source or "none",
    }


def progress_text(progress: Progress) -> str:
    """How far a prompt is, for people."""
    done = progress.reused_tokens + progress.computed_tokens
    return f"prefill {done} of {progress.prompt_tokens} tokens, {progress.reused_tokens} of them reused"
