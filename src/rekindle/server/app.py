"""The web application: routes over one engine.

Owns which route does what; the dialects spell, the guard refuses, the engine works. The event loop only speaks HTTP:
nothing here waits for the engine but by `await` or in a worker thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rekindle.config import ServerSettings
from rekindle.engine.api import Engine
from rekindle.errors import RekindleError
from rekindle.server.agents import agents_router
from rekindle.server.chat import ChatRoute
from rekindle.server.errors import on_error
from rekindle.server.guard import Guard
from rekindle.server.log import RequestLog
from rekindle.server.models import ServedModel


def _info_router(engine: Engine, model: ServedModel) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [model.described()]}

    @router.get("/v1/models/{name:path}")
    def show_model(name: str) -> dict[str, Any]:
        model.require(name)
        return model.described()

    @router.get("/v1/stats")
    def stats() -> dict[str, Any]:
        return asdict(engine.stats())

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/health/ready")
    def ready() -> JSONResponse:
        stats = engine.stats()
        return JSONResponse({"status": "ok", "running": stats.num_running, "waiting": stats.num_waiting})

    return router


def create_app(
    engine: Engine, settings: ServerSettings, *, model: str | None = None, clock: Callable[[], float] = time.time
) -> FastAPI:
    """The application over a started engine; `model` is the path or hub name it was loaded from."""
    served = ServedModel(engine, alias=model, name=settings.served_model_name, created=int(clock()))
    app = FastAPI(title="Rekindle", docs_url=None, redoc_url=None, openapi_url=None)
    chat = ChatRoute(engine, served, RequestLog(), clock=clock)
    app.add_api_route("/v1/chat/completions", chat.__call__, methods=["POST"], response_model=None)
    app.include_router(agents_router(engine))
    app.include_router(_info_router(engine, served))
    for kind in (RekindleError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(Guard, settings=settings)
    return app
