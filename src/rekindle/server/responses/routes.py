"""Routes under /v1/responses: answering a request from body to last byte, and reading or deleting stored responses.

A response is durable before the end of its answer is sent; otherwise the answer has `store` false. Stored responses are
looked up in worker threads: a disk may be slow, the event loop may not.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from rekindle.engine.generation import Generation
from rekindle.engine.tool_choice import steered
from rekindle.errors import NotFound
from rekindle.server.answers.answer import Answer, RouteContext, Stamp, accepted, read
from rekindle.server.answers.comparison import Comparison
from rekindle.server.answers.hints import hinted
from rekindle.server.border import Router, invalid
from rekindle.server.gate.caller import Caller, access_of, caller_of
from rekindle.server.responses.calls import ResponseCall, parse_response
from rekindle.server.responses.reply import ResponseReply
from rekindle.server.responses.stored import StoredResponse, StoredResponses

PATH = "/v1/responses"
PREFIX = "resp_"  # of ids
COUNT_PATH = "/v1/responses/input_tokens"
PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}
KEEP_S = 15.0  # longest wait of an answer for a disk that hangs
PAGE = 20  # default input items of a page


class ResponseRoute:
    """Answers requests for responses, parses replies in the model's reply format, and stores them."""

    def __init__(self, context: RouteContext, responses: StoredResponses) -> None:
        self._context = context
        self._responses = responses

    async def __call__(self, request: Request) -> Response:
        """Answer whole or as a stream."""
        ticket = self._responses.ticket()
        context = self._context
        submitted, watch = await accepted(request, context.observer, PATH, self._submit, always_off_loop=True)
        caller, call, generation, stamp, comparison = submitted
        reply = ResponseReply(
            *(stamp, call, generation),
            form=context.engine.reply_format,
            comparison=comparison,
            block_tokens=context.engine.spec.layout.block_tokens,
        )

        async def keep() -> None:
            if call.store:
                stored = StoredResponse(caller.namespace, caller.agent, reply.whole(), call.items)
                if (why := await _failure(self._responses.keep(stored, ticket=ticket))) is not None:
                    reply.not_stored(why)

        answer = Answer(reply, [generation], watch, params=PARAMS, ping_s=context.ping_s, settle=keep)
        return await (answer.stream(request) if call.stream else answer.whole(request))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt, freshly encoded; nothing is computed or stored."""
        caller = caller_of(request)
        num_tokens = await read(
            request, lambda body: self._count(*hinted(caller, request.headers, body)), param="input"
        )
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    def _count(self, caller: Caller, body: Any) -> int:
        call = parse_response(
            body, caller, self._responses, strict=self._context.strict, sees=self._context.engine.sees
        )
        self._context.model.require(call.model)
        return self._context.engine.encoder.count(self._context.engine.render(call.request))

    def _submit(self, body: Any, caller: Caller) -> tuple[Caller, ResponseCall, Generation, Stamp, Comparison | None]:
        context = self._context
        call = parse_response(
            *(body, caller, self._responses),
            defaults=context.engine.sampling,
            strict=context.strict,
            sees=context.engine.sees,
        )
        self._context.model.require(call.model)
        form = self._context.engine.reply_format
        request = steered(
            call.request,
            form,
            call.tool_choice,
            tool_names=call.tools.known,
            strict=call.tools.strict,
            parallel=call.parallel,
        )
        ids, parts, other = context.ids, context.parts_of(request), call.compared_with
        stamp = context.stamp(PREFIX, ids.new(PREFIX, caller.namespace, parts))
        comparison = None if other is None else ids.compare(other, PREFIX, caller.namespace, parts)
        (generation,) = context.submit(caller, [request])
        return caller, call, generation, stamp, comparison


async def _failure(durable: Future[None]) -> str | None:
    """Wait until a response is durable; return None, or why it is not."""
    written = asyncio.wrap_future(durable)
    await asyncio.wait([written], timeout=KEEP_S)
    if not written.done():
        return f"the disk did not take it within {KEEP_S:.0f} s"
    error = written.exception()
    return None if error is None else str(error)


class ItemList(BaseModel):
    """A page of items; the ids are null if it is empty."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def responses_router(responses: StoredResponses) -> APIRouter:
    """Routes of stored responses, each within the namespace of its key. Plain functions: they run in worker threads."""
    router = Router(prefix=PATH, tags=["responses"])

    @router.get("/{id}")
    def show_response(request: Request, id: str, stream: bool = False) -> dict[str, Any]:
        """A stored response, as it was answered."""
        if stream:
            raise invalid(400, "stream: a response is not streamed twice; ask without", param="stream")
        return _found(responses, request, id).response

    @router.delete("/{id}")
    def delete_response(request: Request, id: str) -> dict[str, Any]:
        """Delete a stored response; continuing a later one of its conversation then fails with an error."""
        if not responses.delete(access_of(request).namespace, id):
            raise _missing(id)
        return {"id": id, "object": "response", "deleted": True}

    @router.get("/{id}/input_items", response_model=ItemList)
    def list_input_items(
        request: Request,
        id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = PAGE,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """The items that a response answers, including those of the responses before it; the last ones first."""
        _found(responses, request, id)
        *before, last = responses.chain(access_of(request).namespace, id)
        items = [item for each in before for item in each.all_items] + list(last.items)
        return _page(items if order == "asc" else items[::-1], after=after, limit=limit)

    return router


def _found(responses: StoredResponses, request: Request, id: str) -> StoredResponse:
    found = responses.find(access_of(request).namespace, id)
    if found is None:
        raise _missing(id)
    return found


def _missing(id: str) -> NotFound:
    return NotFound(f"no response {id[:100]!r} is stored here", param="id")


def _page(items: list[dict[str, Any]], *, after: str | None, limit: int) -> dict[str, Any]:
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise invalid(400, f"after: {after[:100]!r} is no item of this response", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    page = items[begin : begin + limit]
    edges = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **edges, "has_more": begin + limit < len(items)}
