"""POST /v1/completions: prompts as text or ids, for callers that write the template themselves."""

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
from rekindle.server.gate.caller import Caller
from rekindle.server.models import ServedModel
from rekindle.server.observers.observer import Observer
from rekindle.server.openai.calls import CompletionCall, parse_completion
from rekindle.server.openai.text import CompletionReply

PATH = "/v1/completions"
PARAMS = {"messages": "prompt", "token_ids": "prompt"}


class CompletionRoute:
    """Answers completions; several prompts become several requests of one answer."""

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
        stamp = Stamp(f"cmpl-{uuid.uuid4().hex}", int(self._clock()), self._model.name)
        reply = CompletionReply(stamp, call, generations, decode=self._engine.encoder.decode)
        answer = Answer(reply, generations, watch, params=PARAMS, ping_s=self._ping_s)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    def _submit(self, body: Any, caller: Caller) -> tuple[CompletionCall, list[Generation]]:
        call = parse_completion(body, caller)
        self._model.require(call.model)
        return call, submit_all(self._engine, call.requests, call.num_choices)
