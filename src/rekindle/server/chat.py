"""POST /v1/chat/completions: the life of a request from body to last byte."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.errors import BadRequest
from rekindle.server.answering import Answer, accepted, submit_all
from rekindle.server.caller import Caller
from rekindle.server.models import ServedModel
from rekindle.server.observer import Observer
from rekindle.server.openai.calls import ChatCall, parse_chat
from rekindle.server.openai.chat import ChatReply
from rekindle.server.openai.parts import Stamp
from rekindle.text.tools import find_tool_format

PATH = "/v1/chat/completions"
PARAMS = {"token_ids": "rekindle.prompt_ids"}


class ChatRoute:
    """Answers chat completions. The form of tool calls is looked up once, in the model's template."""

    def __init__(self, engine: Engine, model: ServedModel, observer: Observer, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._model = model
        self._observer = observer
        self._clock = clock
        self._form = find_tool_format(engine.encoder)

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._observer, PATH, self._submit)
        stamp = Stamp(f"chatcmpl-{uuid.uuid4().hex}", int(self._clock()), self._model.name)
        reply = ChatReply(stamp, call, generations, form=self._form if call.reads_tools else None)
        answer = Answer(reply, generations, watch, params=PARAMS)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[ChatCall, list[Generation]]:
        call = parse_chat(body, caller)
        self._model.require(call.model)
        self._check_tools(call)
        return call, submit_all(self._engine, call.requests, call.num_choices)

    def _check_tools(self, call: ChatCall) -> None:
        if call.reads_tools and self._form is None:
            message = (
                "tools: this model's chat template writes no calls as <tool_call>{json}</tool_call>, the form read "
                "here: leave tools out, or set tool_choice to 'none' and take the reply as text"
            )
            raise BadRequest(message, param="tools")
