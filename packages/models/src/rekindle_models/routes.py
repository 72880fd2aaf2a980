"""The routes of the server itself: models, versions, health and figures; and where a browser finds a model's page."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from rekindle import __version__
from rekindle.errors import BadRequest
from rekindle.server.border import ELSEWHERE, INSTEAD, UNMANAGED, needs_admin
from rekindle.server.gate.caller import access_of
from rekindle.server.ollama.models import VERSION
from rekindle_models.described import Descriptions
from rekindle_models.figures import Figures
from rekindle_models.named import Models
from rekindle_models.places import Places

Answer = Callable[[Request], Awaitable[Response]]


def own_routes(models: Models, places: Places, descriptions: Descriptions, figures: Figures) -> list[Route]:
    """Return what is answered here; everything else is for one of the models."""
    return [
        *_catalogue(models, descriptions),
        *_operation(models, places, figures),
        *(Route(path, _elsewhere, methods=["POST"]) for path in ELSEWHERE),
        *(Route(_managing(name), _unmanaged, methods=["POST", "GET", "DELETE"]) for name in UNMANAGED),
    ]


def refusing_routes() -> list[Route]:
    """Return what no model has though it is below a path that is passed on; to be matched first."""
    return [Route(path, _refusing(message), methods=["POST"]) for path, message in INSTEAD.items()]


def _catalogue(models: Models, descriptions: Descriptions) -> list[Route]:
    def is_anthropic(request: Request) -> bool:
        return "anthropic-version" in request.headers

    async def listed(request: Request) -> Response:
        if not is_anthropic(request):
            return JSONResponse({"object": "list", "data": [await descriptions.openai(each) for each in models.all]})
        data = [await descriptions.anthropic(each) for each in models.all]
        return JSONResponse({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})

    async def shown(request: Request) -> Response:
        name = request.path_params["name"]
        if is_anthropic(request):
            return JSONResponse(await descriptions.anthropic(models.find(name, "anthropic")))
        return JSONResponse(await descriptions.openai(models.find(name)))

    async def tags(request: Request) -> Response:
        return JSONResponse({"models": [await descriptions.tag(each) for each in models.all]})

    async def running(request: Request) -> Response:
        return JSONResponse({"models": await descriptions.running(access_of(request))})

    return [
        Route("/v1/models", listed),
        Route("/v1/models/{name:path}", shown),
        Route("/api/tags", tags),
        Route("/api/ps", running),
        Route("/api/version", _always({"version": VERSION})),
        Route("/version", _always({"version": __version__})),
    ]


def _operation(models: Models, places: Places, figures: Figures) -> list[Route]:
    async def ready(request: Request) -> Response:
        found: dict[str, Any] = {"status": "ok", "problems": []}
        if access_of(request).has_key:
            loaded = [place.model.name for place in places.ready()]
            running = sum(place.num_running for place in places.ready())
            found |= {"running": running, "waiting": places.num_waiting, "loaded": loaded, "process": os.getpid()}
        return JSONResponse(found)

    async def metrics(request: Request) -> Response:
        if not access_of(request).is_admin:
            raise needs_admin(request.scope["path"])
        return Response(figures.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(request: Request) -> Response:
        return RedirectResponse(f"models/{quote(models.default.name)}/")

    async def slash(request: Request) -> Response:
        return RedirectResponse(f"{quote(request.path_params['name'])}/")

    live = _always({"status": "ok"})
    return [
        *(Route(path, live) for path in ("/ping", "/health", "/health/live")),
        Route("/health/ready", ready),
        Route("/metrics", metrics),
        Route("/", page),
        Route("/models/{name}", slash),
    ]


def _always(answer: dict[str, Any]) -> Answer:
    async def said(request: Request) -> Response:
        return JSONResponse(answer)

    return said


async def _elsewhere(request: Request) -> Response:
    what = ELSEWHERE[request.scope["path"]]
    raise BadRequest(f"models here generate text and have no {what}: ask a server that does", param="model")


def _refusing(message: str) -> Answer:
    async def refused(request: Request) -> Response:
        raise BadRequest(message)

    return refused


def _managing(name: str) -> str:
    return "/api/blobs/{digest}" if name == "blobs" else f"/api/{name}"


async def _unmanaged(request: Request) -> Response:
    what = request.scope["path"].split("/")[2]
    raise BadRequest(f"{what} is not served here: {UNMANAGED[what]}", param="model")
