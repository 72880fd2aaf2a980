"""Publish the events of a run in order, each only once it and all before it are durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rekindle_sessions.log.journal import Durable, failure
from rekindle_sessions.service.events import SessionEvent


class Outbox:
    """Calls `emit` with each event in order; stops for good once a write has failed."""

    def __init__(self, emit: Callable[[SessionEvent], None]) -> None:
        self._emit = emit
        self._items: asyncio.Queue[tuple[SessionEvent, Durable | None] | None] = asyncio.Queue()
        self._is_closed = False

    def put(self, event: SessionEvent, durable: Durable | None) -> bool:
        """Queue an event; False if the outbox is closed."""
        if not self._is_closed:
            self._items.put_nowait((event, durable))
        return not self._is_closed

    def close(self) -> None:
        """Accept no more events."""
        self._is_closed = True
        self._items.put_nowait(None)

    async def drain(self) -> None:
        """Emit queued events until the outbox is closed and empty."""
        is_lost = False
        while (item := await self._items.get()) is not None:
            event, durable = item
            if durable is not None and not durable.done():
                await asyncio.wait([durable])
            is_lost = is_lost or (durable is not None and failure(durable) is not None)
            if not is_lost:
                self._emit(event)
