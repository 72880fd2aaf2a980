"""Server-sent events, several generations as one, and a client that hangs up.

Owns the rule that a disconnect cancels what a request has running, also while its prompt is still being prefilled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta
from rekindle.worker import MEANT_FOR_THE_LOOP, failure_of

DONE = b"data: [DONE]\n\n"
LINE_ENDS = {"\\u0085": "\x85", "\\u2028": "\u2028", "\\u2029": "\u2029"}  # for `str.splitlines`, which httpx uses
Item = tuple[int, Delta | Exception]


def comment(text: str) -> bytes:
    """A line that clients pass over; it shows that the connection lives."""
    return b": " + text.encode() + b"\n\n"


def event(payload: Any, name: str | None = None) -> bytes:
    """One event, named or not; JSON has no line breaks, so one data line holds it.

    Neither has it the three characters beyond ASCII that some clients' readers take for one.
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    for escape, sign in LINE_ENDS.items():
        text = text.replace(sign, escape)
    return head + b"data: " + text.encode() + b"\n\n"


class EventStream(Response):
    """A response that sends events as they come and closes its source however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, headers: dict[str, str]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head, events, end. Watching for a disconnect is the source's business."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._events.aclose()


@asynccontextmanager
async def cancel_on_disconnect(request: Request, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """Within this context a client that hangs up cancels the generations; leaving it early does, too.

    The request's body must have been read: what arrives after it is only the disconnect.
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
    request: Request, generations: Sequence[Generation], *, beat_s: float | None = None
) -> AsyncGenerator[Item | None, None]:
    """Deltas as they come, each with the number of its generation; all of them end when the client does.

    An error takes the place of a generation's last delta; None says that `beat_s` passed without anything.
    """
    arrived: asyncio.Queue[Item | None] = asyncio.Queue()

    async def pump(index: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                arrived.put_nowait((index, delta))
        except MEANT_FOR_THE_LOOP:
            raise
        except BaseException as error:
            # Border: the error belongs to whoever reads the deltas.
            arrived.put_nowait((index, failure_of(error)))
        arrived.put_nowait(None)

    async with cancel_on_disconnect(request, generations):
        tasks = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
        try:
            num_running = len(tasks)
            while num_running:
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
