"""The coordination service of a server: opened at the first request for sessions, closed with the application.

A server without sessions pays nothing. Two servers can share one file until both use sessions: the second answers 503,
retries with each request, and serves everything else. On a full or read-only disk, sessions are held in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rekindle.engine.api import Engine
from rekindle.errors import StoreError, StoreLocked, StoreRefused
from rekindle.server.border import in_thread
from rekindle.store.files.keys import Given
from rekindle_sessions.http.observed import Figures
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.log.usage import Quota
from rekindle_sessions.service.coordinator import Coordinator

logger = logging.getLogger(__name__)


class Sessions:
    """Opens the one coordinator of an engine; for one event loop. `figures`: those of recent turns; `records`: the
    open file."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float], quota: Quota) -> None:
        self._engine = engine
        self._quota = quota
        self._clock = clock
        self._opening = asyncio.Lock()
        self.records: SessionRecords | None = None
        self._coordinator: Coordinator | None = None
        self.figures = Figures()
        self._problem: str | None = None
        self._refused: str | None = None  # why sessions are in memory instead of a file

    async def coordinator(self) -> Coordinator:
        """Return the started coordinator; StoreError if the file of sessions cannot be opened."""
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

    def has(self, namespace: str, id: str) -> bool:
        """Whether there is such a session now."""
        return self._coordinator is not None and self._coordinator.registry.sessions.has(namespace, id)

    async def _open(self) -> Coordinator:
        records = await in_thread(self._records_or_memory)
        try:
            coordinator = Coordinator(self._engine, records, clock=self._clock, quota=self._quota)
            await coordinator.start()
        except BaseException:
            records.close()
            raise
        self.records = records
        return coordinator

    def _records_or_memory(self) -> SessionRecords:
        """Open the file of sessions; if its disk refuses, hold sessions in memory and log that."""
        try:
            store = self._engine.settings.store
            return SessionRecords.open(store.sessions_path(), given=Given.of(store))
        except StoreRefused as error:
            self._refused = f"sessions are held in memory and end with the server: {error}; then start it again"
            logger.error("%s", self._refused)
            return SessionRecords.open(None)

    async def check_forgettable(self, agent: str) -> None:
        """Raise StoreError, worded for the request that deletes the agent, if `forget` would fail. Deletes nothing."""
        try:
            await self._with_memories(agent)
        except StoreError as error:
            message = f"{agent!r} is not deleted, for its memory of sessions cannot be: {error}; then delete it again"
            raise StoreError(message) from error

    async def forget(self, namespace: str, agent: str) -> tuple[str, ...]:
        """Forget what an agent remembers of sessions; return the ids of those that it takes part in.

        If another server has the file, its sessions are unchanged and a warning is logged. StoreError if the file
        refuses: calling again continues.
        """
        coordinator = await self._with_memories(agent)
        if coordinator is None:
            return ()
        await coordinator.forget(namespace, agent)
        return await coordinator.with_agent(namespace, agent)

    async def _with_memories(self, agent: str) -> Coordinator | None:
        """Return the coordinator; None if there is no file of sessions, or another server has it. StoreError."""
        if self._coordinator is None and not await in_thread(self._has_file):
            return None
        try:
            coordinator = await self.coordinator()
        except StoreLocked as error:
            logger.warning("what %r remembers of sessions is not forgotten: %s", agent, error)
            return None
        if self._refused is not None:
            raise StoreError(self._refused)
        return coordinator

    def _has_file(self) -> bool:
        path = self._engine.settings.store.sessions_path()
        try:
            return path is not None and path.exists()
        except OSError:  # it may exist, but cannot be looked up
            return True

    def problems(self) -> tuple[str, ...]:
        """Problems to report to the operator."""
        damage = None if self.records is None else self.records.file_error
        return tuple(each for each in (self._problem, self._refused, damage) if each is not None)

    async def close(self) -> None:
        """Stop running turns, so that they can be resumed, and close the file. Closing twice is safe."""
        async with self._opening:
            coordinator, self._coordinator = self._coordinator, None
            records, self.records = self.records, None
            if coordinator is not None:
                await coordinator.close()
            if records is not None:
                await in_thread(records.close)
