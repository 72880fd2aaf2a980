"""What every answer of Ollama's repeats: the model, the time, the form of its text, and figures in nanoseconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.engine.types import Report
from rekindle.server.models import rfc3339

NS_PER_MS, MS_PER_S = 1_000_000, 1_000


class Piece(Protocol):
    """How a part of a reply is encoded, or a whole one."""

    def __call__(
        self, text: str = "", *, thinking: str = "", calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return the keys of an answer with this text, reasoning and calls."""


def chat_piece(text: str = "", *, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Encode a part of a reply to messages."""
    extras = {"thinking": thinking, "tool_calls": calls}
    return {"message": {"role": "assistant", "content": text} | {name: each for name, each in extras.items() if each}}


def text_piece(text: str = "", *, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Encode a part of a reply to a prompt, which calls no tools."""
    return {"response": text} | ({"thinking": thinking} if thinking else {})


@dataclass(slots=True)
class Heading:
    """What every line of an answer repeats: the model as the request names it, and the wall clock's time of the line.

    `timer` runs in seconds and began at `began`, with the request.
    """

    model: str
    clock: Callable[[], float]
    began: float
    timer: Callable[[], float] = time.perf_counter

    def line(self, said: dict[str, Any], *, done: bool = False) -> dict[str, Any]:
        """Return one line with what it says."""
        return {"model": self.model, "created_at": rfc3339(self.clock()), **said, "done": done}

    def nothing(self, piece: Piece, *, stays: bool) -> dict[str, Any]:
        """Return the answer to a request that only loads the model, or unloads it."""
        return self.line(piece(), done=True) | {"done_reason": "load" if stays else "unload"}

    def figures(self, report: Report, *, submitted: float) -> dict[str, int]:
        """Return tokens, all of the prompt's, and nanoseconds: to load KV, to compute the prompt, to generate.

        `submitted`: when the engine got the request, by the same timer.
        """
        timings, now = report.timings, self.timer()
        return {
            "total_duration": _ns((now - self.began) * MS_PER_S),
            "load_duration": _ns(timings.queue_ms) + _ns(timings.match_ms) + _ns(timings.load_ms),
            "prompt_eval_count": report.prompt_tokens,
            "prompt_eval_duration": _ns(timings.prefill_ms),
            "eval_count": report.completion_tokens,
            # At least 1: clients divide by it.
            "eval_duration": max(1, _ns((now - submitted) * MS_PER_S) - _ns(timings.first_token_ms)),
        }


def _ns(milliseconds: float) -> int:
    """Return nanoseconds; 0 for a phase that was not reached."""
    return round(milliseconds * NS_PER_MS) if math.isfinite(milliseconds) else 0
