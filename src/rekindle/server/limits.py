"""How much comes in: requests a minute, bytes of a body and how slowly they may trickle, and nothing once we stop.

Owns the count of requests inside, which a stop waits for, and of the bytes of their bodies. A body is read whole before
any route sees it, so that no route has to bound it, and counts until its request has been answered. Connections are
bounded in `connections`, waiting requests by the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server.caller import access_of
from rekindle.server.errors import HttpError, Problem, invalid

LEAST_BYTES_PER_S = 16 << 10  # a body that comes slower than this, after the first moments, is given up
BODIES_AT_ONCE = 8  # bodies of the largest size, 256 MiB by default, that all requests together may hold
LIMITED = "/v1/"
STOPPING = Problem(503, "server_error", "the server is stopping: try again", code="stopping", retry_after_s=5)
CROWDED = Problem(503, "server_error", "too many large bodies at once: try again", code="overloaded", retry_after_s=1)


@dataclass(slots=True)
class _Bucket:
    """Requests that may come at once, as of a moment."""

    tokens: float
    at: float


class Rates:
    """A bucket of `per_minute` requests per namespace, filled evenly. Namespaces are few: the settings name them."""

    def __init__(self, per_minute: int, *, clock: Callable[[], float]) -> None:
        self._capacity = per_minute
        self._per_s = per_minute / 60
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, namespace: str) -> float:
        """Take one request out: 0.0, or the seconds until there is one."""
        now = self._clock()
        bucket = self._buckets.setdefault(namespace, _Bucket(self._capacity, now))
        bucket.tokens = min(self._capacity, bucket.tokens + (now - bucket.at) * self._per_s)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / self._per_s
        bucket.tokens -= 1
        return 0.0


class Door:
    """Counts the requests inside; once closed, nobody else comes in."""

    def __init__(self) -> None:
        self.num_inside = 0
        self.is_closed = False
        self._closed = asyncio.Event()
        self._cut = asyncio.Event()

    def close(self) -> None:
        """Turn away whoever comes from now on; those inside stay, but for who only watches."""
        self.is_closed = True
        self._closed.set()

    async def closed(self) -> None:
        """Return when it is closed: who only watches leaves then."""
        await self._closed.wait()

    def cut(self) -> None:
        """Tell those inside that their clients have left: each answer ends as soon as it can."""
        self._cut.set()

    async def listen(self, receive: Receive) -> Message:
        """What the connection says next, or that it is cut."""
        heard, cut = asyncio.ensure_future(receive()), asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((heard, cut), return_when=asyncio.FIRST_COMPLETED)
            return heard.result() if heard.done() else {"type": "http.disconnect"}
        finally:
            heard.cancel()
            cut.cancel()


class BodyRoom:
    """Bytes of the bodies that are held, and how many there may be. For one event loop."""

    def __init__(self, limit: int) -> None:
        self.num_bytes = 0
        self._limit = limit

    def take(self, num_bytes: int) -> bool:
        """Count bytes more; False, and nothing counted, where there is no room for them."""
        if self.num_bytes + num_bytes > self._limit:
            return False
        self.num_bytes += num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        """Bytes that were taken are gone."""
        assert num_bytes <= self.num_bytes, "more bytes of bodies went out than came in"
        self.num_bytes -= num_bytes


@dataclass(slots=True)
class _Body:
    """One body as it comes; `num_held` of its bytes are counted."""

    content: bytearray = field(default_factory=bytearray)
    num_held: int = 0


class Limits:
    """ASGI middleware behind the guard: answers 408, 413, 429 and 503 itself, and hands on whole bodies."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, door: Door, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._settings = settings
        self._door = door
        self._clock = clock
        self.room = BodyRoom(BODIES_AT_ONCE * settings.max_body_bytes)
        self._rates = Rates(settings.requests_per_minute, clock=clock) if settings.requests_per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request and read its body; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        problem = self._problem(Request(scope))
        if problem is None:
            self._door.num_inside += 1
            try:
                await self._inside(scope, receive, send)
            finally:
                self._door.num_inside -= 1
        else:
            await problem.response(scope["path"])(scope, receive, send)

    def _problem(self, request: Request) -> Problem | None:
        path = request.scope["path"]
        if self._door.is_closed and path != "/health/live":
            return STOPPING
        if self._rates is None or not path.startswith(LIMITED):
            return None
        wait_s = self._rates.take(access_of(request).namespace)
        if not wait_s:
            return None
        message = f"more than {self._settings.requests_per_minute} requests a minute: come back in {wait_s:.1f} s"
        return Problem(429, "requests", message, code="rate_limit_exceeded", retry_after_s=wait_s)

    async def _inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        body = _Body()
        try:
            whole = await self._read(headers, receive, body)
            if whole is not None:  # None: the client left, nobody waits for an answer
                await self._app(scope, self._handing(whole, receive), send)
        except HttpError as error:
            await error.problem.response(scope["path"])(scope, receive, send)
        finally:
            self.room.give(body.num_held)

    async def _read(self, headers: Headers, receive: Receive, body: _Body) -> bytes | None:
        """The whole body; None when the client left. What is too much is read on for a while and thrown away.

        A client that is still sending would not see the answer.
        """
        most, announced = self._settings.max_body_bytes, headers.get("content-length", "")
        too_large = announced.isdecimal() and int(announced) > most
        problem = self._too_large() if too_large else None
        num_bytes, began = 0, self._clock()
        while True:
            left_s = self._settings.read_timeout_s + num_bytes / LEAST_BYTES_PER_S - (self._clock() - began)
            try:
                message = await asyncio.wait_for(receive(), max(0.0, left_s))
            except TimeoutError:
                raise invalid(408, "the body did not come in time") from None
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > most:
                problem = self._too_large()
            elif problem is None and not self.room.take(len(chunk)):
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

    def _too_large(self) -> HttpError:
        return invalid(413, f"the body is larger than {_size(self._settings.max_body_bytes)}")

    def _drop(self, body: _Body) -> None:
        body.content.clear()
        self.room.give(body.num_held)
        body.num_held = 0

    def _handing(self, body: bytes, receive: Receive) -> Receive:
        """Gives the body at once, then what the connection still has to say."""
        given = False

        async def hand() -> Message:
            nonlocal given
            if given:
                return await self._door.listen(receive)
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return hand


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
