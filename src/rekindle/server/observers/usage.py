"""What replies cost their namespaces: counted for the quotas of a day, as each reply ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.server.gate.caller import Caller
from rekindle.server.gate.quotas import Quotas, figures
from rekindle.server.observers.observer import ReplyId
from rekindle.text.messages import Message


class Usage:
    """An observer that counts the tokens of replies."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> UsageWatch:
        """Follow one request."""
        return UsageWatch(self._quotas, caller.namespace)


class UsageWatch:
    """Counts the replies of one request."""

    def __init__(self, quotas: Quotas, namespace: str) -> None:
        self._quotas = quotas
        self._namespace = namespace

    def delta(self, choice: int, delta: Delta) -> None:
        """Wait for the end."""

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Count a reply, also one that was cancelled."""
        self._quotas.spend(self._namespace, computed=report.computed_tokens, generated=report.completion_tokens)

    def failed(self, number: int | None, error: Exception) -> None:
        """Count nothing: there is no report of what was computed."""


class UsageCollector(Collector):
    """Figures of quotas: of the namespaces that used most today, so that there are not too many of them."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def describe(self) -> list[Metric]:
        """Return nothing, as `EngineCollector` does."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield tokens used today, and the limits of those that have one."""
        used = GaugeMetricFamily(
            "rekindle_tokens_used_today",
            "Tokens computed of prompts and generated today (UTC), by namespace, of the 100 that used most",
            labels=["namespace", "kind"],
        )
        limits = GaugeMetricFamily(
            "rekindle_tokens_per_day", "Tokens that a namespace may use on a day", labels=["namespace", "kind"]
        )
        for namespace, kind, count, limit in figures(self._quotas):
            used.add_metric([namespace, kind], count)
            if limit is not None:
                limits.add_metric([namespace, kind], limit)
        yield used
        yield limits
