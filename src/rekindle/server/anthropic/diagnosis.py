"""Anthropic's diagnostics of the prompt cache: which part of a request differs from that of an earlier message.

Owns the form. See https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.engine.types import Progress, Report
from rekindle.server.answers.comparison import Comparison, Part

_TYPES: dict[Part, str] = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "template": "unavailable",  # of thinking or effort, which Anthropic has no type for
    "messages": "messages_changed",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of a request that asked for one; `previous` is the id that it named, `comparison` None where that is unknown."""

    previous: str | None
    comparison: Comparison | None

    def described(self, known: Report | Progress | None) -> dict[str, Any] | None:
        """Return the `diagnostics` of a message; `known`: what its prompt reused."""
        if self.previous is None:
            return None
        if self.comparison is None:
            return {"cache_miss_reason": {"type": "previous_message_not_found"}}
        if self.comparison.changed is None:
            return None
        kind = _TYPES[self.comparison.changed]
        if kind == "unavailable" or known is None:
            return {"cache_miss_reason": {"type": "unavailable"}}
        return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": self.comparison.missed(known)}}
