"""Write the events of one session to the file, in order, on the single writing thread.

    write ──▶ a future: the event may be published only when it is done
    a write fails or is cancelled ──▶ nothing more is written, since the file would have a gap, until
    reread ──▶ resume: with the rows that the file has

For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from rekindle.errors import StoreError
from rekindle.worker import contained
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import Event

logger = logging.getLogger(__name__)
Durable = asyncio.Future[None]


def failure(durable: Durable) -> BaseException | None:
    """Return why a finished write failed; None if it succeeded."""
    return StoreError("the write was cancelled") if durable.cancelled() else durable.exception()


async def written(durable: Durable | None) -> None:
    """Wait for a row; StoreError if it is not written. Cancelling the wait does not cancel the write."""
    if durable is not None:
        await asyncio.wait([durable])
        if (error := failure(durable)) is not None:
            raise error


class Journal:
    """The rows of session `number`, of which there are `num_rows`. `failed`: why no more are written."""

    def __init__(self, records: SessionRecords, writer: Executor, number: int, num_rows: int) -> None:
        self.failed: StoreError | None = None
        self.last: Durable | None = None
        self._records = records
        self._writer = writer
        self._number = number
        self._num_handed = num_rows
        self._num_written = num_rows  # used on the writing thread

    @property
    def is_settled(self) -> bool:
        """Whether all events passed to `write` are in the file."""
        return self.failed is None and (self.last is None or self.last.done())

    def write(self, event: Event, now: float) -> Durable:
        """Submit the next row."""
        if self.failed is not None:
            raise self.failed
        number, self._num_handed = self._num_handed, self._num_handed + 1
        self.last = asyncio.get_running_loop().run_in_executor(self._writer, self._append, number, event, now)
        self.last.add_done_callback(self._ended)
        return self.last

    def _append(self, number: int, event: Event, now: float) -> None:
        if self.failed is not None:
            raise self.failed
        try:
            if number != self._num_written:
                raise StoreError("the write before it was cancelled")
            self._records.append(self._number, number, [event], now)
            self._num_written += 1
        except BaseException as error:
            # Border: whatever the error, nothing may be written after it.
            self.failed = error if isinstance(error, StoreError) else StoreError(f"an event cannot be kept: {error!r}")
            logger.error("an event of session %d cannot be written: %s", self._number, error)
            raise self.failed from error

    def _ended(self, durable: Durable) -> None:
        error = failure(durable)
        if isinstance(error, StoreError):
            self.failed = self.failed or error

    async def reread(self) -> tuple[Event, ...]:
        """Read all events from the file, after pending writes; StoreError if they cannot be read."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._writer, contained(self._records.events), self._number)
        except ValueError as error:
            raise StoreError(f"session {self._number} cannot be read: {error}") from error

    def resume(self, num_rows: int) -> None:
        """Resume after a failure, with the number of rows the file has."""
        self._num_handed = self._num_written = num_rows
        self.failed = self.last = None
