"""The file format of a recorded day: requests, answers, and when the server paused, stopped or was killed.

Owns the format (docs/replay.md): one JSON object a line, a header first, one line per finished request, appended as it
ends. Messages, tools and instructions of an earlier line are referred to, so that a long one is written once. Knows no
HTTP and no engine: the server's recorder and `rekindle bench day` write it, `rekindle bench replay` reads it.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rekindle.errors import ConfigError

FORMAT, VERSION = "rekindle-day", 1
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"  # its messages are in `input`
SHARED = ("tools", "system", "instructions")  # fields that a line may copy whole from an earlier one
NUM_BASES = 64  # remembered requests that a later line may refer to
MAX_HEADER_BYTES = 1 << 20
MAX_BASE_BYTES = 64 << 20  # of their messages and tools, as JSON
Kind = Literal["pause", "restart", "kill"]
KINDS: tuple[Kind, ...] = ("pause", "restart", "kill")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as the client sent it, and its answer: an assistant message, or None where it failed (`error`).

    `at_s` counts from the header's `began`. Requests of one `session` waited for each other; the writer replaces "".
    `headers` are only those that name the agent: keys and cookies do not belong in a file.
    """

    at_s: float
    body: Mapping[str, Any]
    answer: Mapping[str, Any] | None
    session: str = ""
    agent: str | None = None
    endpoint: str = CHAT
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int = 200
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    first_token_s: float | None = None
    duration_s: float = 0.0
    error: str | None = None
    id: str = ""

    @property
    def messages(self) -> list[Any]:
        """The messages of the body; none if it has a plain prompt."""
        found = self.body.get(_messages_key(self.endpoint))
        return list(found) if isinstance(found, list | tuple) else []


@dataclass(frozen=True, slots=True)
class DayEvent:
    """An event of the whole server: a pause of `seconds`, a restart (regular stop) or a kill (SIGKILL)."""

    at_s: float
    kind: Kind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: Unix time of second 0, the model's name, and optional facts about the day."""

    began: float
    model: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Day:
    """A whole file; requests and events each sorted by time."""

    header: Header
    requests: tuple[RecordedRequest, ...]
    events: tuple[DayEvent, ...]


@dataclass(frozen=True, slots=True)
class _Base:
    """A written request that later lines may refer to; `sizes`: bytes of each message, then of each shared field."""

    id: str
    session: str
    messages: Sequence[Any]
    shared: Mapping[str, Any]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its messages and shared fields."""
        return sum(self.sizes)


class DayWriter:
    """Appends lines to one file, each flushed to the system; for one thread. Close it after use.

    An existing file is continued: its header remains, a line torn by a crash is cut off, and a restart is recorded at
    `at_s`, or at the current time in `header` if that is later (None: the server kept running, no restart). From then
    on only the owner may read the file; OSError if that is not possible.
    """

    def __init__(self, path: Path, header: Header, *, at_s: float | None = 0.0) -> None:
        self._bases: OrderedDict[str, _Base] = OrderedDict()
        self._base_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        known = known_header(path) if path.exists() else None  # before the file is changed
        num_lines = _cut_torn_line(path) if path.exists() else 0
        self.header = known or header
        self._number = num_lines
        self._file = os.fdopen(_open_private(path), "a", encoding="utf-8")
        if num_lines and at_s is not None:
            self.event(DayEvent(max(at_s, header.began - self.header.began), "restart"))
        elif not num_lines:
            self._line({"format": FORMAT, "version": VERSION, **_given(header)})

    def request(self, request: RecordedRequest) -> str:
        """Append a finished request and return the id of its line."""
        base, common = self._base_for(request)
        key = request.id or str(self._number)
        continued = base is not None and common == len(base.messages)
        session = request.session or request.agent or (base.session if base and continued else f"unnamed-{key}")
        body = dict(request.body)
        line = {"event": "request", **_given(replace(request, id=key, session=session))}
        if base is not None and common:
            line["messages_from"] = {"id": base.id, "count": common}
            body[_messages_key(request.endpoint)] = request.messages[common:]
        for name in SHARED:
            if (source := self._sharing(name, body.get(name))) is not None:
                line[f"{name}_from"] = source
                del body[name]
        self._line(line | {"body": body})
        self._remember(key, session, request, base=base, common=common)
        return key

    def event(self, event: DayEvent) -> None:
        """Append an event of the whole server."""
        self._line({"event": event.kind, "at_s": event.at_s, **({"seconds": event.seconds} if event.seconds else {})})

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._file.close()

    def __enter__(self) -> DayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _base_for(self, request: RecordedRequest) -> tuple[_Base | None, int]:
        """Find the latest remembered request with the longest common prefix of messages, and the prefix's length."""
        found, most = None, 0
        for base in reversed(self._bases.values()):
            common = _common(base.messages, request.messages)
            if common > most:
                found, most = base, common
        return found, most

    def _sharing(self, name: str, value: Any) -> str | None:
        """Return the id of the latest remembered request with the same value; None without one, or if it is empty."""
        return next((base.id for base in reversed(self._bases.values()) if value and base.shared[name] == value), None)

    def _remember(self, key: str, session: str, request: RecordedRequest, *, base: _Base | None, common: int) -> None:
        """Remember a written request; the oldest ones are dropped for it. One that is too large alone is not kept."""
        messages, shared = request.messages, {name: request.body.get(name) for name in SHARED}
        known = base.sizes[:common] if base is not None else ()
        sizes = (*known, *(_size(each) for each in (*messages[common:], *shared.values())))
        self._bases[key] = new = _Base(key, session, messages, shared, sizes)
        self._base_bytes += new.num_bytes
        while len(self._bases) > NUM_BASES or self._base_bytes > MAX_BASE_BYTES:
            _, oldest = self._bases.popitem(last=False)
            self._base_bytes -= oldest.num_bytes

    def _line(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")  # ASCII, for unpaired surrogates
        self._file.flush()
        self._number += 1


def read_day(path: Path) -> Day:
    """Read a file; ConfigError names an invalid line. A last line torn by a crash is ignored."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    header = _parse_header(path, lines[0])
    written: dict[str, RecordedRequest] = {}
    events: list[DayEvent] = []
    for number, text in enumerate(lines[1:-1], start=2):  # a complete file ends in a line break
        try:
            line = json.loads(text)
            if line["event"] in KINDS:
                events.append(DayEvent(line["at_s"], line["event"], line.get("seconds", 0.0)))
            elif line["event"] == "request":
                request = _request_of(line, written)
                written[request.id] = request
            else:
                raise ValueError(f"no event is called {line['event']!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}, line {number}: not a line of a recorded day: {error!r}") from None
    requests = sorted(written.values(), key=lambda request: request.at_s)
    return Day(header, tuple(requests), tuple(sorted(events, key=lambda event: event.at_s)))


def _request_of(line: dict[str, Any], written: Mapping[str, RecordedRequest]) -> RecordedRequest:
    body = dict(line["body"])
    if "messages_from" in line:
        base = written[line["messages_from"]["id"]].messages
        count = line["messages_from"]["count"]
        if count > len(base):
            raise ValueError(f"it refers to {count} messages of a request that has {len(base)}")
        key = _messages_key(line.get("endpoint", CHAT))
        body[key] = [*base[:count], *body.get(key, ())]
    for name in SHARED:
        if f"{name}_from" in line:
            body[name] = written[line[f"{name}_from"]].body[name]
    known = set(RecordedRequest.__dataclass_fields__) - {"body"}
    given = {name: value for name, value in line.items() if name in known}
    return RecordedRequest(**{"answer": None} | given | {"body": body})


def _messages_key(endpoint: str) -> str:
    return "input" if endpoint == RESPONSES else "messages"


def _given(value: Header | RecordedRequest) -> dict[str, Any]:
    """Return the fields that are not empty."""
    fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
    return {name: item for name, item in fields.items() if item not in (None, "") and item != {}}


def _open_private(path: Path) -> int:
    """Open a file, new or not, so that only its owner can read it: it contains what people wrote."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.fchmod(number, 0o600)
    except OSError:
        os.close(number)
        raise
    return number


def _size(value: Any) -> int:
    return len(json.dumps(value, separators=(",", ":")))


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def _parse_header(path: Path, text: str) -> Header:
    try:
        line = json.loads(text)
        if (line["format"], line["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {line['format']!r}, version {line['version']!r}")
        return Header(float(line["began"]), line.get("model"), line.get("about", {}))
    except (ValueError, KeyError, TypeError) as error:
        message = f"{path} does not begin with the header of a recorded day (version {VERSION}): {error!r}"
        raise ConfigError(message) from None


def known_header(path: Path) -> Header | None:
    """Read the header of a file to continue; None if it is empty or has only a torn header of ours.

    ConfigError for any other content: foreign files must not be overwritten.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: name a file to record to")
    with path.open("rb") as file:
        first = file.readline(MAX_HEADER_BYTES)
    begin = json.dumps({"format": FORMAT, "version": VERSION}, separators=(",", ":")).removesuffix("}").encode()
    if not first.endswith(b"\n") and (first.startswith(begin) or begin.startswith(first)):
        return None
    return _parse_header(path, first.decode(errors="replace"))


def _cut_torn_line(path: Path) -> int:
    """Truncate after the last line break and count the remaining lines. Reads a MiB at a time."""
    num_lines = whole = size = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            num_lines += piece.count(b"\n")
            if b"\n" in piece:
                whole = size + piece.rindex(b"\n") + 1
            size += len(piece)
    if whole < size:
        os.truncate(path, whole)
    return num_lines
