"""The web application: routes over one engine.

Owns the routes, the observers of requests and the order of the middleware. The dialects encode, the engine computes.
The event loop only speaks HTTP: code here waits for the engine with `await` or in a worker thread only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.engine.api import Engine
from rekindle.engine.intake.fairness import FairWorkers
from rekindle.errors import RekindleError
from rekindle.server.agents.deletions import Deletions
from rekindle.server.agents.files import files_router
from rekindle.server.agents.prefill import prefill_router
from rekindle.server.agents.routes import agents_router
from rekindle.server.answers.answer import RouteContext
from rekindle.server.answers.comparison import ComparableIds
from rekindle.server.anthropic.route import MessagesRoute
from rekindle.server.border import Route, on_error
from rekindle.server.extension import Context, Extension, extended
from rekindle.server.gate.caller import Guard
from rekindle.server.gate.keys import Keys
from rekindle.server.gate.limits import FILES, Limits, ShutdownGate, kept_bytes
from rekindle.server.gate.quotas import USAGE_FILE, Quotas
from rekindle.server.gate.tenants import TenantRequests, TokensPerDay
from rekindle.server.info import elsewhere_router, figures_router, health_router, models_router
from rekindle.server.models import ServedModel
from rekindle.server.observers.endings import Endings
from rekindle.server.observers.gauges import EngineCollector, HealthCollector
from rekindle.server.observers.history import History
from rekindle.server.observers.log import Logged, RequestLog
from rekindle.server.observers.metrics import Counted, Metrics
from rekindle.server.observers.observer import Observer, ObserverGroup
from rekindle.server.observers.receipts import Receipts, identity_of
from rekindle.server.observers.today import Today
from rekindle.server.observers.usage import UsageCollector
from rekindle.server.ollama.routes import catalogue_router, generating_routes, unmanaged_router
from rekindle.server.openai.routes import ChatRoute, CompletionRoute
from rekindle.server.page.page import page_router
from rekindle.server.recording import Recorder
from rekindle.server.responses.receipts import receipts_router
from rekindle.server.responses.routes import ResponseRoute, responses_router
from rekindle.server.responses.stored import MAX_BYTES, StoredResponses
from rekindle.server.schema import schema_router
from rekindle.server.tokens import tokens_router
from rekindle.store.files.keys import Given, directory_keys
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.files.veil import Veil
from rekindle.text.length import PromptBound

if TYPE_CHECKING:
    from rekindle.server.observers.traces import Traces

RAW_PREFIXES = ("/v1/agents/", "/v1/coordination/")


class RequestForms:
    """ASGI middleware for requests that routes do not declare.

    A HEAD runs as a GET whose body is dropped: clients and load balancers ask with it whether a server is there. Paths
    that contain names are routed percent-encoded, as sent, and their bodies are always JSON.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give a request the form that its route declares, and pass it on."""
        if scope["type"] == "http" and scope["path"].startswith(RAW_PREFIXES):
            scope["path"] = scope["raw_path"].decode("latin-1")
            # curl -d sends every body as a form.
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        if scope["type"] == "http" and scope["method"] == "HEAD":
            await self._head(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_ended = False

        async def receive_until_answered() -> Message:
            # A stream would never end: for it the client has left once the head is sent.
            return {"type": "http.disconnect"} if has_ended else await receive()

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                has_ended = True

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)


class App(FastAPI):
    """The application, its keys, its shutdown gate, and what it closes: recorder, stored responses, counts of tokens,
    extensions, and what `ends` with it.

    Extensions are closed at the end of the lifespan, while the event loop runs; the rest in `close`. `around` gives all
    routes what observes requests.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        responses: StoredResponses,
        *,
        around: Callable[[ASGIApp], ASGIApp],
        keys: Keys,
        quotas: Quotas,
        ends: Sequence[Callable[[], None]],
        bound: PromptBound | None,
    ) -> None:
        super().__init__(
            title="Rekindle",
            docs_url=None,
            redoc_url=None,
            openapi_url=None,
            redirect_slashes=False,
            strict_content_type=False,  # the guard already refuses foreign pages, which that rule protects against
            lifespan=self._lifespan,
        )
        self.router.route_class = Route
        self.gate = ShutdownGate()
        self.keys = keys
        self.quotas = quotas
        self.workers = FairWorkers("bodies")
        self.bound = bound
        self.recorder = recorder
        self.responses = responses
        self._ends = tuple(ends)
        self.extensions: tuple[Extension, ...] = ()
        # Outside starlette's own middleware, which answers crashes: these are counted and logged, too.
        self._outermost = Logged(around(super().__call__))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer and log one request, or run the lifespan."""
        await self._outermost(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            for extension in self.extensions:
                await extension.state.close()

    @property
    def events(self) -> list[type[BaseModel]]:
        """Models of streams that the routes of extensions describe themselves."""
        return [event for extension in self.extensions for event in extension.events]

    def problems(self) -> tuple[str, ...]:
        """Return what does not work of the server's own, a sentence each."""
        return (
            *self.keys.problems(),
            *self.quotas.problems(),
            *(self.recorder.problems() if self.recorder else ()),
            *self.responses.problems(),
            *(problem for extension in self.extensions for problem in extension.state.problems()),
        )

    def close(self) -> None:
        """Stop workers and what ends with it, and write all pending responses, recorded requests and counts."""
        self.workers.stop()
        for end in self._ends:
            end()
        self.responses.close()
        self.quotas.close()
        if self.recorder is not None:
            self.recorder.close()


def create_app(
    engine: Engine, settings: ServerSettings, *, model: str | None = None, clock: Callable[[], float] = time.time
) -> App:
    """Create the application over a started engine; close it after use. `model`: the path or hub name loaded."""
    served = ServedModel(engine, alias=model, name=settings.served_model_name, created=int(clock()))
    metrics, history, today = Metrics(served.name), History(clock=clock), Today(clock=clock)
    recorder = _recorder(settings, served.name)
    log, keys = RequestLog(), Keys(settings)
    quotas = _open_quotas(engine, keys, clock)
    traces = _open_traces(settings, served.name)
    observers: list[Observer] = [metrics, history, today, *([traces] if traces else [])]
    responses = _open_responses(engine, settings)
    endings = Endings(engine)
    app = App(
        recorder,
        responses,
        around=lambda inner: Counted(traces.around(inner) if traces else inner, metrics=metrics),
        keys=keys,
        quotas=quotas,
        ends=[endings.close, *([traces.close] if traces else [])],
        bound=engine.encoder.bound,
    )
    _collect(metrics, engine, app, served.name)
    identity = identity_of(engine, served.name)
    observers.append(Receipts(identity, ticket=responses.ticket, keep=responses.keep_receipt, clock=clock))
    given = Context(engine, settings, app.gate, log, tuple(observers), responses.forget_receipts, clock)
    app.extensions = extended(given)
    group = ObserverGroup([log, *observers, endings, *([recorder] if recorder else [])])
    ids = ComparableIds.of_process(engine.secret)
    _add_generating(app, RouteContext(engine, served, group, ids, clock, settings.ping_s, settings.strict))
    for router in (
        agents_router(engine, history, Deletions(engine, history, responses, app.extensions, clock=clock)),
        files_router(engine, settings),
        *(extension.router for extension in app.extensions),
        responses_router(responses),
        receipts_router(engine, identity, responses),
        prefill_router(engine, served, group, ping_s=settings.ping_s, strict=settings.strict),
        models_router(served),
        tokens_router(engine, served, strict=settings.strict),
        elsewhere_router(served),
        catalogue_router(engine, served, strict=settings.strict),
        unmanaged_router(served),
        page_router(engine, served, history, today, app.extensions),
        figures_router(engine, metrics),
        health_router(engine, app.problems),
        schema_router(app, events=app.events, max_choices=engine.settings.cache.max_branches),
    ):
        app.include_router(router)
    _add_gate(app, settings)
    return app


def _collect(metrics: Metrics, engine: Engine, app: App, model: str) -> None:
    for each in (EngineCollector(engine, model), UsageCollector(app.quotas), HealthCollector(engine, app.problems)):
        metrics.registry.register(each)


def _add_gate(app: App, settings: ServerSettings) -> None:
    for kind in (RekindleError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, on_error)
    # The middleware added last is the outermost.
    app.add_middleware(RequestForms)
    app.add_middleware(Limits, settings=settings, gate=app.gate, keys=app.keys, files=FILES)
    app.add_middleware(TokensPerDay, quotas=app.quotas)
    app.add_middleware(TenantRequests, settings=settings)
    app.add_middleware(Guard, settings=settings, keys=app.keys)


def _add_generating(app: App, context: RouteContext) -> None:
    messages, responses = MessagesRoute(context), ResponseRoute(context, app.responses)
    for path, route in (
        ("/v1/chat/completions", ChatRoute(context).__call__),
        ("/v1/completions", CompletionRoute(context).__call__),
        ("/v1/responses", responses.__call__),
        ("/v1/responses/input_tokens", responses.count),
        ("/v1/messages", messages.__call__),
        ("/v1/messages/count_tokens", messages.count),
        *((path, route.__call__) for path, route in generating_routes(context).items()),
    ):
        app.add_api_route(path, route, methods=["POST"], response_model=None)


def _open_responses(engine: Engine, settings: ServerSettings) -> StoredResponses:
    store = engine.settings.store
    most = min(MAX_BYTES, kept_bytes(engine, settings))
    responses = StoredResponses(store.responses_path(), max_bytes=most, given=Given.of(store))
    responses.start()
    return responses


def _open_quotas(engine: Engine, keys: Keys, clock: Callable[[], float]) -> Quotas:
    store = engine.settings.store
    path = store.own_directory() / USAGE_FILE if store.enabled else None
    veil = None
    if path is not None and (master := store.master_key()) is not None:
        veil = Veil.of(directory_keys(path.parent, OsFileSystem(), master), USAGE_FILE)
    quotas = Quotas(keys.tokens_per_day, path, clock=clock, veil=veil)
    quotas.start()
    engine.meter = quotas.spend
    return quotas


def _open_traces(settings: ServerSettings, model: str) -> Traces | None:
    if not settings.traces:
        return None
    from rekindle.server.observers.traces import Traces  # the SDK is an extra

    return Traces(model)


def _recorder(settings: ServerSettings, model: str) -> Recorder | None:
    if settings.record is None:
        return None
    recorder = Recorder(settings.record, model=model, max_bytes=settings.record_bytes)
    recorder.start()
    return recorder
