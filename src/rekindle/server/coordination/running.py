"""The service of sessions in a server: opened when somebody first asks for it, closed with the application.

Whoever holds no sessions pays nothing, and two servers over one file get along until both are asked: the second answers
503 and goes on with everything else. It tries again with each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from rekindle.agents.records import SessionRecords
from rekindle.agents.service import Coordinator
from rekindle.engine.api import Engine
from rekindle.errors import StoreError, StoreLocked
from rekindle.server.coordination.figures import Figures

logger = logging.getLogger(__name__)


class Sessions:
    """Gives out the one coordinator over an engine; for one event loop. `figures` are those of turns by now."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._opening = asyncio.Lock()
        self._records: SessionRecords | None = None
        self._coordinator: Coordinator | None = None
        self.figures = Figures()
        self._problem: str | None = None

    async def coordinator(self) -> Coordinator:
        """The coordinator, started; StoreError where the file of sessions cannot be had."""
        async with self._opening:
            if self._coordinator is None:
                try:
                    self._coordinator = await self._open()
                except StoreError as error:
                    if self._problem is None:
                        logger.warning("sessions cannot be had: %s", error)
                    self._problem = f"sessions: {error}"
                    raise
                self._problem = None
            return self._coordinator

    async def _open(self) -> Coordinator:
        path = self._engine.settings.store.sessions_path()
        records = await run_in_threadpool(SessionRecords.open, path)
        try:
            coordinator = Coordinator(self._engine, records, clock=self._clock)
            await coordinator.start()
        except BaseException:
            records.close()
            raise
        self._records = records
        return coordinator

    async def forget(self, namespace: str, agent: str) -> None:
        """Have an agent bring nothing of earlier sessions into later ones.

        Another server's sessions are its own, which is said in the log. StoreError, in words for who wanted the agent
        deleted, where the file refuses: done again, it goes on.
        """
        if self._coordinator is None and not await run_in_threadpool(self._has_file):
            return
        try:
            coordinator = await self.coordinator()
            await coordinator.forget(namespace, agent)
        except StoreLocked as error:
            logger.warning("what %r remembers of sessions is not forgotten: %s", agent, error)
        except StoreError as error:
            message = f"{agent!r} is not deleted, for its memory of sessions cannot be: {error}; then delete it again"
            raise StoreError(message) from error

    def _has_file(self) -> bool:
        path = self._engine.settings.store.sessions_path()
        return path is not None and path.exists()

    def problems(self) -> tuple[str, ...]:
        """What a person should know."""
        return () if self._problem is None else (self._problem,)

    async def close(self) -> None:
        """End what runs, so that it can be gone on with, and let go of the file. Closing twice is safe."""
        async with self._opening:
            coordinator, self._coordinator = self._coordinator, None
            records, self._records = self._records, None
            if coordinator is not None:
                await coordinator.close()
            if records is not None:
                await run_in_threadpool(records.close)
