"""Traces by OpenTelemetry's SDK: a span of each reply, with its phases as children, sent by OTLP over HTTP.

    chat pocket                          the request; or a turn of a session
    ├── match                            rendering, matching and encoding the prompt
    ├── load                             KV from disk
    ├── queue                            waiting for a place
    ├── prefill                          the rest of the prompt
    └── decode                           first token to last

Owns names and attributes, which are those of the semantic conventions of generative AI where these have any, else begin
with `rekindle.`. A caller's `traceparent` is the parent. The phases' times are those of the request's report: of what
happens before the prefill only durations are known, so those three are laid one after the other. No text of a prompt,
of a reply or of an error is in a span. Where spans are sent, and which, the SDK's variables say (`OTEL_*`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle import __version__
from rekindle.engine.types import FinishReason, Report
from rekindle.server.border import problem_of
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text import messages

PHASES = ("match", "load", "queue", "prefill")
TEXT_ENDPOINTS = ("/v1/completions", "/api/generate")
# What a body may ask for by these names, in any dialect, and the attribute that has it.
ASKED = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
MAX_NAME_CHARS = 100  # of a model, as the request names it


@dataclass(slots=True)
class _Request:
    """An HTTP request that is answered: the caller's context, when it came (Unix ns), and its span, if it has one."""

    parent: Context
    began_ns: int
    span: Span | None = None


_CURRENT: ContextVar[_Request | None] = ContextVar("rekindle_traced", default=None)


class Traces:
    """An observer that makes spans of requests for `model`; close it, which sends what is left."""

    def __init__(self, model: str) -> None:
        about = {SERVICE_VERSION: __version__}
        if "OTEL_SERVICE_NAME" not in os.environ and "service.name" not in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        ):
            about[SERVICE_NAME] = "rekindle"
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("rekindle", __version__)
        self._model = model

    def close(self) -> None:
        """Send the spans that wait."""
        self._provider.shutdown()

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return the application with a span around each request that an observer follows."""
        return _Traced(app)

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> TraceWatch:
        """Follow a request, or a turn of a session: the first of a request has the request's span."""
        now, request = time.time_ns(), _CURRENT.get()
        operation = "text_completion" if endpoint in TEXT_ENDPOINTS else "chat"
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "rekindle", **_asked(body)}
        attributes |= {"gen_ai.response.model": self._model, "rekindle.namespace": caller.namespace}
        if caller.agent is not None:
            attributes["gen_ai.conversation.id"] = caller.agent
        is_first = request is not None and request.span is None
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=None if request is None else request.parent,
            kind=SpanKind.SERVER if is_first else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=request.began_ns if request is not None and is_first else now,
        )
        if request is not None and is_first:
            request.span = span
        return TraceWatch(self._tracer, span, now, ends=not is_first)


class TraceWatch(RequestWatch):
    """Makes the phases of one request. `ends`: its span ends with its reply; else with the HTTP request."""

    def __init__(self, tracer: Tracer, span: Span, submitted_ns: int, *, ends: bool) -> None:
        self._tracer = tracer
        self._span = span
        self._submitted_ns = submitted_ns
        self._ends = ends

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: messages.Message, id: ReplyId | None = None
    ) -> None:
        """Make the spans of the phases that a choice reached, and say what it used."""
        within, at = set_span_in_context(self._span), self._submitted_ns
        for name in PHASES:
            phase_ms = getattr(report.timings, f"{name}_ms")
            if math.isfinite(phase_ms):
                phase = self._tracer.start_span(name, context=within, start_time=at)
                at += int(phase_ms * 1e6)
                phase.end(at)
        if math.isfinite(report.timings.first_token_ms):
            tokens = {"gen_ai.usage.output_tokens": report.completion_tokens}
            decode = self._tracer.start_span("decode", context=within, start_time=at, attributes=tokens)
            decode.end(max(at, time.time_ns()))
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": report.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
                "gen_ai.usage.output_tokens": report.completion_tokens,
                "gen_ai.response.finish_reasons": (reason,),
                "rekindle.outcome": report.outcome,
                "rekindle.hot_tokens": report.hot_tokens,
                "rekindle.warm_tokens": report.warm_tokens,
                "rekindle.computed_tokens": report.computed_tokens,
            }
        )
        self._end()

    def failed(self, number: int | None, error: Exception) -> None:
        """Say of which kind the failure is."""
        self._span.set_attribute("error.type", str(problem_of(error).status))
        self._span.set_status(StatusCode.ERROR)
        self._end()

    def _end(self) -> None:
        if self._ends:
            self._span.end()


class _Traced:
    """ASGI middleware: notes whose trace a request belongs to, and ends its span with its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._callers = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(self._callers.extract(dict(Headers(scope=scope)), context=Context()), time.time_ns())

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start" and request.span is not None:
                request.span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        token = _CURRENT.set(request)
        try:
            await self._app(scope, receive, send_noted)
        finally:
            _CURRENT.reset(token)
            if request.span is not None:
                request.span.end()


def _asked(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a body asks for, as attributes; what is of another type than it should be is left out."""
    found: dict[str, Any] = {}
    for name, attribute in ASKED.items():
        value = body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63:
            found[attribute] = value
    model, streams = body.get("model"), body.get("stream")
    if isinstance(model, str):
        found["gen_ai.request.model"] = model[:MAX_NAME_CHARS].encode("utf-8", "replace").decode()
    if isinstance(streams, bool):
        found["gen_ai.request.stream"] = streams
    return found
