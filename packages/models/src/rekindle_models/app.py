"""The application of a server of several models: what it answers itself, and what it passes on.

Owns the order of the middleware, which is that of a server of one model: a request is logged, admitted by its key,
counted and read whole before anything is started for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from rekindle.config import Settings
from rekindle.errors import NotFound, RekindleError
from rekindle.server.border import HttpError, Problem, in_thread, on_error
from rekindle.server.gate.caller import Guard, access_of
from rekindle.server.gate.keys import Keys as ServerKeys
from rekindle.server.gate.limits import Limits, ShutdownGate
from rekindle.server.gate.tenants import TenantRequests
from rekindle.server.observers.log import Logged
from rekindle.server.ollama.heading import Heading, chat_piece, text_piece
from rekindle_models.child import Child, Keys
from rekindle_models.described import Descriptions
from rekindle_models.figures import Figures
from rekindle_models.forwarding import Forwarder, while_there
from rekindle_models.named import Model, Models
from rekindle_models.places import Place, Places
from rekindle_models.routes import own_routes, refusing_routes
from rekindle_models.stored import answers_key
from rekindle_models.wishes import CHAT, ByPrefix, Wish, answer_of, is_passed_on, starts_nothing, wish_of

LARGE = 1 << 16  # bytes of a body that is parsed off the event loop
NOT_LOADED_S = 10.0  # what those who watch are asked to wait


class Host:
    """The application, its keys, and the gate that a shutdown closes; the models end with its lifespan."""

    def __init__(self, settings: Settings, models: Models) -> None:
        self.gate = ShutdownGate()
        self.models = models
        self.figures = Figures()
        self._keys = Keys.made_for(settings.server, answers_key(models.stores))
        self.places = Places(
            lambda model, ended: Child(model, self._keys, ended=ended),
            max_loaded=settings.models.max_loaded,
            max_waiting=settings.engine.max_waiting,
            figures=self.figures,
        )
        self._forwarder = Forwarder()
        self._descriptions = Descriptions(models, self.places, self._forwarder, self._keys)
        server = settings.server
        self.keys = ServerKeys(server)
        self._app = Logged(
            Starlette(
                routes=[
                    *refusing_routes(),
                    ForModels(self),
                    *own_routes(models, self.places, self._descriptions, self.figures),
                ],
                middleware=[
                    Middleware(ByPrefix),
                    Middleware(Guard, settings=server, keys=self.keys),
                    Middleware(TenantRequests, settings=server),
                    Middleware(Limits, settings=server, gate=self.gate, keys=self.keys),
                ],
                exception_handlers=dict.fromkeys((RekindleError, HTTPException, Exception), on_error),
                lifespan=self._lifespan,
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer and log one request, or run the lifespan."""
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.places.close()
            await self._forwarder.close()

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the model that it is for, which is loaded first."""
        body = await Request(scope, receive).body()

        def read() -> Wish:
            return wish_of(scope, body, self.models)

        wish = await in_thread(read) if len(body) > LARGE else read()
        if (answer := answer_of(scope)) is not None:
            model = await in_thread(self.models.answered, access_of(Request(scope)).namespace, answer)
            if model is None and self.places.state_of(wish.model) is None:  # a process may have what is not on disk
                raise NotFound(f"no response {answer[:100]!r} and no receipt of one is stored here", param="id")
            wish = replace(wish, model=model or wish.model)
        await while_there(receive, self._serve(scope, body, send, wish))

    async def _serve(self, scope: Scope, body: bytes, send: Send, wish: Wish) -> None:
        if scope["method"] in ("GET", "HEAD"):  # reading keeps nothing loaded: a process that ends answers it first
            place = self.places.peek(wish.model)
            if place is not None:
                await self._forward(scope, body, send, place)
                return
        access = access_of(Request(scope))
        if starts_nothing(scope) or not access.has_key:
            raise HttpError(not_loaded(wish.model))
        if wish.is_empty and wish.keep_alive == 0:
            await self.places.leave(wish.model, by=None if access.is_admin else access.namespace)
            await JSONResponse(_unloaded(scope, wish))(scope, _nothing, send)
            return
        async with self.places.held(wish.model, by=access.namespace) as place:
            if wish.keep_alive is not None:
                keep_s = math.inf if wish.keep_alive < 0 else wish.keep_alive
                self.places.keep(wish.model, keep_s, by=access.namespace)
            await self._forward(scope, body, send, place)

    async def _forward(self, scope: Scope, body: bytes, send: Send, place: Place) -> None:
        key = self._keys.key_for(access_of(Request(scope)))
        await self._forwarder.forward(scope, body, send, process=place.process, key=key)


class ForModels(BaseRoute):
    """Every route that the server of a model has: passed on."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match what is for a model."""
        is_ours = scope["type"] == "http" and is_passed_on(scope)
        return (Match.FULL, {"route": self}) if is_ours else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        await self._host.answer(scope, receive, send)


def not_loaded(model: Model) -> Problem:
    """The answer to who watches a model that is not loaded, or has no key and asks for its page."""
    message = f"{model.name!r} is not loaded, and is not for this: a request for a reply, with a key, loads it"
    return Problem(503, "server_error", message, code="not_loaded", retry_after_s=NOT_LOADED_S)


def _unloaded(scope: Scope, wish: Wish) -> dict[str, Any]:
    """What Ollama answers when a model was unloaded; whether a request still runs is in /api/ps."""
    heading = Heading(wish.model.name, time.time, time.perf_counter())
    return heading.nothing(chat_piece if scope["path"] == CHAT else text_piece, stays=False)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
