"""A log on disk: which requests it holds, in the order in which they came.

Owns the forms of the file: JSON lines, one JSON array or HAR object, and days that our own server recorded. Lines are
found once and read again for every pass, so that a file larger than memory can be analysed; arrays are held whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rekindle.analyze.shapes import Logged, parsed, read_entry
from rekindle.errors import ConfigError
from rekindle.server.dayfile import FORMAT, Day, RecordedRequest, read_day

MAX_WHOLE_BYTES = 2 << 30  # of a file that is one JSON value
BROKEN, NO_REQUEST = "no JSON", "no request with a prompt in it"
LISTS = ("entries", "data", "requests", "observations", "items", "logs")
Skipped = Mapping[str, "Example"]


@dataclass(frozen=True, slots=True)
class Example:
    """How many entries were passed over for one reason, and where the first stands."""

    count: int
    place: str


class Log(Protocol):
    """Requests in the order in which they came; `skipped` by reason. Iterating again gives the same."""

    skipped: Skipped
    num_entries: int

    def __len__(self) -> int:
        """How many requests there are."""

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        """Each with the place where it stands, for people."""


def open_log(path: Path) -> Log:
    """The log in a file; ConfigError where it cannot be read or holds no request at all."""
    try:
        with path.open("rb") as file:
            first = file.readline(1 << 26).lstrip(b"\xef\xbb\xbf")
        log = _open(path, first)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not len(log):
        why = "; ".join(f"{example.count} x {reason}" for reason, example in log.skipped.items()) or "it is empty"
        raise ConfigError(
            f"{path} holds no request: {why}. Give JSON lines of bodies sent to OpenAI's or Anthropic's API, bare or "
            "as proxies log them, or prompts with --separator (docs/analyze.md)"
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
    """The entries of a file that is one JSON value; None where it is none."""
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
    """A recorded request in the form of a proxy's log."""
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
    """A log whose entries are held: (place, JSON value) each."""

    def __init__(self, entries: Sequence[tuple[str, Any]]) -> None:
        skipped: _Tally = _Tally()
        found = []
        for place, entry in entries:
            logged = read_entry(entry)
            if logged is None:
                skipped.add(NO_REQUEST, place)
            else:
                found.append((place, logged))
        times = [logged.at_s for _, logged in found]
        self._found = [found[at] for at in _order(times)]
        self.skipped = skipped.examples()
        self.num_entries = len(entries)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        return iter(self._found)


class LineLog:
    """JSON lines. Remembers where each request begins, and reads it when it is its turn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        skipped = _Tally()
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
                    skipped.add(BROKEN if value is None else NO_REQUEST, f"line {number}")
                else:
                    offsets.append((start, number))
                    times.append(logged.at_s)
        self._offsets = [offsets[at] for at in _order(times)]
        self.skipped = skipped.examples()

    def __len__(self) -> int:
        return len(self._offsets)

    def __iter__(self) -> Iterator[tuple[str, Logged]]:
        with self._path.open("rb") as file:
            for offset, number in self._offsets:
                file.seek(offset)
                logged = read_entry(_json(file.readline()))
                if logged is not None:  # None: the file was changed meanwhile
                    yield f"line {number}", logged


class _Tally:
    """Counts reasons, and keeps the first place of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._places: dict[str, str] = {}

    def add(self, reason: str, place: str) -> None:
        self._counts[reason] += 1
        self._places.setdefault(reason, place)

    def examples(self) -> Skipped:
        return {reason: Example(count, self._places[reason]) for reason, count in self._counts.items()}


def _json(line: bytes) -> Any:
    """The value of a line; None where it is broken."""
    try:
        return parsed(json.loads(line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return None


def _order(times: Sequence[float | None]) -> list[int]:
    """Indices by time where every entry has one, else as they stand: loggers write when a reply ends."""
    known = [at for at in times if at is not None]
    if len(known) < len(times):
        return list(range(len(times)))
    return sorted(range(len(times)), key=lambda index: known[index])
