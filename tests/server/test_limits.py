"""How much comes in: requests a minute, bytes of a body, connections, and how slowly they may speak."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server.connections import FREE_CHUNKS, LEAST_CHUNK_BYTES
from rekindle.server.gate.caller import grant
from rekindle.server.gate.keys import Access, Keys
from rekindle.server.gate.limits import BODIES_AT_ONCE, Limits, ShutdownGate
from rekindle.server.gate.tenants import Rates
from tests.server.conftest import Served, serving

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}).encode()
WAIT_S = 60.0  # nothing here is timed; this bounds a failure


@pytest.fixture(scope="module")
def narrow(served: Served) -> Iterator[Served]:
    with serving(served.engine, ServerSettings(max_body_bytes=4096, max_connections=8)) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(served: Served) -> Iterator[Served]:
    """What is to be given up comes at once or not at all: a second is long enough for a busy machine to send it."""
    with serving(served.engine, ServerSettings(max_connections=8, read_timeout_s=1.0)) as running:
        yield running


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S)


def said(connection: socket.socket) -> bytes:
    """All that the server says until it closes."""
    chunks = []
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def test_a_bucket_fills_evenly() -> None:
    now = 100.0
    rates = Rates(lambda _: 60, clock=lambda: now)
    assert [rates.take("left") for _ in range(60)] == [0.0] * 60
    assert rates.take("left") == pytest.approx(1.0)
    assert rates.take("right") == 0.0
    now += 0.5
    assert rates.take("left") == pytest.approx(0.5)
    now += 0.5
    assert rates.take("left") == 0.0
    now += 3600
    assert [rates.take("left") for _ in range(61)][-2:] == [0.0, pytest.approx(1.0)]


def test_more_requests_than_allowed_are_told_when_to_come_back(served: Served) -> None:
    settings = ServerSettings(api_keys={"left": "key-l", "right": "key-r"}, requests_per_minute=2)
    with serving(served.engine, settings) as running:
        assert [running.send("GET", "/v1/models", key="key-l").status for _ in range(2)] == [200, 200]
        refused = running.send("GET", "/v1/models", key="key-l")
        assert refused.status == 429
        assert refused.error["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert running.send("GET", "/v1/models", key="key-r").status == 200
        assert running.send("GET", "/health/ready", key="key-l").status == 200
        assert running.send("GET", "/v1/models", key="wrong").status == 401
        ollamas = running.send("GET", "/api/tags", key="key-l")
        assert ollamas.status == 429 and "requests a minute" in ollamas.json["error"]


def test_a_large_body_is_turned_away(narrow: Served) -> None:
    for size in (4097, 8000, 100_000):
        refused = narrow.send("POST", "/v1/chat/completions", b" " * size)
        assert refused.status == 413
        assert "4096 bytes" in refused.error["message"]
    with contextlib.closing(connect(narrow)) as connection:
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + 5 * chunk + b"0\r\n\r\n")
        assert said(connection).startswith(b"HTTP/1.1 413 ")
    fits = json.dumps({**json.loads(BODY), "user": "x" * 3000}).encode()
    assert narrow.send("POST", "/v1/chat/completions", fits).status == 200


def test_a_body_in_small_chunks_is_turned_away_before_its_end(served: Served) -> None:
    few = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY + b" " * (FREE_CHUNKS - len(BODY)))
    chunked = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with contextlib.closing(connect(served)) as connection:
        connection.sendall(chunked + few + b"1\r\n \r\n" * 20)
        answer = said(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"send it in larger chunks, or with a Content-Length" in answer
    larger = (b"40\r\n" + b" " * LEAST_CHUNK_BYTES + b"\r\n") * FREE_CHUNKS
    for body in (few, larger + few + larger):
        with contextlib.closing(connect(served)) as connection:
            connection.sendall(chunked + body + b"0\r\n\r\n")
            assert said(connection).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_does_not_come_is_given_up(hasty: Served) -> None:
    with contextlib.closing(connect(hasty)) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + BODY[:5])
        answer = said(connection)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
    assert hasty.app.gate.num_inside == 0


@pytest.mark.parametrize("start", [b"", b"G", HEAD])
def test_a_head_that_does_not_come_is_given_up(hasty: Served, start: bytes) -> None:
    with contextlib.closing(connect(hasty)) as connection:
        connection.sendall(start)
        assert said(connection) == b""
    deadline = time.monotonic() + WAIT_S
    while hasty.num_connections() and time.monotonic() < deadline:  # those of earlier tests may still have to end
        time.sleep(0.02)
    assert hasty.num_connections() == 0, "its place is free"


def test_a_slow_second_head_is_given_up_too(hasty: Served) -> None:
    with contextlib.closing(connect(hasty)) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        connection.sendall(b"GET /hea")
        assert said(connection) == b""


def test_a_head_may_come_in_pieces(served: Served) -> None:
    with contextlib.closing(connect(served)) as connection:
        for piece in (b"GET /health/live HT", b"TP/1.1\r\nHost: local", b"host\r\nConnection: close\r\n\r\n"):
            connection.sendall(piece)
            time.sleep(0.01)
        assert said(connection).startswith(b"HTTP/1.1 200 ")


def is_answered(served: Served) -> bool:
    """Whether a new connection gets an answer; one too many is refused or reset."""
    try:
        return served.send("GET", "/health/live").status == 200
    except ConnectionError:
        return False


def test_connections_that_come_and_go_leave_nothing_behind(served: Served) -> None:
    with serving(served.engine, ServerSettings(max_connections=50, read_timeout_s=5.0)) as running:
        for _ in range(20):
            opened = [connect(running) for _ in range(40)]
            for number, connection in enumerate(opened):
                with contextlib.suppress(ConnectionError):
                    connection.sendall((b"", b"GET / HT", HEAD, b"\x16\x03\x01")[number % 4])
                connection.close()
        deadline = time.monotonic() + WAIT_S
        while not is_answered(running) and time.monotonic() < deadline:  # some may still have to be accepted
            time.sleep(0.02)
        while running.num_connections() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running.num_connections() == 0
        assert running.app.gate.num_inside == 0
        assert is_answered(running)


class Bodies:
    """An application that keeps every body until it is let go, behind limits of 100 bytes a body."""

    def __init__(self, **settings: Any) -> None:
        self.sizes: list[int] = []
        self.num_held: list[int] = []  # of all, whenever a piece was asked for
        self.let_go = asyncio.Event()
        server = ServerSettings(max_body_bytes=100, **settings)
        self.limits = Limits(self, settings=server, gate=ShutdownGate(), keys=Keys(server))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.sizes.append(len((await receive())["body"]))
        await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def post(self, *chunks: bytes, namespace: str = "default") -> tuple[int, dict[bytes, bytes]] | None:
        """Status and headers of the answer to a body that comes in these chunks; None where none came."""
        left = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        left[-1]["more_body"] = False
        heads: list[Message] = []

        async def receive() -> Message:
            self.num_held.append(self.limits.budget.num_bytes)
            return left.pop(0) if left else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            heads.extend([message] if message["type"] == "http.response.start" else [])

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", b"9")]}
        grant(scope, Access(namespace))
        await self.limits(scope, receive, send)
        return (heads[0]["status"], dict(heads[0]["headers"])) if heads else None


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(0)


def test_bodies_of_all_requests_together_are_bounded_until_these_are_answered() -> None:
    async def run() -> None:
        bodies = Bodies()
        first = [asyncio.create_task(bodies.post(b"x" * 60, b"x" * 40)) for _ in range(BODIES_AT_ONCE - 1)]
        first.append(asyncio.create_task(bodies.post(b"x" * 60)))
        await until(lambda: len(bodies.sizes) == BODIES_AT_ONCE)
        assert bodies.limits.budget.num_bytes == sum(bodies.sizes)
        status, headers = await bodies.post(b"x" * 30, b"x" * 30, b"x") or (0, {})
        assert (status, headers[b"retry-after"]) == (503, b"1")
        held = sum(bodies.sizes)
        assert bodies.num_held[-3:] == [held, held + 30, held], "what was thrown away is given back at once"
        assert (await bodies.post(b"x" * 30, b"x" * 80) or (0,))[0] == 413, "too large is said before too many"
        assert bodies.limits.budget.num_bytes == held
        fits = asyncio.create_task(bodies.post(b"x" * 40))
        await until(lambda: len(bodies.sizes) == BODIES_AT_ONCE + 1)
        bodies.let_go.set()
        assert {(await task or (0,))[0] for task in (*first, fits)} == {200}
        assert bodies.limits.budget.num_bytes == 0

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_one_namespace_does_not_hold_all_the_room_where_there_are_several() -> None:
    async def run() -> None:
        bodies = Bodies(api_keys={"left": "key-of-left", "right": "key-of-right"})
        held = [asyncio.create_task(bodies.post(b"x" * 100, namespace="left")) for _ in range(BODIES_AT_ONCE // 2)]
        await until(lambda: len(bodies.sizes) == len(held))
        assert (await bodies.post(b"x", namespace="left") or (0,))[0] == 503
        held.append(asyncio.create_task(bodies.post(b"x" * 100, namespace="right")))
        await until(lambda: len(bodies.sizes) == len(held))
        bodies.let_go.set()
        assert {(await task or (0,))[0] for task in held} == {200}
        assert bodies.limits.budget.num_bytes == 0

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_a_body_is_given_back_however_its_request_ends() -> None:
    async def run() -> None:
        bodies = Bodies()
        cut = asyncio.create_task(bodies.post(b"x" * 90))
        await until(lambda: bodies.limits.budget.num_bytes == 90)
        cut.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cut
        assert bodies.limits.budget.num_bytes == 0
        left: list[Message] = [{"type": "http.request", "body": b"x" * 50, "more_body": True}]

        async def receive() -> Message:
            return left.pop() if left else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError("nobody is there to be answered")

        scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"99")]}
        grant(scope, Access())
        await bodies.limits(scope, receive, send)
        assert bodies.limits.budget.num_bytes == 0

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
