"""Advice for each cause of a miss, printed by `rekindle why` and shown on the page at `/`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rekindle.matching.explain import Cause

ADVICE: dict[Cause, str] = {
    "text_differs": "send the history as it was answered: earlier messages unchanged, new ones at the end",
    "template_rewrote_history": "send the model's replies back unchanged (reasoning and tool calls, too); "
    "a template that drops old parts itself costs only those",
    "date_line": "put dates and times into the last message, or keep them fixed for a conversation",
    "attribution_header": "serve with --normalise attribution, or have the client leave the line out",
    "tool_order": "serve with --normalise attribution,tools, or send tools and their keys in one order",
    "tool_arguments": "send the arguments of calls back as they came, or at least the same JSON value",
    "evicted": "give more room with --hot-bytes or --disk-bytes, or pin the agent: rekindle agents pin ID",
    "window_ended": "mark the place with cache_control if prompts part there often; the next one resumes there anyway",
    "not_stored": "nothing: the first turn is computed, the next ones reuse it",
    "not_reported": "start vLLM with --enable-prompt-tokens-details; nothing is known of replies that were cut off",
    "other_fingerprint": "serve the model, dtype, --kv and --block-tokens of before, or let the agent start anew",
}


def advice_for(explanation: Mapping[str, Any]) -> str:
    """Return the setting that an explanation of a response offers, else the advice for its cause."""
    offer = explanation.get("offer")
    if offer is None:
        return ADVICE[explanation["cause"]]
    flag = f"--{offer['setting'].replace('_', '-')}"
    return f"serve with {flag} {shlex.quote(offer['value'])}: {offer['reason']}"
