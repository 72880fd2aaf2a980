"""Log lines for operators: one per request, successful or not, and one per session turn.

Owns the running cost of a prompt token, from which the time saved is estimated. docs/log.md describes the lines.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TextIO

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.engine.types import FinishReason, Report
from rekindle.errors import RekindleError
from rekindle.server.border import CLIENT_LEFT, Problem, dialect_of, problem_of
from rekindle.server.gate.caller import Caller
from rekindle.server.lines import CURRENT, REQUEST_ID, Line, new_id, on_one_line, plain
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text import messages
from rekindle.worker import MEANT_FOR_THE_LOOP

logger = logging.getLogger("rekindle.server")
_PRICED_TOKENS = 16  # shorter prefills measure the step, not the tokens
FIELDS = "rekindle"  # the attribute of a record that holds its keys and values
_OTHERS = {"debug": logging.DEBUG, "error": logging.ERROR}  # uvicorn's INFO lines repeat the banner


class RequestLog:
    """Describes replies for the log, with the time saved estimated from the measured cost of a prompt token."""

    def __init__(self) -> None:
        self._computed_tokens = 0
        self._prefill_ms = 0.0

    @property
    def price_ms(self) -> float | None:
        """Milliseconds per computed prompt token so far."""
        return self._prefill_ms / self._computed_tokens if self._computed_tokens else None

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> LogWatch:
        """Follow one request; `Logged` writes its line."""
        line = CURRENT.get() or Line(new_id())
        line.agent = caller.agent
        return LogWatch(self, line)

    def learn(self, report: Report) -> None:
        """Update the cost of a prompt token."""
        if report.computed_tokens >= _PRICED_TOKENS:
            self._computed_tokens += report.computed_tokens
            self._prefill_ms += report.timings.prefill_ms

    def saved_ms(self, report: Report) -> float | None:
        """Estimate how long the reused tokens would have taken; None without a measurement."""
        if not (report.reused_tokens and report.computed_tokens):
            return None
        price_ms = self.price_ms
        if price_ms is None:  # nothing measured yet: use this prefill
            price_ms = report.timings.prefill_ms / report.computed_tokens
        return report.reused_tokens * price_ms

    def described(self, report: Report, reason: FinishReason) -> str:
        """Describe outcome, reused tokens and their tier, time to first token, time saved, and the cause of a miss."""
        parts = [
            report.outcome if report.reuse != "off" else "reuse off",
            f"reused {report.reused_tokens:,} of {report.prompt_tokens:,}{_tiers(report)}",
            f"first token {report.timings.first_token_ms:,.0f} ms",
        ]
        saved_ms = self.saved_ms(report)
        if saved_ms is not None:
            parts.append(f"saved about {saved_ms:,.0f} ms")
        parts.append("cancelled" if reason == "cancelled" else f"{report.completion_tokens:,} tokens out")
        parts += (_taken_out(kind, tokens) for kind, tokens in _dearest(report).items())
        if report.left_out:
            parts.append("not shown: " + ", ".join(f"{each.kind} ({each.count:,})" for each in report.left_out))
        if report.ignored:
            parts.append(f"ignored: {' '.join(report.ignored)}")
        if report.explanation is not None:
            parts.append(f"because: {report.explanation.cause.replace('_', ' ')}")
        return ", ".join(parts)

    def fields(self, report: Report, reason: FinishReason) -> dict[str, Any]:
        """Return the same facts as keys and values."""
        first_ms, saved_ms = report.timings.first_token_ms, self.saved_ms(report)
        return {
            "outcome": report.outcome,
            "reuse": report.reuse,
            "prompt_tokens": report.prompt_tokens,
            "reused_tokens": report.reused_tokens,
            "hot_tokens": report.hot_tokens,
            "warm_tokens": report.warm_tokens,
            "computed_tokens": report.computed_tokens,
            "completion_tokens": report.completion_tokens,
            "first_token_ms": round(first_ms, 3) if math.isfinite(first_ms) else None,
            "saved_ms": None if saved_ms is None else round(saved_ms, 3),
            "finish_reason": reason,
            "cause": None if report.explanation is None else report.explanation.cause,
            "normalised": _dearest(report),
            "left_out": {each.kind: each.count for each in report.left_out},
            "ignored": list(report.ignored),
        }


class TurnLog:
    """Writes one line per turn of a session: a request may run several turns, and a turn may outlive its request."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> LogWatch:
        """Follow one turn."""
        current = CURRENT.get()
        line = Line("-" if current is None else current.request_id, tenant=caller.namespace, agent=caller.agent)
        return LogWatch(self._log, line, is_turn=True)


class LogWatch(RequestWatch):
    """Records the result of one request in its line; for a turn it also writes the line."""

    def __init__(self, log: RequestLog, line: Line, *, is_turn: bool = False) -> None:
        self._log = log
        self._line = line
        self._is_turn = is_turn

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: messages.Message, id: ReplyId | None = None
    ) -> None:
        """Record a choice. With several, `fields` are those of the first and `num_replies` counts all."""
        line = self._line
        self._log.learn(report)
        line.details.append(self._log.described(report, reason))
        line.fields = {**self._log.fields(report, reason), **line.fields, "num_replies": len(line.details)}
        self._write_turn("complete")

    def failed(self, number: int | None, error: Exception) -> None:
        """Record why there is no reply."""
        status, named = problem_of(error).status, str(error) if isinstance(error, RekindleError) else repr(error)
        self._line.fail(status, named)
        self._write_turn("failed", logging.INFO if status < 500 else logging.WARNING)

    def _write_turn(self, how: str, level: int = logging.INFO) -> None:
        if not self._is_turn:
            return
        line = self._line
        head = f"turn {how} tenant={plain(line.tenant)} agent={plain(line.agent)} id={line.request_id}"
        about = {"event": "turn", "request_id": line.request_id, "tenant": line.tenant, "agent": line.agent}
        logger.log(level, "%s: %s", head, line.about(), extra={FIELDS: {**about, **line.fields, **line.failure()}})


def _tiers(report: Report) -> str:
    if report.hot_tokens and report.warm_tokens:
        return f" ({report.hot_tokens:,} hot, {report.warm_tokens:,} warm)"
    return " hot" if report.hot_tokens else " warm" if report.warm_tokens else ""


def _dearest(report: Report) -> dict[str, int]:
    """Return by kind the tokens that normalising saved, the most of any place."""
    return {item.kind: item.tokens for item in sorted(report.normalised, key=lambda item: item.tokens)}


def _taken_out(kind: str, tokens: int) -> str:
    done = {"tools": "tools put in order", "tail": "tail moved", "compaction": "kept as before the summary"}.get(
        kind, f"{kind} taken out"
    )
    return f"{done} (would have cost {tokens:,} tokens)" if tokens else done


def write(line: Line, crash: BaseException | None = None) -> None:
    """Write the line of an ended request; `crash`: an exception that no route caught, logged with its traceback."""
    status = line.status or 0
    level = logging.ERROR if crash is not None else logging.INFO if status < 500 else logging.WARNING
    about = line.about()
    text = f"{line.head()}: {about}" if about else line.head()
    logger.log(level, "%s", text, exc_info=crash, extra={FIELDS: line.as_dict()})


def write_unread(problem: Problem, client: str | None, own_id: str) -> None:
    """Write a line for input that could not be parsed as a request."""
    line = Line(own_id, client=client, status=problem.status)
    line.fail(problem.status, problem.message)
    write(line)


class Logged:
    """The outermost ASGI application: assigns each request its id and writes its line when it has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP request; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line, crash = Line.of(scope), None
        exchange = _Exchange(line, scope, receive, send)
        token = CURRENT.set(line)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except MEANT_FOR_THE_LOOP:
            raise
        except BaseException as error:
            # Border: the outermost of the routes. The client has received a 500, or a truncated stream.
            crash, line.problem = error, None
            line.fail(500, repr(error))
        finally:
            CURRENT.reset(token)
            exchange.settle()
            write(line, crash)


class _Exchange:
    """Wraps `receive` and `send` of one request to collect what its line needs."""

    def __init__(self, line: Line, scope: Scope, receive: Receive, send: Send) -> None:
        self._line = line
        self._names = (REQUEST_ID, "request-id") if dialect_of(scope) == "anthropic" else (REQUEST_ID,)
        self._receive = receive
        self._send = send
        self._has_left = False
        self._is_whole = False

    async def receive(self) -> Message:
        """Receive a message; note a disconnect before the answer was complete."""
        message = await self._receive()
        self._has_left = self._has_left or (message["type"] == "http.disconnect" and not self._is_whole)
        return message

    async def send(self, message: Message) -> None:
        """Send a message; add the request's id to the response head."""
        if message["type"] == "http.response.start":
            self._line.status = CLIENT_LEFT if self._has_left else message["status"]
            headers = MutableHeaders(raw=list(message["headers"]))
            for name in self._names:
                headers[name] = self._line.request_id
            message = {**message, "headers": headers.raw}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_whole = True
        await self._send(message)

    def settle(self) -> None:
        """Set the status of a request whose answer was not completed."""
        line = self._line
        if line.status is None:
            line.status = CLIENT_LEFT if self._has_left else 500
        if self._has_left and (line.problem is None or line.details):
            line.problem, line.problem_status = "the client left", CLIENT_LEFT


# Formatting of log records: lines of text for people, or one JSON object a line for machines.
#
# Both begin with date and time in ISO 8601, with the offset from UTC. A record is always one line; only the traceback
# of a failure follows a line of text on separate lines (in JSON it is the field `exception`).


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
