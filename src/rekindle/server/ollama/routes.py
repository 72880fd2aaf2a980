"""POST /api/chat and /api/generate."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from rekindle.engine.generation import Generation
from rekindle.server.answers.answer import Answer, RouteContext, accepted, submit_all
from rekindle.server.gate.caller import Caller
from rekindle.server.ollama.calls import ModelSide, OllamaCall, Parse, parse_chat, parse_generate
from rekindle.server.ollama.reply import Heading, OllamaReply, Piece, chat_piece, text_piece

CHAT_PATH = "/api/chat"
GENERATE_PATH = "/api/generate"


class OllamaRoute:
    """Answers messages or a prompt, as `parse` reads them and `piece` encodes the reply."""

    def __init__(self, context: RouteContext, path: str, parse: Parse, piece: Piece) -> None:
        engine = context.engine
        self._context = context
        self._path = path
        self._parse = parse
        self._piece = piece
        self._side = ModelSide(context.model.name, engine.reply_format, engine.max_context, engine.sampling)

    async def __call__(self, request: Request) -> Response:
        """As lines, or whole."""
        began = time.perf_counter()
        (call, generations), watch = await accepted(request, self._context.observer, self._path, self._submit)
        heading = Heading(call.model or self._context.model.tagged, self._context.clock, began)
        if not generations:
            return JSONResponse(heading.nothing(self._piece, stays=call.stays))
        reply = OllamaReply(heading, call, generations[0], piece=self._piece)
        answer = Answer(reply, generations, watch, params={}, ping_s=self._context.ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[OllamaCall, list[Generation]]:
        call = self._parse(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(call.model, dialect="ollama")
        requests = [call.request] if call.request is not None else []
        return call, submit_all(self._context.engine, requests, 1)


def generating_routes(context: RouteContext) -> dict[str, OllamaRoute]:
    """Return the routes by their paths."""
    return {
        CHAT_PATH: OllamaRoute(context, CHAT_PATH, parse_chat, chat_piece),
        GENERATE_PATH: OllamaRoute(context, GENERATE_PATH, parse_generate, text_piece),
    }
