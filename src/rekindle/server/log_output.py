"""Formatting of log records: lines of text for people, or one JSON object a line for machines.

Both begin with date and time in ISO 8601, with the offset from UTC. A record is always one line; only the traceback of
a failure follows a line of text on separate lines (in JSON it is the field `exception`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from rekindle.config import ServerSettings
from rekindle.server.lines import on_one_line

FIELDS = "rekindle"  # the attribute of a record that holds its keys and values
_OTHERS = {"debug": logging.DEBUG, "error": logging.ERROR}  # uvicorn's INFO lines repeat the banner


@contextmanager
def logging_to(settings: ServerSettings, stream: TextIO) -> Iterator[None]:
    """Send the records of all loggers to `stream` only, while this context is active.

    Levels and handlers are restored at its end, so that nothing is written to a stream that may be closed by then.
    """
    root = logging.getLogger()
    levels = {
        root: max(logging.WARNING, _level(settings)),
        logging.getLogger("rekindle"): _level(settings),
        logging.getLogger("uvicorn"): _OTHERS.get(settings.log_level, logging.WARNING),
    }
    before, handlers = {logger: logger.level for logger in levels}, root.handlers[:]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if settings.log_format == "json" else TextLines())
    _set(levels, [handler])
    try:
        yield
    finally:
        _set(before, handlers)
        handler.close()


def _set(levels: Mapping[logging.Logger, int], handlers: Sequence[logging.Handler]) -> None:
    """Set the loggers' levels, and replace the root's handlers."""
    root = logging.getLogger()
    for each in root.handlers[:]:
        root.removeHandler(each)
    for each in handlers:
        root.addHandler(each)
    for logger, level in levels.items():
        logger.setLevel(level)


def _level(settings: ServerSettings) -> int:
    return logging.getLevelNamesMapping()[settings.log_level.upper()]


def timestamp(record: logging.LogRecord) -> str:
    """Return the time of a record, to the millisecond."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class TextLines(logging.Formatter):
    """`DATE LEVEL message`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback, if any."""
        line = f"{timestamp(record)} {record.levelname} {on_one_line(record.getMessage())}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One object: `time`, `level`, `logger`, `event`, `message`, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, in ASCII, so that no parser finds a line break in it."""
        entry: dict[str, Any] = {
            "time": timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "message",
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
