"""OpenAI's diagnostics of the prompt cache: which part of a request differs from that of an earlier response."""

from __future__ import annotations

from typing import Any

from rekindle.engine.types import Report
from rekindle.server.answers.comparison import Comparison, Part

# Of OpenAI's reasons those that change a prompt here: a key, a tier and a format of text do not.
_REASONS: dict[Part, str] = {
    "model": "model_changed",
    "system": "input_changed",
    "tools": "tools_changed",
    "template": "reasoning_effort_changed",
    "messages": "input_changed",
}


def diagnosed(comparison: Comparison | None, report: Report) -> dict[str, Any]:
    """Return the `prompt_cache_diagnostics` of a response; None: there is none to compare with.

    A prompt that continues the other, and whose KV is gone, is neither a hit nor one of OpenAI's reasons.
    """
    if comparison is None:
        return {"type": "comparison_response_not_found"}
    missed = comparison.missed(report)
    if comparison.changed is not None:
        return {"type": "cache_miss", "reason": _REASONS[comparison.changed], "cache_missed_tokens": missed}
    return {"type": "unavailable"} if missed and not report.reused_tokens else {"type": "cache_hit"}
