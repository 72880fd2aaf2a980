"""What the server says of itself: models, version, health, figures; and text as tokens.

Figures of everybody are for admins. Health is for whoever asks; what exactly is wrong is told to those with a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rekindle import __version__
from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.server.caller import access_of
from rekindle.server.errors import needs_admin
from rekindle.server.metrics import Metrics
from rekindle.server.models import ServedModel
from rekindle.server.steering import template_kwargs
from rekindle.text.messages import normalise_messages

Problems = Callable[[], Sequence[str]]


async def _admin(request: Request) -> None:
    if not access_of(request).is_admin:
        raise needs_admin(request.scope["path"])


ADMIN = [Depends(_admin)]


class Readiness(BaseModel):
    """`degraded` answers requests, but does not keep all it promises; `problems` say what and what to do."""

    status: Literal["ok", "degraded"]
    running: int
    waiting: int
    problems: list[str]


class TokenizeBody(BaseModel):
    """Either `text`, read as a completion's prompt is, or `messages` (and what else changes it), as a chat's are."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    text: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(BaseModel):
    """Token ids, as the model would see them, beside the most it takes."""

    ids: list[int]
    count: int
    max_model_len: int


AnthropicVersion = Annotated[str | None, Header(description="sent by Anthropic's clients: answers in their shape")]


def models_router(model: ServedModel) -> APIRouter:
    """Which models there are: one, in the shape of the client that asks."""
    router = APIRouter(prefix="/v1/models", tags=["models"])

    @router.get("")
    def list_models(anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
        """The served model."""
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


def tokens_router(engine: Engine, model: ServedModel) -> APIRouter:
    """Text as tokens."""
    router = APIRouter(tags=["models"])

    @router.post("/v1/tokenize", response_model=Tokens)
    def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Count the tokens of a text or of a rendered conversation, a fresh encoding of all of it."""
        model.require(body.model)
        ids = _ids(engine, body)
        return {"ids": ids, "count": len(ids), "max_model_len": engine.max_context}

    return router


def _ids(engine: Engine, body: TokenizeBody) -> list[int]:
    if (body.text is None) == (body.messages is None):
        raise BadRequest("give exactly one of text and messages", param="text")
    try:
        asked = GenerationRequest(text=body.text) if body.messages is None else _conversation(body, body.messages)
        return [int(token) for token in engine.encoder.encode(engine.render(asked))]
    except RecursionError:
        raise BadRequest("the body is nested too deeply", param="messages") from None


def _conversation(body: TokenizeBody, messages: list[dict[str, Any]]) -> GenerationRequest:
    kwargs = template_kwargs(body.chat_template_kwargs, None)
    return GenerationRequest(messages=normalise_messages(messages), tools=body.tools or None, template_kwargs=kwargs)


def figures_router(engine: Engine, metrics: Metrics) -> APIRouter:
    """Figures of all namespaces together."""
    router = APIRouter(tags=["operation"], dependencies=ADMIN)

    @router.get("/v1/stats")
    def stats() -> dict[str, Any]:
        """Counters and gauges of the engine and its store, as of now."""
        return asdict(engine.stats())

    @router.get("/metrics")
    def prometheus() -> Response:
        """Figures for Prometheus, in its text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


def health_router(engine: Engine, problems: Problems) -> APIRouter:
    """Whether it lives, whether it works, and what it is. `problems` adds what the engine does not know of."""
    router = APIRouter(tags=["operation"])

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """It answers."""
        return {"status": "ok"}

    @router.get("/health/ready", response_model=Readiness)
    def ready(request: Request) -> dict[str, Any]:
        """It takes requests; `degraded` where something it promises does not hold."""
        stats = engine.stats()
        found = [*engine.health().problems, *problems()]
        told = found if access_of(request).has_key else []
        status = "degraded" if found else "ok"
        return {"status": status, "running": stats.num_running, "waiting": stats.num_waiting, "problems": told}

    @router.get("/version")
    def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": __version__}

    return router
