"""Figures of what namespaces used today, of the quotas of a day."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.server.gate.quotas import Quotas, figures


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
