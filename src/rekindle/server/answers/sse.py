"""Events of a stream, on lines of JSON or as server-sent events; merging of several generations, client disconnects.

Owns the rule that a disconnect cancels the generations of a request, even during prefill.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rekindle.engine.generation import Generation, Piece
from rekindle.worker import MEANT_FOR_THE_LOOP, failure_of

DONE = b"data: [DONE]\n\n"
LINE_ENDS = {"\\u0085": "\x85", "\\u2028": "\u2028", "\\u2029": "\u2029"}  # for `str.splitlines`, which httpx uses
Item = tuple[int, Piece | Exception]


def comment(text: str) -> bytes:
    """Encode a comment, which clients ignore; it keeps the connection alive."""
    return b": " + text.encode() + b"\n\n"


def at_once(payload: Any) -> str:
    """Write a value as JSON; no other thread runs meanwhile."""
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))


def event(payload: Any, name: str | None = None, *, write: Callable[[Any], str] = at_once) -> bytes:
    """Encode one event, named or not, on one data line; `write` makes JSON of its payload."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _one_line(write(payload)) + b"\n\n"


def line(payload: Any, write: Callable[[Any], str] = at_once) -> bytes:
    """Encode one event of a stream that has a JSON document on each line (NDJSON)."""
    return _one_line(write(payload)) + b"\n"


def _one_line(text: str) -> bytes:
    """JSON has no line breaks; the three non-ASCII characters that some clients treat as such are escaped."""
    for escape, sign in LINE_ENDS.items():
        text = text.replace(sign, escape)
    return text.encode()


class EventStream(Response):
    """A response that sends events as they arrive and always closes their source."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, headers: dict[str, str], media_type: str = "text/event-stream"
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head, events and end. The source must watch for disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._events.aclose()


@asynccontextmanager
async def cancel_on_disconnect(request: Request, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """Cancel the generations when the client disconnects or the context exits.

    The request's body must have been read: only the disconnect can arrive after it.
    """

    def cancel() -> None:
        for generation in generations:
            generation.cancel()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        cancel()


async def watched(
    request: Request,
    generations: Sequence[Generation],
    *,
    beat_s: float | None = None,
    read: Callable[[Generation], AsyncIterator[Piece]] = aiter,
) -> AsyncGenerator[Item | None, None]:
    """Yield what is `read` of generations as it arrives, each with its index; a disconnect cancels all generations.

    An error replaces a generation's last delta; None means that nothing arrived for `beat_s` seconds.
    """
    arrived: asyncio.Queue[Item | None] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for piece in read(generation):
                arrived.put_nowait((index, piece))
        except MEANT_FOR_THE_LOOP:
            raise
        except BaseException as error:
            # Border: the reader of the deltas handles the error.
            arrived.put_nowait((index, failure_of(error)))
        arrived.put_nowait(None)

    async with cancel_on_disconnect(request, generations):
        tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
        try:
            num_running = len(tasks)
            while num_running:
                if not arrived.empty():  # several tokens of one step: a client that left is noticed between them
                    await asyncio.sleep(0)
                try:
                    async with asyncio.timeout(beat_s):
                        item = await arrived.get()
                except TimeoutError:
                    yield None
                    continue
                if item is None:
                    num_running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
