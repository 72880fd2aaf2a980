"""A log on disk: the requests it holds, in order of arrival.

Owns the file's forms: JSON lines, one JSON array or HAR object, and days that our own server recorded. Lines are
located once and reread for every pass, so a file larger than memory can be analysed; arrays are held whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rekindle.errors import ConfigError
from rekindle.server.dayfile import FORMAT, Day, RecordedRequest, read_day
from rekindle_lab.analyze.shapes import Logged, parsed, read_entry

MAX_WHOLE_BYTES = 2 << 30  # of a file that is one JSON value
BROKEN, NO_REQUEST = "no JSON", "no request with a prompt in it"
LISTS = ("entries", "data", "requests", "observations", "items", "logs")


@dataclass(frozen=True, slots=True)
class Example:
    """How many entries were skipped for one reason, and the place of the first."""

    count: int
    place: str


class Tally(dict[str, Example]):
    """Examples by reason."""

    def add(self, reason: str, place: str) -> None:
        """Count one more for this reason."""
        known = self.get(reason, Example(0, place))
        self[reason] = replace(known, count=known.count + 1)


class Log(Protocol):
    """Requests in order of arrival; `skipped` by reason. Can be iterated more than once."""

    skipped: Tally
    num_entries: int

    def __len__(self) -> int:
        """Return the number of requests."""

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        """Yield each request with its human-readable place."""


def open_log(path: Path) -> Log:
    """Open the log in a file; ConfigError if it cannot be read or holds no request."""
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 26).lstrip(b"\xef\xbb\xbf")
        log = _open(path, first)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not len(log):
        why = "; ".join(f"{example.count} x {reason}" for reason, example in log.skipped.items()) or "it is empty"
        raise ConfigError(
            f"{path} holds no request: {why}. Give JSON lines of bodies sent to an API of OpenAI, Anthropic or Ollama, "
            "bare or as proxies log them, or prompts with --separator (docs/analyze.md)"
        )
    return log


def _open(path: Path, first: bytes) -> Log:
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        head = None
    if isinstance(head, Mapping) and head.get("format") == FORMAT:
        return ListLog(_day_entries(read_day(path)))
    if isinstance(head, Mapping) and (path.stat().st_size > len(first) or _listed(head) is None):
        return LineLog(path)
    entries = _whole(path)
    return LineLog(path) if entries is None else ListLog([(f"entry {at}", x) for at, x in enumerate(entries)])


def _whole(path: Path) -> Sequence[Any] | None:
    """Return the entries of a file that is one JSON value, else None."""
    if path.stat().st_size > MAX_WHOLE_BYTES:
        return None
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping | list):
        return None
    listed = _listed(value)
    return [value] if listed is None else listed


def _listed(value: Any) -> Sequence[Any] | None:
    if isinstance(value, Mapping) and isinstance(value.get("log"), Mapping):
        value = value["log"]  # HAR
    if isinstance(value, list):
        return value
    return next((value[key] for key in LISTS if isinstance(value.get(key), list)), None)


def _day_entries(day: Day) -> list[tuple[str, Any]]:
    return [(f"request {request.id}", _recorded(request, day.header.began)) for request in day.requests]


def _recorded(request: RecordedRequest, began: float) -> dict[str, Any]:
    """Convert a recorded request to the form of a proxy's log."""
    answer = request.answer or {}
    return {
        "endpoint": request.endpoint,
        "timestamp": began + request.at_s,
        "session_id": request.agent,
        "headers": dict(request.headers),
        "body": request.body,
        "response": {**answer, "usage": request.usage} if request.usage else answer,
    }


class ListLog:
    """A log whose entries, (place, JSON value) each, are held in memory."""

    def __init__(self, entries: Sequence[tuple[str, Any]]) -> None:
        self.skipped = Tally()
        found = []
        for place, entry in entries:
            logged = read_entry(entry)
            if logged is None:
                self.skipped.add(NO_REQUEST, place)
            else:
                found.append((place, logged))
        times = [logged.at_s for _, logged in found]
        self._found = [found[at] for at in _order(times)]
        self.num_entries = len(entries)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        return iter(self._found)


class LineLog:
    """JSON lines. Stores the offset of each request and reads it when iterated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.skipped = Tally()
        offsets: list[tuple[int, int]] = []
        times: list[float | None] = []
        self.num_entries = offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                start, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                self.num_entries += 1
                value = _json(line)
                logged = None if value is None else read_entry(value)
                if logged is None:
                    self.skipped.add(BROKEN if value is None else NO_REQUEST, f"line {number}")
                else:
                    offsets.append((start, number))
                    times.append(logged.at_s)
        self._offsets = [offsets[at] for at in _order(times)]

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        with self._path.open("rb") as file:
            for offset, number in self._offsets:
                file.seek(offset)
                logged = read_entry(_json(file.readline()))
                if logged is not None:  # None: the file was changed meanwhile
                    yield f"line {number}", logged


def _json(line: bytes) -> Any:
    """Return the value of a line; None if it is broken."""
    try:
        return parsed(json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return None


def _order(times: Sequence[float | None]) -> list[int]:
    """Return indices by time if every entry has one, else in file order: loggers write when a reply ends."""
    known = [at for at in times if at is not None]
    if len(known) < len(times):
        return list(range(len(times)))
    return sorted(range(len(times)), key=lambda index: known[index])
