"""Our figures among vLLM's own metrics: `rekindle_connector_*`, with its labels of model and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from rekindle_vllm.figures import FIGURES

PREFIX = "rekindle_connector_"
LEVELS = frozenset(figure.name for figure in FIGURES if figure.is_level)


class RekindleStats(KVConnectorStats):
    """Increments of figures, and levels, by name."""

    def reset(self) -> None:
        """Forget all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both, one after the other."""
        for name, value in other.data.items():
            self.data[name] = value if name in LEVELS else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures as vLLM logs them."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to log or to count."""
        return not self.data


class RekindleMetrics(KVConnectorPromMetrics):
    """A counter or a gauge of each figure for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for figure in FIGURES:
            kind = metric_types[Gauge if figure.is_level else Counter]
            metric = kind(name=PREFIX + figure.name, documentation=figure.text, labelnames=labelnames)
            self._metrics[figure.name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add increments, and set levels."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if name in LEVELS:
                metric.set(value)
            else:
                metric.inc(value)
