"""Connections on a real socket: who gets a place, who gives it up, and who is turned away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rekindle.config import ServerSettings
from rekindle.server.connections import (
    FREE_CHUNKS,
    LEAST_CHUNK_BYTES,
    READ_BYTES,
    BoundedProtocol,
    ConnectionConfig,
)

WAIT_S = 60.0  # nothing here is timed; this bounds a failure
GET = b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
CHUNKED = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LARGE = 16 << 20  # more than the kernel holds of a connection


class Running:
    """A server over an application that answers at once, when it is let go, or with much."""

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        names, methods = ("now", "later", "much"), ["GET", "POST"]
        routes = [Route(f"/{name}", getattr(self, f"_{name}"), methods=methods) for name in names]
        self.server = uvicorn.Server(ConnectionConfig(Starlette(routes=routes), settings, port=0, **options))
        self.let_go = threading.Event()
        self.num_inside = 0

    async def _now(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("now")

    async def _later(self, request: Request) -> PlainTextResponse:
        self.num_inside += 1
        while not self.let_go.is_set():
            await asyncio.sleep(0.01)
        return PlainTextResponse("later")

    async def _much(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse("x" * LARGE)

    def connect(self, said: bytes = b"") -> socket.socket:
        """A connection that has said this much."""
        port = self.server.servers[0].sockets[0].getsockname()[1]
        connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        connection.sendall(said)
        return connection

    def answer(self, path: bytes) -> bytes:
        """All that is said to one request of a connection of its own."""
        with closing(self.connect(GET % path)) as connection:
            return heard(connection)


@contextmanager
def running(settings: ServerSettings, kind: Callable[..., Running] | None = None, **options: Any) -> Iterator[Running]:
    found = (kind or Running)(settings, **options)
    thread = threading.Thread(target=found.server.run)
    thread.start()
    try:
        until(lambda: found.server.started)
        yield found
    finally:
        found.let_go.set()
        found.server.should_exit = True
        thread.join()


def heard(connection: socket.socket) -> bytes:
    """All that the server says until it closes."""
    chunks = []
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_connections_without_a_whole_request_give_way_to_new_ones() -> None:
    with running(ServerSettings(max_connections=8, read_timeout_s=600)) as server, contextlib.ExitStack() as stack:
        busy = stack.enter_context(closing(server.connect(GET % b"later")))
        until(lambda: server.num_inside == 1)
        begun = (b"", b"G", b"POST /later HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        idle: list[socket.socket] = []
        for _ in range(40):
            idle.append(stack.enter_context(closing(server.connect(begun[len(idle) % 3]))))
            until(lambda: server.num_inside == 1 + len(idle) // 3)  # what it said has been read
        assert server.answer(b"now").endswith(b"now")
        assert all(b"503" not in heard(each) for each in idle[:33]), "the oldest were closed without a word"
        assert server.answer(b"now").endswith(b"now")
        server.let_go.set()
        assert heard(busy).endswith(b"later"), "a request that is being answered keeps its place"


def test_when_requests_have_all_places_the_next_is_refused_at_once() -> None:
    with running(ServerSettings(max_connections=4)) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(closing(server.connect(GET % b"later"))) for _ in range(4)]
        until(lambda: server.num_inside == 4)
        refused = server.answer(b"now")
        assert (
            refused.startswith(b"HTTP/1.1 503 ") and b"too many connections:" in refused and b"Retry-After" in refused
        )
        server.let_go.set()
        assert all(heard(each).endswith(b"later") for each in busy)
        until(lambda: server.answer(b"now").endswith(b"now"))


def test_an_address_that_has_its_part_is_refused_while_places_are_free() -> None:
    with (
        running(ServerSettings(max_connections=9, max_connections_per_address=2)) as server,
        closing(server.connect(GET % b"later")) as one,
        closing(server.connect(GET % b"later")) as two,
    ):
        until(lambda: server.num_inside == 2)
        refused = server.answer(b"now")
        assert refused.startswith(b"HTTP/1.1 503 ") and b"too many connections from this address" in refused
        server.let_go.set()
        assert heard(one).endswith(b"later") and heard(two).endswith(b"later")


def test_an_answer_that_nobody_reads_does_not_keep_its_connection() -> None:
    with (
        running(ServerSettings(read_timeout_s=1.0), timeout_keep_alive=0) as server,
        closing(server.connect(GET.replace(b"close", b"keep-alive") % b"much")) as connection,
    ):
        until(lambda: server.server.server_state.total_requests == 1)
        until(lambda: not server.server.server_state.connections)
        assert len(heard(connection)) < LARGE


def test_a_body_is_read_in_small_parts_between_which_others_have_their_turn() -> None:
    class Noting(BoundedProtocol):
        """Notes how much is received at once."""

        sizes: ClassVar[list[int]] = []

        def data_received(self, data: bytes) -> None:
            self.sizes.append(len(data))
            super().data_received(data)

    class NotingServer(Running):
        """One that serves with it."""

        def __init__(self, settings: ServerSettings) -> None:
            super().__init__(settings)
            self.server.config.http = Noting

    chunks = (b"%x\r\n" % LEAST_CHUNK_BYTES + b"x" * LEAST_CHUNK_BYTES + b"\r\n") * (LARGE >> 12)
    with (
        running(ServerSettings(), NotingServer) as server,
        closing(server.connect(CHUNKED % b"now")) as connection,
    ):
        connection.sendall(chunks + b"0\r\n\r\n")
        until(lambda: sum(Noting.sizes) > len(chunks))
    assert max(Noting.sizes) <= READ_BYTES


def test_a_body_in_small_chunks_is_read_no_further_even_if_it_is_answered() -> None:
    with (
        running(ServerSettings(read_timeout_s=600), timeout_keep_alive=600) as server,
        closing(server.connect(CHUNKED % b"now")) as connection,
    ):
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"1\r\nx\r\n" * (FREE_CHUNKS + 20))
        heard(connection)


def test_the_next_body_of_a_connection_may_have_as_many_small_chunks() -> None:
    body = b"1\r\nx\r\n" * FREE_CHUNKS + (b"40\r\n" + b"x" * 64 + b"\r\n") * 200 + b"0\r\n\r\n"
    with running(ServerSettings()) as server, closing(server.connect()) as connection:
        for _ in range(3):
            connection.sendall((CHUNKED % b"now") + body)
            answer = b""
            while not answer.endswith(b"now"):
                answer += connection.recv(65536) or b"closed, not now"
            assert answer.startswith(b"HTTP/1.1 200 ")
