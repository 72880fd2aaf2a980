"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.errors import BadRequest
from rekindle.server.answers.answer import Answer, accepted, off_loop, read_body, submit_all
from rekindle.server.anthropic.calls import MessagesCall, ModelSide, parse_count, parse_messages
from rekindle.server.anthropic.habits import find_habits
from rekindle.server.anthropic.reply import MessagesReply
from rekindle.server.gate.caller import Caller, caller_of
from rekindle.server.json_body import parse_json
from rekindle.server.models import ServedModel
from rekindle.server.observers.observer import Observer

PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
PARAMS = {"stop": "stop_sequences"}


class MessagesRoute:
    """Answers messages and counts their tokens. The template's habits are probed once."""

    def __init__(self, engine: Engine, model: ServedModel, observer: Observer, *, ping_s: float) -> None:
        self._engine = engine
        self._model = model
        self._observer = observer
        self._ping_s = ping_s
        self._side = ModelSide(engine.reply_format, find_habits(engine.encoder))

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._observer, PATH, self._submit)
        message = f"msg_{uuid.uuid4().hex}"
        reply = MessagesReply(call, generations[0], self._side.form, message=message, model=self._model.name)
        answer = Answer(reply, generations, watch, params=PARAMS, ping_s=self._ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt, freshly encoded; nothing is computed or stored."""
        caller, raw = caller_of(request), await read_body(request)
        num_tokens = await off_loop(request, len(raw), lambda: self._count(raw, caller))
        return JSONResponse({"input_tokens": num_tokens})

    def _submit(self, body: Any, caller: Caller) -> tuple[MessagesCall, list[Generation]]:
        call = parse_messages(body, caller, self._side)
        self._model.require(call.model, dialect="anthropic")
        return call, submit_all(self._engine, [call.request], 1)

    def _count(self, raw: bytes, caller: Caller) -> int:
        try:
            asked, model = parse_count(parse_json(raw), caller, self._side)
            self._model.require(model, dialect="anthropic")
            return self._engine.encoder.count(self._engine.render(asked))
        except RecursionError:
            raise BadRequest("the body is nested too deeply", param="messages") from None
