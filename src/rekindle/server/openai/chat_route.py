"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.server.answers.answer import Answer, accepted, submit_all
from rekindle.server.answers.reply import Stamp
from rekindle.server.answers.steering import steered
from rekindle.server.gate.caller import Caller
from rekindle.server.models import ServedModel
from rekindle.server.observers.observer import Observer
from rekindle.server.openai.calls import ChatCall, parse_chat
from rekindle.server.openai.chat import ChatReply

PATH = "/v1/chat/completions"
PARAMS = {"token_ids": "rekindle.prompt_ids"}


class ChatRoute:
    """Answers chat completions; replies are parsed in the format of the model's template."""

    def __init__(
        self, engine: Engine, model: ServedModel, observer: Observer, *, clock: Callable[[], float], ping_s: float
    ) -> None:
        self._engine = engine
        self._model = model
        self._observer = observer
        self._clock = clock
        self._ping_s = ping_s

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        (call, generations), watch = await accepted(request, self._observer, PATH, self._submit)
        stamp = Stamp(f"chatcmpl-{uuid.uuid4().hex}", int(self._clock()), self._model.name)
        reply = ChatReply(stamp, call, generations, form=self._engine.reply_format)
        answer = Answer(reply, generations, watch, params=PARAMS, ping_s=self._ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[ChatCall, list[Generation]]:
        call = parse_chat(body, caller)
        self._model.require(call.model)
        form = self._engine.reply_format
        requests = [steered(each, form, call.tool_choice, tool_names=call.tool_names) for each in call.requests]
        return call, submit_all(self._engine, requests, call.num_choices)
