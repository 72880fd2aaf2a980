"""Figures of a server of several models, in Prometheus' format: what is loaded, how long starts take, who waits.

Owns their registry. Those of a model's own are under its prefix.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

START_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Figures:
    """Counters and gauges; on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loaded = Gauge("rekindle_models_loaded", "Models that answer", registry=self.registry)
        self.waiting = Gauge("rekindle_models_waiting", "Requests that wait for a model", registry=self.registry)
        self.running = Gauge(
            "rekindle_model_running", "Requests passed on, not answered yet", ("model",), registry=self.registry
        )
        self.starts = self._seconds("start", "From its process's start to its first answer")
        self.ends = self._seconds("end", "From being asked to end until all is saved")
        self.failures = Counter(
            "rekindle_model_failures", "Starts that failed, and ends by itself", ("model",), registry=self.registry
        )

    def _seconds(self, name: str, what: str) -> Histogram:
        return Histogram(f"rekindle_model_{name}_seconds", what, ("model",), registry=self.registry, buckets=START_S)

    def text(self) -> bytes:
        """Return all of them."""
        return generate_latest(self.registry)
