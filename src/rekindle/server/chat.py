"""POST /v1/chat/completions: the life of a request from body to last byte."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.errors import RekindleError, RequestFailed
from rekindle.server.agents import NAMESPACE, agent_of
from rekindle.server.errors import invalid, problem_of
from rekindle.server.log import RequestLog
from rekindle.server.models import ServedModel
from rekindle.server.openai import ChatCall, Chunks, Stamp, completion, headers_of, parse_chat
from rekindle.server.sse import DONE, EventStream, cancel_on_disconnect, event, watched

MAX_BODY_BYTES = 32 << 20
CANCELLED = "the request was cancelled"


def new_completion_id() -> str:
    """A fresh id in OpenAI's spelling."""
    return f"chatcmpl-{uuid.uuid4().hex}"


async def read_json(request: Request) -> Any:
    """The body as JSON; 413 as soon as it grows over the limit, 400 where it is no JSON."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise invalid(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    except ClientDisconnect:
        raise invalid(400, "the client left before its body had come") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(400, f"the body is not JSON: {error}") from None


def parse_body(body: Any, agent: str | None) -> ChatCall:
    """The call a body makes; 400 also for one that is nested deeper than it can be read."""
    try:
        return parse_chat(body, agent=agent, namespace=NAMESPACE)
    except RecursionError:
        raise invalid(400, "the body is nested too deeply") from None


class ChatRoute:
    """POST /v1/chat/completions."""

    def __init__(self, engine: Engine, model: ServedModel, log: RequestLog, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._model = model
        self._log = log
        self._clock = clock

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream; headers wait for the first delta, which knows what was reused."""
        agent, generation = None, None
        try:
            agent = agent_of(request.headers)
            call = parse_body(await read_json(request), agent)
            self._model.require(call.model)
            generation = self._engine.submit(call.request)
            stamp = Stamp(new_completion_id(), int(self._clock()), self._model.name)
            answer = self._stream if call.stream else self._whole
            return await answer(request, call, generation, stamp)
        except Exception as error:
            self._log.failed(None if generation is None else generation.id, agent, error)
            raise

    async def _whole(self, request: Request, call: ChatCall, generation: Generation, stamp: Stamp) -> Response:
        async with cancel_on_disconnect(request, generation):
            result = await generation.aresult()
        self._log.finished(generation.id, call.request.agent, result.report, result.finish_reason)
        if result.finish_reason == "cancelled":
            return problem_of(RequestFailed(CANCELLED)).response()
        return JSONResponse(completion(stamp, result, return_ids=call.return_ids), headers=headers_of(result.report))

    async def _stream(self, request: Request, call: ChatCall, generation: Generation, stamp: Stamp) -> Response:
        deltas = watched(request, generation)
        first = await anext(deltas)
        headers = headers_of(first.report) if first.report is not None else {}
        return EventStream(self._events(call, generation, Chunks(stamp, call), first, deltas), headers=headers)

    async def _events(
        self,
        call: ChatCall,
        generation: Generation,
        chunks: Chunks,
        first: Delta,
        rest: AsyncGenerator[Delta, None],
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(rest):
            delta: Delta | None = first
            try:
                while delta is not None:
                    if delta.finish_reason is not None and delta.report is not None:
                        self._log.finished(generation.id, call.request.agent, delta.report, delta.finish_reason)
                    if delta.finish_reason == "cancelled":
                        yield event(problem_of(RequestFailed(CANCELLED)).body())
                        break
                    for chunk in chunks.of(delta, generation.prompt_ids):
                        yield event(chunk)
                    delta = await anext(rest, None)
            except RekindleError as error:
                # The head is out already: the error travels as an event, as OpenAI's clients expect it.
                self._log.failed(generation.id, call.request.agent, error)
                yield event(problem_of(error).body())
            yield DONE
