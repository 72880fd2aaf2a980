"""What a server logs, line by line, as a test waits for it."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rekindle.server.observers.log import FIELDS, TextLines
from tests.server.conftest import Served

WAIT_S = 60.0  # nothing here is timed; this bounds a failure
LOGGERS = ("rekindle", "uvicorn", "asyncio")


class Heard(logging.Handler):
    """Records of the server's loggers as they come."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: queue.Queue[logging.LogRecord] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._records.put(record)

    def until(self, served: Served, *ids: str) -> list[logging.LogRecord]:
        """The records until the lines of these requests have come, and that of one more request after them.

        A line is written after its answer is sent, so that of an earlier test can still come: it is left out.
        """
        found, missing = [], {*ids, "the-last"}
        served.send("GET", "/version", x_request_id="the-last")
        while missing:
            record = self._records.get(timeout=WAIT_S)
            missing.discard(fields(record).get("request_id", ""))
            found.append(record)
        return [record for record in found if fields(record).get("request_id", ids[0]) in ids]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The keys and values of a record; none where it is only words."""
    found: dict[str, Any] = getattr(record, FIELDS, {})
    return found


def text(record: logging.LogRecord) -> str:
    """The record as a person reads it."""
    return TextLines().format(record)


@contextmanager
def listening() -> Iterator[Heard]:
    """Within this context, what is logged at INFO."""
    heard = Heard()
    for logger in map(logging.getLogger, LOGGERS):
        logger.addHandler(heard)
        logger.setLevel(logging.INFO)
    try:
        yield heard
    finally:
        for logger in map(logging.getLogger, LOGGERS):
            logger.removeHandler(heard)
            logger.setLevel(logging.NOTSET)
