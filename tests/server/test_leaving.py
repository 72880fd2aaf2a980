"""Clients that leave, wholly or by closing their own side of a connection, and bodies whose framing is broken."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving
from tests.server.logged import fields, listening

WAIT_S = 60.0  # nothing here is timed; this bounds a failure
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
}
LONG = {**CHAT, "max_tokens": 3000}


def asked(body: object, version: str = "1.1", own_id: str = "half") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nX-Request-ID: {own_id}\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def heard(connection: socket.socket) -> bytes:
    """All that the server says until it closes."""
    chunks = []
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            chunks.append(chunk)
    return b"".join(chunks)


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S)


def half_closed(served: Served, sent: bytes) -> bytes:
    """What comes back where the client says no more than this, as `nc -N` does."""
    with closing(connect(served)) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        return heard(connection)


def parsed(raw: bytes) -> tuple[int, bytes]:
    """Status and body of one answer, read as any client reads it."""

    class Received:
        def makefile(self, *_: object) -> io.BytesIO:
            return io.BytesIO(raw)

    response = http.client.HTTPResponse(Received())  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_half_a_request_is_no_request(served: Served) -> None:
    assert half_closed(served, b"GET /health/live HTT") == b""
    assert half_closed(served, asked(CHAT)[:-10]) == b""
    assert half_closed(served, b"") == b""
    until(lambda: served.app.gate.num_inside == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["closed", "half-closed"])
def test_a_client_that_left_ends_its_request(served: Served, stream: bool, how: str) -> None:
    with listening() as log, closing(connect(served)) as connection:
        connection.sendall(asked({**LONG, "stream": stream}, own_id="left"))
        until(lambda: served.engine.stats().num_running == 1)
        if how == "closed":
            connection.close()
        else:
            connection.shutdown(socket.SHUT_WR)
        (record,) = log.until(served, "left")
    assert fields(record)["status"] == (200 if stream and fields(record)["status"] == 200 else 499)
    assert fields(record)["finish_reason"] == "cancelled"
    served.until_idle()


@pytest.fixture(scope="module")
def narrow(served: Served) -> Iterator[Served]:
    with serving(served.engine, ServerSettings(max_body_bytes=4096, read_timeout_s=3600)) as running:
        yield running


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: half\r\nConnection: close\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    "sent",
    [
        b"ffffffffffffffff\r\n{",
        b"7fffffff\r\n",
        b"FFFFFFFFFFFFFFFFFFFF\r\n",
        b'5\r\n{"a":\r\nfffffff\r\n',
        b"fffffffffffffffffffffffff\r\n",
        b"-1\r\n",
        b"zz\r\n{}\r\n",
        b"2\r\n{}}}\r\n0\r\n\r\n",
    ],
)
def test_chunks_that_cannot_be_are_refused_at_once(narrow: Served, sent: bytes) -> None:
    """No answer waits for the rest of such a body: `read_timeout_s` is an hour here."""
    with listening() as log, closing(connect(narrow)) as connection:
        connection.sendall(CHUNKED + sent)
        status, body = parsed(heard(connection))
        (record,) = log.until(narrow, "half")
    assert status == 400 and "chunk" in json.loads(body)["error"]["message"]
    assert (fields(record)["status"], fields(record)["path"]) == (400, "/v1/chat/completions")
    assert narrow.app.gate.num_inside == 0


def test_chunks_as_they_should_be_are_read(narrow: Served) -> None:
    raw = json.dumps({**CHAT, "max_tokens": 2}).encode()
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (raw[:7], raw[7:]))
    with closing(connect(narrow)) as connection:
        connection.sendall(CHUNKED + pieces + b"0\r\n\r\n")
        assert parsed(heard(connection))[0] == 200
    with closing(connect(narrow)) as connection:
        connection.sendall(CHUNKED + b"1800\r\n" + b" " * 0x1800 + b"\r\n0\r\n\r\n")
        assert parsed(heard(connection))[0] == 413, "too large, but not absurd"
