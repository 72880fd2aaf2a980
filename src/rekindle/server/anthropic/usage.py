"""Anthropic's `usage` of a prompt, exact to the token.

    |------- cache_read -------|---- cache_creation ----|---- input ----|
    0 ......................reused ............. last breakpoint .... the prompt's end

Always true: input + cache_read + cache_creation = the tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.engine.types import Breakpoint, Progress, Report

LONG_S = 3600.0


def usage_of(known: Report | Progress | None, breakpoints: Sequence[Breakpoint]) -> dict[str, Any]:
    """Return the `usage` object; `known` None: nothing is known yet.

    Read tokens were reused, with or without a breakpoint; created ones were computed before the last breakpoint. Those
    before a breakpoint of an hour are kept for an hour.
    """
    prompt = known.prompt_tokens if known is not None else 0
    reused = known.reused_tokens if known is not None else 0
    places = known.breakpoint_tokens if known is not None else ()
    lasting = [place for place, mark in zip(places, breakpoints, strict=False) if mark.ttl_s >= LONG_S]
    created, created_1h = (max(0, max(before, default=0) - reused) for before in (places, lasting))
    return {
        "input_tokens": prompt - reused - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": reused,
        "cache_creation": {"ephemeral_5m_input_tokens": created - created_1h, "ephemeral_1h_input_tokens": created_1h},
        "output_tokens": known.completion_tokens if isinstance(known, Report) else 0,
    }
