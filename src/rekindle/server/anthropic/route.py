"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from rekindle.engine.generation import Generation
from rekindle.server.answers.answer import Answer, RouteContext, Stamp, accepted, read, submit_all
from rekindle.server.anthropic.calls import MessagesCall, ModelSide, parse_count, parse_messages
from rekindle.server.anthropic.conversation import find_habits
from rekindle.server.anthropic.reply import MessagesReply, UnavailableAnswer
from rekindle.server.gate.caller import Caller, caller_of

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
PARAMS = {"stop": "stop_sequences"}


def _unavailable(name: str, stamp: Stamp, *, stream: bool) -> Response:
    answer = UnavailableAnswer(stamp, name)
    if not stream:
        return JSONResponse(answer.whole())
    return Response(b"".join(answer.events()), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


class MessagesRoute:
    """Answers messages and counts their tokens. The template's habits are probed once."""

    def __init__(self, context: RouteContext) -> None:
        engine, self._context = context.engine, context
        self._side = ModelSide(engine.reply_format, find_habits(engine.encoder), engine.sampling)

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._context.observer, PATH, self._submit)
        if call.unavailable is not None:
            return _unavailable(call.unavailable, self._context.stamp("msg_"), stream=call.stream)
        reply = MessagesReply(self._context.stamp("msg_"), call, generations[0], form=self._side.form)
        answer = Answer(reply, generations, watch, params=PARAMS, ping_s=self._context.ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt, freshly encoded; nothing is computed or stored."""
        caller = caller_of(request)
        num_tokens = await read(request, lambda body: self._count(body, caller), param="messages")
        return JSONResponse({"input_tokens": num_tokens})

    def _submit(self, body: Any, caller: Caller) -> tuple[MessagesCall, list[Generation]]:
        call = parse_messages(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(call.model, dialect="anthropic")
        requests = [call.request] if call.unavailable is None else []
        return call, submit_all(self._context.engine, requests, 1)

    def _count(self, body: Any, caller: Caller) -> int:
        asked, model = parse_count(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(model, dialect="anthropic")
        return self._context.engine.encoder.count(self._context.engine.render(asked))
