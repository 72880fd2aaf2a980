"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from rekindle.engine.generation import Generation
from rekindle.server.answers.answer import Answer, RouteContext, Stamp, accepted, read
from rekindle.server.answers.hints import hinted
from rekindle.server.anthropic.calls import MessagesCall, ModelSide, parse_count, parse_messages
from rekindle.server.anthropic.conversation import MERGED, find_habits
from rekindle.server.anthropic.diagnosis import Diagnosis
from rekindle.server.anthropic.reply import MessagesReply
from rekindle.server.gate.caller import Caller, caller_of

PATH = "/v1/messages"
PREFIX = "msg_"  # of ids
COUNT_PATH = "/v1/messages/count_tokens"
PARAMS = {"stop": "stop_sequences"}


class MessagesRoute:
    """Answers messages and counts their tokens. The template's habits are probed once."""

    def __init__(self, context: RouteContext) -> None:
        engine, self._context = context.engine, context
        self._side = ModelSide(engine.reply_format, find_habits(engine.encoder), engine.sampling, engine.sees)

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        submitted, watch = await accepted(request, self._context.observer, PATH, self._submit)
        call, generations, stamp, diagnosis = submitted
        reply = MessagesReply(stamp, call, generations[0], form=self._side.form, diagnosis=diagnosis)
        answer = Answer(reply, generations, watch, params=PARAMS, ping_s=self._context.ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt, freshly encoded; nothing is computed or stored."""
        caller = caller_of(request)
        num_tokens = await read(
            request, lambda body: self._count(*hinted(caller, request.headers, body)), param="messages"
        )
        return JSONResponse({"input_tokens": num_tokens})

    def _submit(self, body: Any, caller: Caller) -> tuple[MessagesCall, list[Generation], Stamp, Diagnosis | None]:
        call = parse_messages(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(call.model, dialect="anthropic")
        stamp, diagnosis = self._compared(call)  # what it refuses is not submitted
        return call, self._context.submit(caller, [call.request]), stamp, diagnosis

    def _compared(self, call: MessagesCall) -> tuple[Stamp, Diagnosis | None]:
        """Return the stamp of the answer, and what the request is next to the one that it names."""
        context = self._context
        if call.diagnostics is None:
            return context.stamp(PREFIX), None
        ids, namespace, parts = context.ids, call.request.namespace, context.parts_of(call.request, MERGED)
        previous = call.diagnostics.previous_message_id
        found = None if previous is None else ids.compare(previous, PREFIX, namespace, parts)
        return context.stamp(PREFIX, ids.new(PREFIX, namespace, parts)), Diagnosis(previous, found)

    def _count(self, caller: Caller, body: Any) -> int:
        asked, model = parse_count(body, caller, self._side, strict=self._context.strict)
        self._context.model.require(model, dialect="anthropic")
        return self._context.engine.encoder.count(self._context.engine.render(asked))
