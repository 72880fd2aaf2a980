"""Limits on incoming requests: size and minimum speed of bodies, and no requests during shutdown; and what one tenant
may keep.

Owns the number of requests in progress, which a shutdown waits for, and the bytes of their bodies. A body is read whole
before any route sees it, so that no route has to bound it, and counts until its request is answered; but for files,
which their route takes piece by piece (`to_file`). `connections` bounds connections, the engine bounds waiting
requests. How much of a body becomes prompt is not known here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import RawIOBase
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle import allocator
from rekindle.config import WORDS_SHARE, ServerSettings
from rekindle.errors import Cancelled, StoreRefused
from rekindle.server.border import HttpError, Problem, in_thread, invalid
from rekindle.server.gate.caller import access_of
from rekindle.server.gate.keys import Keys
from rekindle.server.gate.tenants import Rates

if TYPE_CHECKING:  # a server of several models computes nothing, and imports no torch
    from rekindle.engine.api import Engine

MIN_BYTES_PER_S = 16 << 10  # a body slower than this, beyond `read_timeout_s`, times out
BODIES_AT_ONCE = 8  # budget of all requests together, in bodies of the largest size (256 MiB by default)
SHARE = 0.5  # of that budget, for one namespace if there are several
MAX_CODING_CHARS = 50  # of a coding's name, in error messages
_BROKEN = "rekindle_broken_body"
LIMITED = ("/v1/", "/api/")
FILES = re.compile(rb"(?:/models/[^/]+)?/v1/agents/[^/]+/import")  # paths whose bodies are files
STOPPING = Problem(503, "server_error", "the server is stopping: try again", code="stopping", retry_after_s=5)
CROWDED = Problem(503, "server_error", "too many large bodies at once: try again", code="overloaded", retry_after_s=1)
LARGE = 1 << 20  # bytes of a body that make a trim worthwhile
MEMORY_BYTES = 128 << 20  # for sessions, and the same for stored responses, without a disk
AFTER_S = 1.0  # once for all bodies of a second


# Return of memory that large bodies used to the operating system, shortly after they are answered.
#
# The allocator would keep the memory of a tenant's body, once for every thread that has handled it.


class FreedMemory:
    """Schedules trims on one event loop."""

    def __init__(self) -> None:
        self._is_due = False

    def give_back(self) -> None:
        """Schedule a trim of free memory, in a worker thread."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, allocator.trim)


class ShutdownGate:
    """Counts the requests in progress; once closed, it admits no more."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_closed = False
        self._closed = asyncio.Event()
        self._cut = asyncio.Event()

    def drain(self) -> None:
        """End streams that only watch; all else goes on."""
        self._closed.set()

    def close(self) -> None:
        """Refuse new requests; those in progress continue, except streams that only watch."""
        self.is_closed = True
        self._closed.set()

    async def closed(self) -> None:
        """Wait until the gate is closed or drained: streams that only watch end then."""
        await self._closed.wait()

    def cut(self) -> None:
        """Signal a disconnect to every request in progress: each answer ends as soon as it can."""
        self._cut.set()

    async def listen(self, receive: Receive) -> Message:
        """Return the connection's next message, or a disconnect once `cut` is called."""
        message, cut = asyncio.ensure_future(receive()), asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((message, cut), return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            cut.cancel()


class BodyBudget:
    """Bytes of the bodies in memory, at most `limit` in all and `share` of that for one namespace.

    For one event loop.
    """

    def __init__(self, limit: int, *, share: float = 1.0) -> None:
        self.num_bytes = 0
        self._limit = limit
        self._share = int(share * limit)
        self._of: Counter[str] = Counter()

    def take(self, namespace: str, num_bytes: int) -> bool:
        """Reserve bytes; False, with nothing reserved, if they exceed the budget."""
        if self.num_bytes + num_bytes > self._limit or self._of[namespace] + num_bytes > self._share:
            return False
        self.num_bytes += num_bytes
        self._of[namespace] += num_bytes
        return True

    def give(self, namespace: str, num_bytes: int) -> None:
        """Release reserved bytes."""
        assert num_bytes <= self._of[namespace], "more bytes of bodies went out than came in"
        self.num_bytes -= num_bytes
        self._of[namespace] -= num_bytes
        assert self.num_bytes == sum(self._of.values()), "the bytes of all are not those of each"


@dataclass(slots=True)
class _Body:
    """One body of a namespace while it is received; `num_held` of its bytes are reserved in the budget."""

    namespace: str
    content: bytearray = field(default_factory=bytearray)
    num_held: int = 0


class Limits:
    """ASGI middleware after the guard: answers 408, 413, 415, 429 and 503 itself, and passes whole bodies on.

    Bodies that are POSTed to a path of `files` are passed on unread: their route bounds them.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        gate: ShutdownGate,
        keys: Keys,
        files: re.Pattern[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._files = files
        self._settings = settings
        self._gate = gate
        self._clock = clock
        share = SHARE if settings.has_tenants() else 1.0
        self.budget = BodyBudget(BODIES_AT_ONCE * settings.max_body_bytes, share=share)
        self._freed = FreedMemory()
        self._rates = Rates(keys.requests_per_minute, clock=clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request and read its body; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._problem(Request(scope))
        if problem is None:
            self._gate.num_inside += 1
            try:
                await self._inside(scope, receive, send)
            finally:
                self._gate.num_inside -= 1
        else:
            await problem.response(scope)(scope, receive, send)

    def _problem(self, request: Request) -> Problem | None:
        path = request.scope["path"]
        if self._gate.is_closed and path != "/health/live":
            return STOPPING
        return self._rates.problem(access_of(request).namespace) if path.startswith(LIMITED) else None

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        is_file = self._files is not None and scope["method"] == "POST" and self._files.fullmatch(scope["raw_path"])
        if is_empty or is_file:
            await self._app(scope, partial(self._gate.listen, receive), send)
            return
        body = _Body(access_of(Request(scope)).namespace)
        try:
            whole = await self._read(scope, receive, body)
            if whole is not None:  # None: the client disconnected
                await self._app(scope, self._handing(whole, receive), send)
        except HttpError as error:
            await error.problem.response(scope)(scope, receive, send)
        finally:
            self.budget.give(body.namespace, body.num_held)
            if body.num_held > LARGE:
                self._freed.give_back()

    async def _read(self, scope: Scope, receive: Receive, body: _Body) -> bytes | None:
        """Read the whole body; None if the client disconnected.

        Up to twice `max_body_bytes` of a refused body is read and discarded: otherwise a client still sending would
        miss the answer.
        """
        headers = Headers(scope=scope)
        most, announced = self._settings.max_body_bytes, headers.get("content-length", "")
        problem = _coded(headers)
        if announced.isdecimal():
            problem = self._excess(int(announced)) or problem
        num_bytes, began = 0, self._clock()
        while True:
            left_s = self._settings.read_timeout_s + num_bytes / MIN_BYTES_PER_S - (self._clock() - began)
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left_s))
            except TimeoutError:
                raise invalid(408, "timed out reading the request body") from None
            if message["type"] == "http.disconnect":
                return None
            if broken := scope.get("state", {}).get(_BROKEN):
                raise invalid(400, broken)
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            problem = self._excess(num_bytes) or problem
            if problem is None and not self.budget.take(body.namespace, len(chunk)):
                problem = HttpError(CROWDED)
            if problem is None:
                body.content += chunk
                body.num_held += len(chunk)
            else:
                self._drop(body)
            if num_bytes > 2 * most or not message.get("more_body", False):
                break
        if problem is not None:
            raise problem
        whole = bytes(body.content)
        body.content.clear()
        return whole

    def _excess(self, num_bytes: int) -> HttpError | None:
        """Return the error for a body of this size; None if it is allowed."""
        most = self._settings.max_body_bytes
        return invalid(413, f"the body is larger than {_size(most)}") if num_bytes > most else None

    def _drop(self, body: _Body) -> None:
        body.content.clear()
        self.budget.give(body.namespace, body.num_held)
        body.num_held = 0

    def _handing(self, body: bytes, receive: Receive) -> Receive:
        """Return a `receive` that gives the whole body first, then the connection's further messages."""
        given = False

        async def hand() -> Message:
            nonlocal given
            if given:
                return await self._gate.listen(receive)
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return hand


async def to_file(request: Request, file: RawIOBase, *, most: int, timeout_s: float) -> None:
    """Write a body to a file without a buffer, as it comes, of at most so many bytes. HttpError if it is larger, slower
    than `MIN_BYTES_PER_S` after `timeout_s` seconds, encoded, or broken; StoreError if the disk refuses it.
    """
    problem = _coded(request.headers)
    if problem is not None:
        raise problem
    num_bytes, began, pieces = 0, time.monotonic(), request.stream()
    try:
        while True:
            left_s = timeout_s + num_bytes / MIN_BYTES_PER_S - (time.monotonic() - began)
            piece = await asyncio.wait_for(anext(pieces, None), max(0.0, left_s))
            if broken := request.scope.get("state", {}).get(_BROKEN):
                raise invalid(400, broken)
            if piece is None:
                return
            num_bytes += len(piece)
            if num_bytes > most:
                raise invalid(413, f"the file is larger than {_size(most)}, which is what the store has room for")
            await in_thread(_write, file, piece)
    except TimeoutError:
        raise invalid(408, "timed out reading the request body") from None
    except ClientDisconnect:
        raise Cancelled("the client left before all of the file had come") from None
    except OSError as error:
        raise StoreRefused(f"the file cannot be taken, and nothing has changed: {error}") from error


def _write(file: RawIOBase, piece: bytes) -> None:
    while piece:
        piece = piece[file.write(piece) or 0 :]


def kept_bytes(engine: Engine, settings: ServerSettings) -> int:
    """Return the bytes of coordination sessions that a namespace may have, and of stored responses: none takes
    another's space.

    Both count towards `--disk-bytes`, next to the KV, which yields space to them; each has a share there that is
    divided equally among tenants. Without a store they are in memory.
    """
    store = engine.stats().store
    share = MEMORY_BYTES if store is None else int(WORDS_SHARE * store["disk_bytes"])
    return share // len(settings.namespaces())


def break_body(state: dict[str, Any], why: str) -> None:
    """Record in a request's state why the rest of its body cannot be read; call it before ending the body."""
    state[_BROKEN] = why


def _coded(headers: Headers) -> HttpError | None:
    """Return the error for a body that is compressed or encoded otherwise; None if it is plain."""
    codings = [each.strip().lower() for value in headers.getlist("content-encoding") for each in value.split(",")]
    unknown = next((each for each in codings if each not in ("", "identity")), None)
    if unknown is None:
        return None
    message = f"Content-Encoding {unknown[:MAX_CODING_CHARS]!r} is not supported: send the body as it is"
    return invalid(415, message, param="Content-Encoding", code="unsupported_content_encoding")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
