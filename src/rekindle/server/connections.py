"""Connections: how many there may be, and how long one may take to say what it wants.

Owns the bounds below HTTP. A client that connects and says nothing, or a byte a minute, is cut off after
`read_timeout_s`, and so is one that does not read its last answer; one that comes when all places are taken by
requests is refused at once, otherwise a connection that waits gives way (`places`). Bodies are timed in `limits`. What
is not HTTP is a 400 with a line in the log, as a request would have, and so is a body whose chunks cannot be read.

A client may end its own side of the connection once its request is whole, and is answered. One that has left altogether
looks the same, for both send a FIN; what is sent to it comes back as an error. So the first bytes of the answer, which
are the same for all, go out one by one while it is computed: the second after the client has left ends the request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rekindle.config import ServerSettings
from rekindle.server.errors import Problem
from rekindle.server.gate.limits import break_body
from rekindle.server.lines import new_id
from rekindle.server.observers.log import write_unread
from rekindle.server.places import Places

LINGER_S = 1.0  # a connection that was turned away stays open so long, or the answer would be lost
MAX_LINGERING = 64  # that linger so at a time
BEGINNING = b"HTTP/1.1 "  # of every answer
FIRST_PROBE_S = 0.05  # then twice as long each time: the last after 13 s
NO_HEADERS: Mapping[str, str] = {}
UNREADABLE = Problem(400, "invalid_request_error", "Invalid HTTP request received.")  # in uvicorn's words
WEB_SOCKETS = ("Unsupported upgrade request", "No supported WebSocket library")  # there are none here
FULL = Problem(503, "server_error", "too many connections: try again", code="overloaded", retry_after_s=1)
FULL_FOR_ADDRESS = replace(FULL, message="too many connections from this address: try again")


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, with the settings that bound connections.

    One address may have half of them, unless the settings say how many; this machine, where a proxy may be, all.
    """

    def __init__(self, app: Any, settings: ServerSettings, **options: Any) -> None:
        fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_config": None, "access_log": False}
        # Whoever sends `Forwarded` headers could be anybody: the log names the peer of the connection.
        super().__init__(app, http=BoundedProtocol, proxy_headers=False, **fixed, **options)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self.settings = settings
        most, of_address = settings.max_connections, settings.max_connections_per_address
        self.places = Places(most, of_address=of_address or -(-most // 2), of_this_machine=of_address)
        self.num_refused = 0  # connections that were turned away and linger


def _is_news(record: logging.LogRecord) -> bool:
    """Whether uvicorn says what no line of ours says."""
    said = record.getMessage()
    return said != UNREADABLE.message and not said.startswith(WEB_SOCKETS)


class Framing(h11.Connection):
    """What bytes mean. `num_begun` bytes of the next answer's head have been written already."""

    num_begun = 0

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of an event, but for those that are out."""
        pieces = super().send_with_data_passthrough(event)
        if pieces and self.num_begun:
            whole = b"".join(pieces)
            assert whole.startswith(BEGINNING), whole[:40]
            pieces, self.num_begun = [whole[self.num_begun :]], 0
        return pieces

    @property
    def chunk_bytes(self) -> int:
        """Bytes that the chunk of a body has still to bring, as it announced; h11 gives them out no other way."""
        announced: int = getattr(self._reader, "_bytes_in_chunk", 0)
        return announced


class BoundedProtocol(H11Protocol):
    """One connection."""

    config: ConnectionConfig
    conn: Framing
    _is_broken = False  # nothing that comes is read any more
    _has_ended = False  # the client's own side
    _probe_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _is_refused = False
    _has_begun = False  # a first request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, or be turned away."""
        assert isinstance(transport, asyncio.Transport), transport
        super().connection_made(transport)
        self.conn = Framing(h11.SERVER)
        verdict = self.config.places.enter(self, self.client[0] if self.client else "")
        if verdict == "taken":
            self._wait_for_head()
        else:
            self._refuse(FULL if verdict == "full" else FULL_FOR_ADDRESS)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; what begins a request must go on to the end of its head."""
        if self._is_refused or self._is_broken:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._has_begun = True
            self._stop_waiting()
        elif self._head_timer is None and cycle.response_complete:
            self._wait_for_head()
        self._keep_place()
        most = 2 * self.config.settings.max_body_bytes  # what is read of a body that is too large
        if self._has_begun and self.conn.chunk_bytes > most:
            self._break_body(f"a chunk of {self.conn.chunk_bytes} bytes is more than any body may have")

    def eof_received(self) -> Any:
        """Go on where the answer to a whole request is still to be given: True keeps the connection open."""
        if self._is_refused or not self._is_answering():
            return False
        self._has_ended = True
        self._probe(FIRST_PROBE_S)
        return True

    def on_response_complete(self) -> None:
        """Wait for the next request, or begin it where it has come already."""
        super().on_response_complete()
        self._keep_place()
        if self._has_ended and not self._is_answering():
            self.transport.close()
        elif self._has_ended:
            self._probe(FIRST_PROBE_S)

    def _is_answering(self) -> bool:
        """Whether a request is whole and its answer is not."""
        return self._has_begun and not self.cycle.more_body and not self.cycle.response_complete

    def _probe(self, wait_s: float) -> None:
        """Write one more byte of an answer that has not begun, and another one later."""
        self._stop_probing()
        if self.transport.is_closing() or self.cycle.response_started or self.conn.num_begun == len(BEGINNING):
            return
        self.transport.write(BEGINNING[self.conn.num_begun : self.conn.num_begun + 1])
        self.conn.num_begun += 1
        self._probe_timer = self.loop.call_later(wait_s, self._probe, 2 * wait_s)

    def _stop_probing(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None

    def _break_body(self, why: str) -> None:
        """Have the request that is being read answered now; the connection ends with that."""
        self._is_broken = True
        cycle = self.cycle
        break_body(cycle.scope["state"], why)
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()
        self._keep_place()

    def timeout_keep_alive_handler(self) -> None:
        """Close; a client that does not read what it was answered has `read_timeout_s` more for it."""
        super().timeout_keep_alive_handler()
        self._stop_waiting()
        self._head_timer = self.loop.call_later(self.config.settings.read_timeout_s, self.transport.abort)

    def yield_place(self) -> None:
        """Close at once, without what a client that is slow to read has not read of its last answer."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave nothing behind."""
        self._stop_waiting()
        self._stop_probing()
        self.config.places.leave(self)
        if self._is_refused:
            self.config.num_refused -= 1
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    def _keep_place(self) -> None:
        """Work from the end of a request's body to the end of its answer."""
        if self._is_answering():
            self.config.places.work(self)
        else:
            self.config.places.wait(self)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, unless an answer is under way or out; the connection is closed."""
        if _is_sending_body(self.cycle):
            self._break_body("the body is not chunked as it should be")
            return
        if self.conn.our_state is h11.IDLE:
            own_id = new_id()
            write_unread(UNREADABLE, self.client[0] if self.client else None, own_id)
            self.transport.write(_spelled(UNREADABLE, {"X-Request-ID": own_id}))
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.settings.read_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self.timeout_keep_alive_handler()

    def _refuse(self, problem: Problem) -> None:
        self.connections.discard(self)
        self._is_refused = True
        self.config.num_refused += 1
        if self.config.num_refused > MAX_LINGERING:
            self.transport.abort()
            return
        self.transport.write(_spelled(problem))
        try:
            self.transport.write_eof()
        except OSError:  # it has left already
            self.transport.abort()
            return
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)


def _is_sending_body(cycle: RequestResponseCycle | None) -> bool:
    """Whether a request's body is still to come and nothing of its answer has gone out."""
    return cycle is not None and cycle.more_body and not cycle.response_started


def _spelled(problem: Problem, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
    """The last answer of a connection, to no request."""
    body = json.dumps(problem.body()).encode()
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in {**problem.headers(), **headers}.items()]
    return "\r\n".join([*lines, "Connection: close", f"Content-Length: {len(body)}", "", ""]).encode() + body
