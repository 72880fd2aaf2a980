"""A run of a session as it happens: events pumped out of the service, signs of life, and a client that hangs up.

Owns the rule that leaving ends the run: the turn that was being spoken stops within a step and stays begun, so that it
can be gone on with. A stop of the server does the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request

from rekindle.agents.sessions.events import SessionEvent
from rekindle.errors import RekindleError
from rekindle.server.answers.sse import EventStream, comment, event
from rekindle.server.errors import HttpError, Problem, problem_of
from rekindle.server.gate.limits import ShutdownGate
from rekindle.worker import MEANT_FOR_THE_LOOP, failure_of

Events = AsyncGenerator[SessionEvent, None]
Arrived = asyncio.Queue[SessionEvent | Exception | None]
MOST_AHEAD = 64  # events that a slow reader may be behind here; then the session's own bound counts
BEAT = comment("waiting")
CUT = Problem(503, "server_error", "the server is stopping: what was begun goes on later", None, "stopping", 5)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How to notice that nobody waits any more, and how often to show those who do that the connection lives."""

    door: ShutdownGate
    ping_s: float


@dataclass(slots=True)
class Told:
    """What of a run a client that does not stream is told, as it comes together."""

    session: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    decision: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    def add(self, told: SessionEvent) -> None:
        """Note an event; those of which others tell all in the end are left out."""
        match told.kind:
            case "turn_complete":
                self.turns.append(told.data)
            case "turn_failed":
                self.failed.append(told.data)
            case "message":
                self.messages.append(told.data)
            case "round_complete":
                self.rounds.append(told.data)
            case "decision":
                self.decision = told.data
            case "error":
                self.error = told.data

    def as_dict(self) -> dict[str, Any]:
        """The answer."""
        return {
            "session": self.session,
            "object": "coordination.run",
            "turns": self.turns,
            "failed": self.failed,
            "messages": self.messages,
            "rounds": self.rounds,
            "decision": self.decision,
            "error": self.error,
        }


async def whole(request: Request, session: str, events: Events, ears: StreamSettings) -> dict[str, Any]:
    """Run to the end and say what came of it. An error ends it with its status unless something was said before."""
    told = Told(session)
    async with aclosing(_watched(request, events, ears)) as items:
        try:
            async for item in items:
                if item is not None:
                    told.add(item)
        except RekindleError as error:
            if not told.turns:
                raise
            told.error = _broken(error)
    return told.as_dict()


async def streamed(request: Request, events: Events, ears: StreamSettings) -> EventStream:
    """The run as server-sent events; the head waits for the first, or a ping, so that a refusal has its status."""
    return await _opened(_watched(request, events, ears, first_s=ears.ping_s, beat_s=ears.ping_s))


async def listened(request: Request, events: Events, ears: StreamSettings) -> EventStream:
    """What happens from now on, until the listener leaves; the head goes out as soon as nothing can be missed.

    A server that stops waits for runs, but not for who only listens.
    """
    return await _opened(_watched(request, events, ears, first_s=0.0, beat_s=ears.ping_s, leaves="when closed"))


async def _opened(items: AsyncGenerator[SessionEvent | None, None]) -> EventStream:
    try:
        first = await anext(items, None)
    except BaseException:
        await items.aclose()
        raise
    return EventStream(_spelled(first, items), headers={})


async def _spelled(
    first: SessionEvent | None, items: AsyncGenerator[SessionEvent | None, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(items):
        try:
            yield BEAT if first is None else event(first.data, first.kind)
            async for item in items:
                yield BEAT if item is None else event(item.data, item.kind)
        except RekindleError as error:
            # The head is out already: the error travels as an event.
            yield event(_broken(error), "error")


def _broken(error: RekindleError) -> dict[str, Any]:
    told: dict[str, Any] = problem_of(error).body()["error"]
    return told


async def _watched(
    request: Request,
    events: Events,
    ears: StreamSettings,
    *,
    first_s: float | None = None,
    beat_s: float | None = None,
    leaves: Literal["when cut", "when closed"] = "when cut",
) -> AsyncGenerator[SessionEvent | None, None]:
    """Events as they come; None says that `beat_s` passed without one, or `first_s` without any.

    All of it ends when the client leaves, or has to: at the latest when the door cuts off who is inside. The request's
    body must have been read: what comes after is the disconnect.
    """
    arrived: Arrived = asyncio.Queue(MOST_AHEAD)
    work = [_pumped(events, arrived), _left(request, ears, arrived)]
    if leaves == "when closed":
        work.append(_closed(ears, arrived))
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
        # Border: the error belongs to whoever reads the events.
        await arrived.put(failure_of(error))
    await arrived.put(None)


async def _left(request: Request, ears: StreamSettings, arrived: Arrived) -> None:
    while (await ears.door.listen(request.receive))["type"] != "http.disconnect":
        pass
    await arrived.put(HttpError(CUT))  # if it was not the server who ended it, nobody reads this


async def _closed(ears: StreamSettings, arrived: Arrived) -> None:
    await ears.door.closed()
    await arrived.put(HttpError(CUT))
