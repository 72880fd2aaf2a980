"""The rows of one session, on their way to the file: written as things happened, on the one thread that writes.

    write ──▶ a future: only when it is done anybody may be told
    one that fails, or is cancelled ──▶ nothing is written any more, for the file would have a gap, until
    reread ──▶ go_on: as many rows as there are

For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor

from rekindle.agents.log.records import SessionRecords
from rekindle.agents.machine.types import Event
from rekindle.errors import StoreError
from rekindle.worker import contained

logger = logging.getLogger(__name__)
Durable = asyncio.Future[None]


def failure(durable: Durable) -> BaseException | None:
    """What kept a row from being written, of which it is known by now."""
    return StoreError("the write was cancelled") if durable.cancelled() else durable.exception()


async def written(durable: Durable | None) -> None:
    """Wait for a row; StoreError where it is not written. Whoever stops waiting stops nothing else."""
    if durable is not None:
        await asyncio.wait([durable])
        if (error := failure(durable)) is not None:
            raise error


class Journal:
    """`number` names the session's rows, of which there are `num_rows`. `failed`: why none are written any more."""

    def __init__(self, records: SessionRecords, writer: Executor, number: int, num_rows: int) -> None:
        self.failed: StoreError | None = None
        self.last: Durable | None = None
        self._records = records
        self._writer = writer
        self._number = number
        self._num_handed = num_rows
        self._num_written = num_rows  # known to the writing thread

    @property
    def is_settled(self) -> bool:
        """Whether all that was handed over is in the file."""
        return self.failed is None and (self.last is None or self.last.done())

    def write(self, event: Event, now: float) -> Durable:
        """Have the next row written."""
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
            # Border: whatever it is, nothing may be written behind it.
            self.failed = error if isinstance(error, StoreError) else StoreError(f"an event cannot be kept: {error!r}")
            logger.error("an event of session %d cannot be written: %s", self._number, error)
            raise self.failed from error

    def _ended(self, durable: Durable) -> None:
        error = failure(durable)
        if isinstance(error, StoreError):
            self.failed = self.failed or error

    async def reread(self) -> tuple[Event, ...]:
        """All that is in the file, behind what is still being written; StoreError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._writer, contained(self._records.events), self._number)
        except ValueError as error:
            raise StoreError(f"session {self._number} cannot be read: {error}") from error

    def go_on(self, num_rows: int) -> None:
        """After a failure, with as many rows as there are."""
        self._num_handed = self._num_written = num_rows
        self.failed = self.last = None
