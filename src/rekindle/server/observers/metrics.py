"""Prometheus metrics of requests and replies, under our own names and those that vLLM dashboards expect.

Owns the registry of one application, nothing global. Labels have few, fixed values: outcome, tier, route, status; never
an agent, of which there may be any number. Values that the engine counts itself are read on each scrape (`gauges`). A
token costs two observations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle import __version__
from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.server.border import CLIENT_LEFT, problem_of
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text import messages

Tier = Literal["hot", "warm", "mixed", "cold"]
WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
UNKNOWN_ROUTE = "other"
VLLM_REASONS: Mapping[FinishReason, str] = {"cancelled": "abort"}


def tier_of(report: Report) -> Tier:
    """Return the tier that held the reused tokens of a prompt."""
    if report.hot_tokens and report.warm_tokens:
        return "mixed"
    return "hot" if report.hot_tokens else "warm" if report.warm_tokens else "cold"


class Metrics:
    """Counts and times requests; an observer."""

    def __init__(self, model: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, open files and their limit, start: under everybody's names
        Info("rekindle_build", "What runs here", registry=self.registry).info({"version": __version__})
        self.clock = clock
        kind = ("outcome", "tier")
        self.first_token = self._histogram("first_token_seconds", "From submit to the first token", kind, WAITS_S)
        self.inter_token = self._histogram("inter_token_seconds", "Between two tokens of a reply", kind, TOKENS_S)
        self.phases = {
            name: self._histogram(f"{name}_seconds", what, (), WAITS_S)
            for name, what in (
                ("queue", "Waiting for a place"),
                ("match", "Rendering, matching and encoding the prompt"),
                ("load", "Loading KV from disk"),
                ("prefill", "Computing the rest of the prompt"),
            )
        }
        self.answers = self._counter("answers", "Replies that ended", (*kind, "source", "finish_reason"))
        self.failures = self._counter("failures", "Requests without a complete reply", ("status",))
        self.requests = self._counter("requests", "HTTP requests", ("endpoint", "method", "status"))
        self.tokens = {
            name: self._counter(f"{name}_tokens", what, ("tier",))
            for name, what in (
                ("prompt", "Tokens of prompts, by the tier of the request"),
                ("reused", "Tokens whose KV was reused, by the tier that held it: hot or warm"),
                ("computed", "Tokens of prompts that were computed, by the tier of the request"),
                ("generated", "Tokens of replies, by the tier of the request"),
            )
        }
        self.normalised = self._counter("normalised", "Parts of prompts that were removed or sorted", ("kind",))
        self.normalised_tokens = self._counter("normalised_tokens", "Tokens that they would have cost", ("kind",))
        self.vllm = VllmNames(model, self.registry)

    def _histogram(self, name: str, what: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rekindle_{name}", what, labels, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"rekindle_{name}", what, labels, registry=self.registry)

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> MetricsWatch:
        """Follow one request."""
        return MetricsWatch(self)

    def text(self) -> bytes:
        """Render the registry in Prometheus' text format; waits for the engine if its collector is registered."""
        return generate_latest(self.registry)


class VllmNames:
    """The same metrics under vLLM's names, with its one label."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, ("model_name",), buckets=buckets, registry=registry)
            return made.labels(model)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"vllm:{name}", what, ("model_name",), registry=registry).labels(model)

        self._model = model
        self.first_token = histogram("time_to_first_token_seconds", "Time to the first token", WAITS_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Time between two tokens", TOKENS_S)
        self.whole = histogram("e2e_request_latency_seconds", "From request to the end of the reply", WAITS_S)
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts")
        self.generation_tokens = counter("generation_tokens", "Tokens of replies")
        self.queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up")
        self.hits = counter("prefix_cache_hits", "Tokens of prompts that were found")
        success = "Replies that ended"
        self._success = Counter("vllm:request_success", success, ("model_name", "finished_reason"), registry=registry)

    def ended(self, report: Report, reason: FinishReason, whole_s: float) -> None:
        """Count a reply."""
        self.prompt_tokens.inc(report.prompt_tokens)
        self.generation_tokens.inc(report.completion_tokens)
        if report.reuse != "off":
            self.queries.inc(report.prompt_tokens)
            self.hits.inc(report.reused_tokens)
        self.whole.observe(whole_s)
        self._success.labels(self._model, VLLM_REASONS.get(reason, reason)).inc()


class MetricsWatch(RequestWatch):
    """Times one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = metrics.clock()
        self._last: dict[int, float] = {}  # choice -> time of its last token
        self._inter_token: dict[int, Histogram] = {}  # choice -> labelled by the choice's report

    def delta(self, choice: int, delta: Delta) -> None:
        """Time the tokens of a delta; tokens that arrive together share the time equally."""
        if choice not in self._inter_token and delta.report is not None:
            kind = delta.report.outcome, tier_of(delta.report)
            self._inter_token[choice] = self._metrics.inter_token.labels(*kind)
        if not delta.token_ids:
            return
        now, before, inter_token = self._metrics.clock(), self._last.get(choice), self._inter_token.get(choice)
        self._last[choice] = now
        if before is None or inter_token is None:
            return
        each_s = (now - before) / len(delta.token_ids)
        for _ in delta.token_ids:
            inter_token.observe(each_s)
            self._metrics.vllm.inter_token.observe(each_s)

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: messages.Message, id: ReplyId | None = None
    ) -> None:
        """Count a choice and observe the timings in its report; phases it never reached have none."""
        metrics, tier = self._metrics, tier_of(report)
        metrics.answers.labels(report.outcome, tier, report.source or "none", reason).inc()
        metrics.tokens["prompt"].labels(tier).inc(report.prompt_tokens)
        metrics.tokens["computed"].labels(tier).inc(report.computed_tokens)
        metrics.tokens["generated"].labels(tier).inc(report.completion_tokens)
        metrics.tokens["reused"].labels("hot").inc(report.hot_tokens)
        metrics.tokens["reused"].labels("warm").inc(report.warm_tokens)
        for item in report.normalised:
            metrics.normalised.labels(item.kind).inc()
            metrics.normalised_tokens.labels(item.kind).inc(item.tokens)
        metrics.vllm.ended(report, reason, metrics.clock() - self._began)
        first_s = report.timings.first_token_ms / 1000
        if math.isfinite(first_s):
            metrics.first_token.labels(report.outcome, tier).observe(first_s)
            metrics.vllm.first_token.observe(first_s)
        for name, phase in metrics.phases.items():
            phase_ms = getattr(report.timings, f"{name}_ms")
            if math.isfinite(phase_ms):
                phase.observe(phase_ms / 1000)

    def failed(self, number: int | None, error: Exception) -> None:
        """Count the failure by the HTTP status of the error."""
        self._metrics.failures.labels(str(problem_of(error).status)).inc()


class Counted:
    """ASGI middleware around all others: counts responses by route and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count an HTTP request by the status of its response; 499 if the client disconnected before the head."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, has_left = CLIENT_LEFT, False

        async def receive_noted() -> Message:
            nonlocal has_left
            message = await receive()
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start" and not has_left:
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive_noted, send_noted)
        finally:
            endpoint = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            # Clients may send any method: only those of known routes become labels.
            method = scope["method"] if endpoint != UNKNOWN_ROUTE else UNKNOWN_ROUTE
            self._metrics.requests.labels(endpoint, method, str(status)).inc()
