"""What is told of a run, in order: nothing before it is durable, nor what came after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rekindle.agents.log.journal import Durable, failure
from rekindle.agents.sessions.events import SessionEvent


class Outbox:
    """`tell` is called with each event when its time has come; once something is lost, with nothing more."""

    def __init__(self, tell: Callable[[SessionEvent], None]) -> None:
        self._tell = tell
        self._items: asyncio.Queue[tuple[SessionEvent, Durable | None] | None] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: SessionEvent, durable: Durable | None) -> bool:
        """Have it told; False where nothing is told any more."""
        if not self._is_closed:
            self._items.put_nowait((event, durable))
        return not self._is_closed

    def close(self) -> None:
        """What is in it is the last."""
        self._is_closed = True
        self._items.put_nowait(None)

    async def empty(self) -> None:
        """Tell all that comes, until it is closed."""
        is_lost = False
        while (item := await self._items.get()) is not None:
            event, durable = item
            if durable is not None and not durable.done():
                await asyncio.wait([durable])
            is_lost = is_lost or (durable is not None and failure(durable) is not None)
            if not is_lost:
                self._tell(event)
