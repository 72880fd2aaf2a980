"""Routes about the server itself: models, version, health and statistics.

Statistics of all namespaces are for admins. Health is public, but its problems and request counts need a key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from rekindle import __version__
from rekindle.config import StoreSettings
from rekindle.engine.api import Engine
from rekindle.errors import BadRequest
from rekindle.server.border import ELSEWHERE, INSTEAD, Router, needs_admin
from rekindle.server.gate.caller import access_of
from rekindle.server.models import ServedModel
from rekindle.server.observers.metrics import Metrics
from rekindle.worker import Death

Problems = Callable[[], Sequence[str]]


async def _admin(request: Request) -> None:
    if not access_of(request).is_admin:
        raise needs_admin(request.scope["path"])


ADMIN = [Depends(_admin)]


class Readiness(BaseModel):
    """`degraded` answers requests, but something it promises does not hold; `problems` say what, and what to do.

    `failed` (with 503) answers none: a thread has ended and a restart is needed. Nor does `unavailable` (with 503),
    until the server that computes for this one can be used again.
    """

    status: Literal["ok", "degraded", "unavailable", "failed"]
    running: int | None = Field(default=None, description="requests, of all namespaces; with a key only")
    waiting: int | None = Field(default=None, description="requests, of all namespaces; with a key only")
    slot: int | None = Field(default=None, description="of the store, if it has slots; with a key only")
    process: int | None = Field(default=None, description="its id, as the store's lock names it; with a key only")
    problems: list[str] = Field(description="what is wrong; with a key only")


AnthropicVersion = Annotated[str | None, Header(description="sent by Anthropic's clients: answers in their shape")]


def models_router(model: ServedModel) -> APIRouter:
    """Routes that describe the one served model, in the dialect of the client."""
    router = Router(prefix="/v1/models", tags=["models"])

    @router.get("")
    def list_models(anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
        """The served model, its KV formats and bytes per token."""
        if anthropic_version is None:
            return {"object": "list", "data": [model.described()]}
        entry = model.described_for_anthropic()
        return {"data": [entry], "has_more": False, "first_id": entry["id"], "last_id": entry["id"]}

    @router.get("/{name:path}")
    def show_model(name: str, anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
        """The served model, by any of its names."""
        if anthropic_version is None:
            model.require(name)
            return model.described()
        model.require(name, dialect="anthropic")
        return model.described_for_anthropic()

    return router


def elsewhere_router(model: ServedModel) -> APIRouter:
    """Routes that say what the served model cannot do, or what to do instead."""
    router = Router(include_in_schema=False)

    def refuse(request: Request) -> None:
        what = ELSEWHERE[request.scope["path"]]
        raise BadRequest(f"{model.name} generates text and has no {what}: ask a server that does", param="model")

    def redirect(request: Request) -> None:
        raise BadRequest(INSTEAD[request.scope["route"].path])

    for path in ELSEWHERE:
        router.add_api_route(path, refuse, methods=["POST"], response_model=None)
    for path in INSTEAD:
        router.add_api_route(path, redirect, methods=["POST"], response_model=None)
    return router


def figures_router(engine: Engine, metrics: Metrics) -> APIRouter:
    """Routes with the statistics of all namespaces together."""
    router = Router(tags=["operation"], dependencies=ADMIN)

    @router.get("/v1/stats")
    def stats() -> dict[str, Any]:
        """Current counters and gauges of the engine and its store."""
        return asdict(engine.stats())

    @router.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def _death_messages(request: Request, deaths: Sequence[Death]) -> list[str]:
    has_key = access_of(request).has_key
    return [str(death) if has_key else death.summary for death in deaths]


def _slot(settings: StoreSettings) -> dict[str, int]:
    """The slot of an engine's store, if it has slots."""
    return {} if settings.slot == "off" or not settings.enabled else {"slot": int(settings.slot)}


def health_router(engine: Engine, problems: Problems) -> APIRouter:
    """Routes for liveness, readiness and version. `problems` adds those that the engine does not know of."""
    router = Router(tags=["operation"])

    failed: dict[int | str, dict[str, Any]] = {503: {"description": "a thread has ended: restart the server"}}

    @router.get("/ping", responses=failed, include_in_schema=False)
    @router.get("/health", responses=failed, include_in_schema=False)
    @router.get("/health/live", responses=failed)
    async def live(request: Request) -> JSONResponse:
        """Whether the server and its threads are alive; why a thread ended is shown with a key only."""
        deaths = engine.deaths()
        if not deaths:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "problems": _death_messages(request, deaths)}, 503)

    @router.get("/health/ready", response_model=Readiness, responses={503: {"model": Readiness}})
    def ready(request: Request) -> Response:
        """Whether the server accepts requests; `degraded` if something it promises does not hold, `unavailable` while
        the server that computes for it cannot be used."""
        deaths = engine.deaths()
        if deaths:
            counts = {"running": 0, "waiting": 0} if access_of(request).has_key else {}
            return JSONResponse({"status": "failed", **counts, "problems": _death_messages(request, deaths)}, 503)
        health = engine.health()
        problems_found = [*health.problems, *problems()]
        status, code = ("degraded" if problems_found else "ok"), 200
        if not health.computes:
            status, code = "unavailable", 503
        if not access_of(request).has_key:
            return JSONResponse({"status": status, "problems": []}, code)
        stats = engine.stats()
        counts = {"running": stats.num_running, "waiting": stats.num_waiting, "process": os.getpid()}
        counts |= _slot(engine.settings.store)
        return JSONResponse({"status": status, **counts, "problems": problems_found}, code)

    @router.get("/version")
    def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": __version__}

    return router
