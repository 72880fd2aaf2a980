"""Streams a run of a session: events from the service, pings, and the client's disconnect.

Owns the rule that a disconnect ends the run: the running turn stops within a step and stays unfinished, so that it can
be resumed. Stopping the server does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request

from rekindle.errors import RekindleError
from rekindle.server.answers.sse import EventStream, comment, event
from rekindle.server.border import HttpError, Problem, problem_of
from rekindle.server.gate.limits import ShutdownGate
from rekindle.worker import MEANT_FOR_THE_LOOP, failure_of
from rekindle_sessions.service.events import SessionEvent

Events = AsyncGenerator[SessionEvent, None]
Arrived = asyncio.Queue[SessionEvent | Exception | None]
MOST_AHEAD = 64  # events buffered here for a slow reader; beyond that the session's own bound applies
BEAT = comment("waiting")
# Where a client that does not stream finds the data of events; others are repeated by later ones.
LISTS = {"turn_complete": "turns", "turn_failed": "failed", "message": "messages", "round_complete": "rounds"}
CUT = Problem(503, "server_error", "the server is stopping: what was begun can be resumed", None, "stopping", 5)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """`gate` reports disconnects and the server's stop; `ping_s` is the interval of pings while there are no events."""

    gate: ShutdownGate
    ping_s: float


async def whole(request: Request, session: str, events: Events, settings: StreamSettings) -> dict[str, Any]:
    """Run to the end and return a `Run`. An error sets the status only if no turn was completed before it."""
    run: dict[str, Any] = {"session": session, "object": "coordination.run", "decision": None, "error": None}
    run |= {name: [] for name in LISTS.values()}
    async with aclosing(_watched(request, events, settings)) as items:
        try:
            async for item in items:
                if item is not None and item.kind in LISTS:
                    run[LISTS[item.kind]].append(item.data)
                elif item is not None and item.kind in run:
                    run[item.kind] = item.data
        except RekindleError as error:
            if not run["turns"]:
                raise
            run["error"] = _broken(error)
    return run


async def streamed(request: Request, events: Events, settings: StreamSettings) -> EventStream:
    """The run as server-sent events; the head waits for the first, or a ping, so that a refusal has its status."""
    return await _opened(_watched(request, events, settings, first_s=settings.ping_s, beat_s=settings.ping_s))


async def listened(request: Request, events: Events, settings: StreamSettings) -> EventStream:
    """Events from now on, until the listener disconnects; the head is sent as soon as no event can be missed.

    A stopping server waits for runs, but not for listeners.
    """
    watched = _watched(request, events, settings, first_s=0.0, beat_s=settings.ping_s, ends="when closed")
    return await _opened(watched)


async def _opened(items: AsyncGenerator[SessionEvent | None, None]) -> EventStream:
    try:
        first = await anext(items, None)
    except BaseException:
        await items.aclose()
        raise
    return EventStream(_encoded(first, items), headers={})


async def _encoded(
    first: SessionEvent | None, items: AsyncGenerator[SessionEvent | None, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):
        try:
            yield BEAT if first is None else event(first.data, first.kind)
            async for item in items:
                yield BEAT if item is None else event(item.data, item.kind)
        except RekindleError as error:
            # The head has been sent: the error becomes an event.
            yield event(_broken(error), "error")


def _broken(error: RekindleError) -> dict[str, Any]:
    body: dict[str, Any] = problem_of(error).body()["error"]
    return body


async def _watched(
    request: Request,
    events: Events,
    settings: StreamSettings,
    *,
    first_s: float | None = None,
    beat_s: float | None = None,
    ends: Literal["when cut", "when closed"] = "when cut",
) -> AsyncGenerator[SessionEvent | None, None]:
    """Yield events as they come; None means that `beat_s` passed without one, or `first_s` without any.

    It ends when the client disconnects or the shutdown gate cuts it off; with `ends` "when closed", already when the
    gate closes. The request's body must have been read: the next message is then the disconnect.
    """
    arrived: Arrived = asyncio.Queue(MOST_AHEAD)
    work = [_pumped(events, arrived), _left(request, settings, arrived)]
    if ends == "when closed":
        work.append(_closed(settings, arrived))
    tasks = [asyncio.create_task(each) for each in work]
    try:
        wait_s = first_s
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    item = await arrived.get()
            except TimeoutError:
                wait_s = beat_s
                yield None
                continue
            wait_s = beat_s
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pumped(events: Events, arrived: Arrived) -> None:
    try:
        async with aclosing(events):
            async for each in events:
                await arrived.put(each)
    except MEANT_FOR_THE_LOOP:
        raise
    except BaseException as error:
        # Border: the error is passed to the reader of the events.
        await arrived.put(failure_of(error))
    await arrived.put(None)


async def _left(request: Request, settings: StreamSettings, arrived: Arrived) -> None:
    while (await settings.gate.listen(request.receive))["type"] != "http.disconnect":
        pass
    await arrived.put(HttpError(CUT))  # read only if the server ended it; a client that disconnected does not


async def _closed(settings: StreamSettings, arrived: Arrived) -> None:
    await settings.gate.closed()
    await arrived.put(HttpError(CUT))
