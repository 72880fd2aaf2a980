"""What replies cost their namespaces: counted for the quotas of a day, as each reply ends."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rekindle.engine.types import Report
from rekindle.server.gate.caller import Caller
from rekindle.server.gate.quotas import Quotas, figures
from rekindle.server.observers.observer import EachReply


def usage(quotas: Quotas) -> EachReply:
    """An observer that counts the tokens of replies."""

    def count(caller: Caller, report: Report) -> None:
        quotas.spend(caller.namespace, computed=report.computed_tokens, generated=report.completion_tokens)

    return EachReply(count)


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
