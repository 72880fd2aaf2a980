"""Check that replies equal those of a cold server, by sending the same bodies again without reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.errors import RequestFailed
from rekindle_lab.bench.replay.client import Answer, OpenAIServer
from rekindle_lab.bench.replay.replay import Exchange
from rekindle_lab.bench.replay.report import ColdCheck


def check_cold(
    exchanges: Sequence[Exchange], server: OpenAIServer, cold: OpenAIServer | None, most: int
) -> ColdCheck | None:
    """Compare up to `most` greedy replies, spread over the day. None: neither Rekindle nor another cold server.

    A Rekindle server gets the requests with reuse off; `cold` must be a fresh server without a cache. RequestFailed if
    it cannot answer.
    """
    if cold is None and not server.is_rekindle:
        return None
    answered = [item for item in exchanges if item.answer.error is None]
    greedy = [item for item in answered if item.sent.get("temperature") == 0]
    chosen = greedy[:: max(-(-len(greedy) // most), 1)] if most else []
    differing = [item.request.id for item in chosen if not _same(item.answer, _ask(item.sent, server, cold))]
    return ColdCheck(len(chosen), tuple(differing), len(answered) - len(greedy))


def _ask(body: Mapping[str, Any], server: OpenAIServer, cold: OpenAIServer | None) -> Answer:
    answer = (cold or server).chat(body, rekindle={"reuse": "off"})
    if answer.error is not None:
        raise RequestFailed(f"the cold arm failed ({answer.error}): {answer.problem}")
    return answer


def _same(answer: Answer, cold: Answer) -> bool:
    """Whether both replies are the same, ignoring call ids, which servers generate."""
    calls = [[call["function"] for call in each.tool_calls] for each in (answer, cold)]
    return answer.text == cold.text and calls[0] == calls[1]
