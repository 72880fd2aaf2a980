"""How records of the log are written: lines of text for people, or one JSON object a line for machines.

Either begins with the date and time in ISO 8601, with the offset from UTC. A record is one line whatever was quoted in
it; only the traceback of a failure follows a line of text on lines of its own (in JSON it is the field `exception`).
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
_OTHERS = {"debug": logging.DEBUG, "error": logging.ERROR}  # uvicorn says at INFO what the banner says


@contextmanager
def logging_to(settings: ServerSettings, stream: TextIO) -> Iterator[None]:
    """Within this context what is logged goes to `stream`, of ours, uvicorn's and everybody else's loggers, and nowhere
    else; after it, all is as it was, so that nothing is written to a stream that may be closed by then."""
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
    """Have the loggers these levels, and the root these handlers alone."""
    root = logging.getLogger()
    for each in root.handlers[:]:
        root.removeHandler(each)
    for each in handlers:
        root.addHandler(each)
    for logger, level in levels.items():
        logger.setLevel(level)


def _level(settings: ServerSettings) -> int:
    return logging.getLevelNamesMapping()[settings.log_level.upper()]


def moment(record: logging.LogRecord) -> str:
    """When it was logged, to the millisecond."""
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class TextLines(logging.Formatter):
    """`DATE LEVEL message`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a traceback where there is one."""
        line = f"{moment(record)} {record.levelname} {on_one_line(record.getMessage())}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One object: `time`, `level`, `logger`, `event`, `message`, and what the record has of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; ASCII, so that no reader takes a sign in it for a line break."""
        entry: dict[str, Any] = {
            "time": moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": "message",
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
