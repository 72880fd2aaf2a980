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


def diagnosed(comparison: Comparison | None, report: Report, *, block_tokens: int) -> dict[str, Any]:
    """Return the `prompt_cache_diagnostics` of a response; `comparison` None: there is none to compare with.

    A prompt that continues the other, and whose KV is gone, is neither a hit nor one of OpenAI's reasons. As what was
    missed is an estimate, less than a block or an eighth of the prompt is nothing where others' KV was reused.
    """
    if comparison is None:
        return {"type": "comparison_response_not_found"}
    missed = comparison.missed(report)
    if comparison.changed is not None:
        return {"type": "cache_miss", "reason": _REASONS[comparison.changed], "cache_missed_tokens": missed}
    if report.reused_tokens and report.explanation is None:  # all that was stored
        return {"type": "cache_hit"}
    few = max(block_tokens, report.prompt_tokens // 8) if report.reused_tokens else 0
    return {"type": "unavailable"} if missed > few else {"type": "cache_hit"}
