"""The code that all generating routes share, from the body to the end of the answer.

Owns reading the body, submitting, reporting every delta to the watch, and error delivery: as a status before the head
is sent, as an event after it. The dialects encode; the engine computes. A large body is parsed and validated in a
worker thread, so that it does not stall other streams.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.intake.fairness import FairWorkers
from rekindle.engine.types import Delta, GenerationRequest, Progress, Report
from rekindle.errors import BadRequest, Cancelled, RekindleError
from rekindle.server.answers.comparison import ComparableIds, RequestParts
from rekindle.server.answers.documents import LargeDocument, in_parts
from rekindle.server.answers.hints import applied, hinted
from rekindle.server.answers.sse import DONE, EventStream, Item, at_once, event, line, watched
from rekindle.server.border import NO_MARKS, HttpError, Problem, in_thread, invalid, parse_json, problem_of
from rekindle.server.gate.caller import Caller, access_of, caller_of, unnamed
from rekindle.server.models import ServedModel
from rekindle.server.observers.observer import Observer, ReplyId, RequestWatch
from rekindle.text.length import PromptBound
from rekindle.text.messages import Message
from rekindle.worker import contained

# A body of up to so many bytes, and of few values, costs the event loop a few milliseconds.
LARGE_BODY = 256 << 10
FEW_MARKS = 1000  # commas, colons and brackets
FEW_TOKENS = 256  # of an answer that the event loop may write, whatever is said of each
Value = TypeVar("Value")
Submitted = TypeVar("Submitted")


# The interface that each dialect implements to encode an answer.
#
# The dialects encode the engine's deltas and know no HTTP; `Answer` follows the generations and sends what the reply
# returns.


@dataclass(frozen=True, slots=True)
class Stamp:
    """The fields that every chunk of a completion repeats: id, creation time (Unix seconds), served model."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> dict[str, Any]:
        """Return the common start of a completion or chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class Reply(Protocol):
    """One answer in one dialect, built from the deltas of its choices."""

    @property
    def id(self) -> str | None:
        """The id of the answer; None if it has none, so that the request's own stands for it."""

    @property
    def events(self) -> Literal["data", "typed", "lines"]:
        """How a stream has its events: as bare data lines that end with [DONE], named by the `type` of their payload,
        or as lines of JSON."""

    def opened(self, progress: Progress) -> list[dict[str, Any]]:
        """Return the events to send during prefill; called at most once, before the first delta."""

    def beat(self, progress: Progress | None) -> bytes:
        """Return an encoded keep-alive; `progress` None: prefill has not begun, or the reply is being generated."""

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of one delta of a choice."""

    def has_ended(self, index: int) -> bool:
        """Whether this choice is complete before its generation is."""

    def message(self, index: int) -> Message:
        """Return the content of a choice as a client would send it back."""

    def ending(self) -> list[dict[str, Any]]:
        """Return the closing events, when all choices have finished."""

    def broken(self, problem: Problem) -> list[dict[str, Any]]:
        """Return the events that report an error after the head was sent."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, when all choices have finished."""


def headers_of(known: Report | Progress) -> dict[str, str]:
    """Return response headers with the outcome, for clients that drop unknown fields."""
    return {
        "X-Rekindle-Outcome": known.outcome,
        "X-Rekindle-Reused": str(known.reused_tokens),
        "X-Rekindle-Source": known.source or "none",
    }


def progress_text(progress: Progress) -> str:
    """Describe the progress of a prefill in words."""
    done = progress.reused_tokens + progress.computed_tokens
    return f"prefill {done} of {progress.prompt_tokens} tokens, {progress.reused_tokens} of them reused"


async def read_body(request: Request) -> bytes:
    """Read the body, whose size `gate` bounds; 400 if the client disconnects first."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise invalid(400, "client disconnected before sending the body") from None


def is_large(raw: bytes) -> bool:
    """Whether a body is processed in a worker: each of its values may cost as much as many bytes of text."""
    return len(raw) > LARGE_BODY or len(raw.translate(None, NO_MARKS)) > FEW_MARKS


async def off_loop(request: Request, is_aside: bool, work: Callable[[], Value]) -> Value:
    """Return what `work` returns in a worker thread, with `is_aside` in one of those for large bodies.

    Those are processed one at a time per namespace, so that no namespace delays another or has more than one
    parsed in memory.
    """
    if not is_aside:
        return await in_thread(work)
    workers: FairWorkers = request.app.workers
    return await asyncio.wrap_future(workers.submit(access_of(request).namespace, work))


async def read(request: Request, work: Callable[[Any], Value], *, param: str) -> Value:
    """Return what `work` makes of the parsed body in a worker thread, for routes that compute and store nothing.

    A body that is nested too deeply is refused under the name `param`.
    """
    raw = await read_body(request)

    def done() -> Value:
        try:
            return work(parse_json(raw))
        except RecursionError:
            raise BadRequest("the body is nested too deeply", param=param) from None

    return await off_loop(request, is_large(raw), done)


async def accepted(
    request: Request,
    observer: Observer,
    path: str,
    submit: Callable[[Any, Caller], Submitted],
    *,
    caller: Caller | None = None,
    always_off_loop: bool = False,
) -> tuple[Submitted, RequestWatch]:
    """Call `submit` on the parsed body and the caller; return its result and the watch. Refusals reach `observer`.

    `submit` must be safe on any thread. `caller` None: the one that headers or body name, with its hints.
    `always_off_loop`: `submit` may wait for a disk, whatever the size of the body.
    """
    watch, sender = None, caller or unnamed(request)
    try:
        sender = named = caller or caller_of(request)
        raw = await read_body(request)

        def parsed() -> tuple[Any, Caller, Any]:
            body = parse_json(raw)
            return body, *(hinted(named, request.headers, body) if caller is None else (named, body))

        try:
            is_aside = is_large(raw)
            body, sender, asked = await off_loop(request, True, parsed) if is_aside else contained(parsed)()
            watch = observer.began(sender, path, body if isinstance(body, dict) else {}, num_bytes=len(raw))
            _check_count(request, asked)
            submitted = contained(lambda: submit(asked, sender))
            if is_aside or always_off_loop:
                return await off_loop(request, is_aside, submitted), watch
            return submitted(), watch
        except RecursionError:
            raise invalid(400, "the body is nested too deeply") from None
    except Exception as error:
        # Border: a route. The error handler turns the error into a response.
        (watch or observer.began(sender, path, {})).failed(None, error)
        raise


def _check_count(request: Request, body: Any) -> None:
    """Refuse more messages than can fit, before any of them is parsed."""
    bound: PromptBound | None = request.app.bound
    messages = body.get("messages") if isinstance(body, dict) else None
    if bound is not None and isinstance(messages, list):
        bound.check_count(len(messages))


def submit_all(engine: Engine, requests: Sequence[GenerationRequest], num_choices: int) -> list[Generation]:
    """Queue every request `num_choices` times; if one is refused, none stays queued."""
    generations: list[Generation] = []
    try:
        for request in requests:
            generations += engine.submit_many(request, num_choices)
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    return generations


class Answer:
    """One answer while it is generated: whole, or as a stream with a ping every `ping_s` seconds.

    `params`: the dialect's names of parameters that the engine may refuse. `settle` is awaited before the end of the
    answer is encoded, so that anything the answer promises is durable by then. `progressed` returns the events of each
    step of a choice's prompt, for a stream that is to have them.
    """

    def __init__(
        self,
        reply: Reply,
        generations: Sequence[Generation],
        watch: RequestWatch,
        *,
        params: Mapping[str, str],
        ping_s: float,
        settle: Callable[[], Awaitable[None]] | None = None,
        progressed: Callable[[int, Progress], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._reply = reply
        self._settle = settle
        self._progressed = progressed
        self._generations = generations
        self._watch = watch
        self._params = params
        self._ping_s = ping_s
        self._first_report: Report | None = None
        self._num_tokens = 0  # of prompts and replies
        self._was_opened = False
        self._was_cancelled = False

    async def whole(self, request: Request) -> Response:
        """Return the answer as one JSON document."""
        async with aclosing(watched(request, self._generations)) as items:
            async for item in items:
                if item is not None:
                    await self._take(item)
        if self._was_cancelled:
            return problem_of(_cancelled()).response(request.scope)
        await self._settled()
        headers = self._headers()
        if self._num_tokens > FEW_TOKENS:
            return await in_thread(lambda: LargeDocument(self._reply.whole(), headers=headers))
        return JSONResponse(self._reply.whole(), headers=headers)

    async def stream(self, request: Request) -> Response:
        """Return the answer as events; the head waits for the first of choice 0, or for the first ping."""
        read = aiter if self._progressed is None else Generation.steps
        items = watched(request, self._generations, beat_s=self._ping_s, read=read)
        events: list[bytes] = []
        try:
            while self._first_report is None:
                item = await anext(items)
                events += await self._encode_item(item)
                if item is None or item[0] == 0:
                    break
        except BaseException:
            await items.aclose()
            raise
        media_type = "application/x-ndjson" if self._reply.events == "lines" else "text/event-stream"
        return EventStream(self._events(events, items), headers=self._headers(), media_type=media_type)

    async def _settled(self) -> None:
        if self._settle is not None:
            await self._settle()

    def _headers(self) -> dict[str, str]:
        known = self._first_report or self._generations[0].progress
        return headers_of(known) if known is not None else {}

    async def _encode_item(self, item: Item | None) -> list[bytes]:
        """Encode an item; None, when nothing arrived in time, gives a ping with the prompt's progress."""
        if item is not None:
            taken = await self._take(item)
            return await in_thread(self._encode, taken, in_parts) if self._is_large(item) else self._encode(taken)
        progress = self._generations[0].progress if self._first_report is None else None
        chunks: list[dict[str, Any]] = []
        if progress is not None and not self._was_opened:
            self._was_opened = True
            chunks = self._reply.opened(progress)
        return [*self._encode(chunks), self._reply.beat(progress)]

    def _encode(self, chunks: Sequence[dict[str, Any]], write: Callable[[Any], str] = at_once) -> list[bytes]:
        if self._reply.events == "lines":
            return [line(chunk, write) for chunk in chunks]
        is_typed = self._reply.events == "typed"
        return [event(chunk, chunk["type"] if is_typed else None, write=write) for chunk in chunks]

    def _is_large(self, item: Item) -> bool:
        """Whether an item may be the beginning of a choice that has something to say of each of many tokens."""
        index, delta = item
        return isinstance(delta, Delta) and len(self._generations[index].prompt_logprobs or ()) > FEW_TOKENS

    async def _take(self, item: Item) -> list[dict[str, Any]]:
        index, delta = item
        generation = self._generations[index]
        if isinstance(delta, Exception):
            if isinstance(delta, BadRequest) and delta.param is not None:
                delta.param = self._params.get(delta.param, delta.param)
            self._watch.failed(generation.id, delta)
            raise _cancelled() if isinstance(delta, Cancelled) else delta
        if isinstance(delta, Progress):
            return [] if self._progressed is None else self._progressed(index, delta)
        self._watch.delta(index, delta)
        take = partial(self._reply.take, index, delta)
        chunks = await in_thread(take) if self._is_large(item) else take()
        has_ended = self._reply.has_ended(index)
        if has_ended:
            generation.cancel()
        if index == 0 and self._first_report is None:
            self._first_report = delta.report
        if delta.finish_reason is None or delta.report is None:
            return chunks
        self._num_tokens += delta.report.prompt_tokens + delta.report.completion_tokens
        reason = "stop" if has_ended else delta.finish_reason
        message, which = self._reply.message(index), ReplyId(self._reply.id, index)
        self._watch.finished(generation.id, delta.report, reason, reply=message, id=which)
        if delta.finish_reason == "cancelled" and not has_ended:
            self._was_cancelled = True
            return []
        return chunks

    async def _events(
        self, events: Sequence[bytes], items: AsyncGenerator[Item | None, None]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(items):
            try:
                for each in events:
                    yield each
                async for item in items:
                    for each in await self._encode_item(item):
                        yield each
                if not self._was_cancelled:
                    await self._settled()
                last = self._reply.broken(problem_of(_cancelled())) if self._was_cancelled else self._reply.ending()
            except RekindleError as error:
                # The head is already sent: report the error as an event.
                last = self._reply.broken(problem_of(error))
            for each in self._encode(last):
                yield each
            if self._reply.events == "data":
                yield DONE


def _cancelled() -> HttpError:
    """The error of a request that a shutdown cancelled."""
    message = "the request was cancelled: the server is stopping"
    return HttpError(Problem(503, "server_error", message, code="stopping", retry_after_s=5))


@dataclass(frozen=True, slots=True)
class RouteContext:
    """What the generating routes share. `clock` is wall time; a stream has a ping every `ping_s` seconds.

    `strict`: bodies with something that would be left out are refused. `ids`: of answers that later requests may be
    compared with.
    """

    engine: Engine
    model: ServedModel
    observer: Observer
    ids: ComparableIds
    clock: Callable[[], float]
    ping_s: float
    strict: bool = False

    def stamp(self, prefix: str, id: str | None = None) -> Stamp:
        """Return the stamp of a new answer with this id, or one that begins with `prefix`."""
        return Stamp(id or f"{prefix}{uuid.uuid4().hex}", int(self.clock()), self.model.name)

    def submit(self, caller: Caller, requests: Sequence[GenerationRequest], num_choices: int = 1) -> list[Generation]:
        """Queue requests with their caller's hints, as `submit_all` does."""
        wanted = [applied(each, caller.hints, self.engine, strict=self.strict) for each in requests]
        return submit_all(self.engine, wanted, num_choices)

    def parts_of(self, request: GenerationRequest, merged: Collection[str] = ()) -> RequestParts:
        """Return what a request is compared by, as it is rendered for this model; `merged` as in `RequestParts`."""
        spec, settled = self.engine.spec, self.engine.settled(request)
        return RequestParts(f"{self.model.name} {spec.fingerprint.hex()}", settled, merged)
