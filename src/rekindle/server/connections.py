"""Connection limits: how many may be open, and how long a client may take to send its request.

Owns the limits below HTTP. A client that sends nothing, or a byte a minute, is disconnected after `read_timeout_s`, and
so is one that does not read its last answer. If requests in progress hold all places, a new connection is refused at
once; otherwise an idle one is closed for it (`places`). Bodies are timed in `limits`. Input that is not HTTP gets a 400
and a line in the log, as a request would, and so does a body with invalid chunks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from rekindle.config import ServerSettings
from rekindle.server.border import Problem
from rekindle.server.gate.limits import break_body
from rekindle.server.lines import new_id
from rekindle.server.observers.log import write_unread

LINGER_S = 1.0  # how long a refused connection stays open, so that its answer is not lost
MAX_LINGERING = 64  # refused connections open at a time
DRAIN_IDLE_S = 2  # how long a connection without a request stays open while the process is drained
# Bytes read of a connection before others have their turn: of chunks of one byte each it takes 10 ms.
READ_BYTES = 8 << 10
# Chunks that a body may have, and bytes for which it may have one more: each costs the event loop 7 us.
FREE_CHUNKS = 1000
LEAST_CHUNK_BYTES = 64
SMALL_CHUNKS = (
    f"the body has more than {FREE_CHUNKS:,} chunks, and one more for every {LEAST_CHUNK_BYTES} bytes: send it in "
    "larger chunks, or with a Content-Length"
)
CLOSE = (b"connection", b"close")
NO_HEADERS: Mapping[str, str] = {}
UNREADABLE = Problem(400, "invalid_request_error", "Invalid HTTP request received.")  # in uvicorn's words
WEB_SOCKETS = ("Unsupported upgrade request", "No supported WebSocket library")  # not supported here
FULL = Problem(503, "server_error", "too many connections: try again", code="overloaded", retry_after_s=1)
FULL_FOR_ADDRESS = replace(FULL, message="too many connections from this address: try again")
SITE_BITS = 64  # prefix of an IPv6 address: one customer gets at least this network


# Places for connections: which connections hold one, and which must yield it to another.
#
# A connection *waits* until its request has arrived completely, and again once it is answered. If all places, or all of
# one address, are taken, a new connection gets the place of a waiting one: one of its own address if that holds more
# than an equal share, else the one that has waited longest. So clients that connect and send nothing block nobody, and
# a proxy, whose clients share one address, loses idle connections at most. Connections with a request in progress never
# yield. Knows nothing of sockets.


class Holder(Protocol):
    """A connection that may hold a place."""

    def yield_place(self) -> None:
        """Close at once; the place is already taken away."""


@dataclass(slots=True)
class _Address:
    """The connections of one address; the waiting ones in the order in which they began to wait."""

    num_open: int = 0
    waiting: dict[Holder, None] = field(default_factory=dict)


class Places:
    """Up to `most` places, for one event loop.

    One address may hold `of_address`, a loopback one `of_this_machine`; None: any number.
    """

    def __init__(self, most: int, *, of_address: int | None, of_this_machine: int | None) -> None:
        self._most = most
        self._of_address = of_address
        self._of_this_machine = of_this_machine
        self._addresses: dict[str, _Address] = {}
        self._at: dict[Holder, str] = {}
        self._waiting: dict[Holder, None] = {}

    def enter(self, holder: Holder, host: str) -> Literal["taken", "full", "full for the address"]:
        """Give `holder`, which waits, a place, if need be another waiting one's; else return which limit is full."""
        key = network_of(host)
        address = self._addresses.get(key, _Address())
        most = self._of_this_machine if is_this_machine(key) else self._of_address
        if most is not None and address.num_open >= most and not self._make_room(address.waiting):
            return "full for the address"
        is_large = address.num_open * (len(self._addresses) + (key not in self._addresses)) > self._most
        if len(self._at) >= self._most and not ((is_large and self._make_room(address.waiting)) or self.reclaim_one()):
            return "full"
        address = self._addresses.setdefault(key, address)
        address.num_open += 1
        self._at[holder] = key
        self.wait(holder)
        return "taken"

    def reclaim_one(self) -> bool:
        """Take the place of the connection that has waited longest; return whether there was one."""
        return self._make_room(self._waiting)

    def _make_room(self, waiting: dict[Holder, None]) -> bool:
        for holder in waiting:
            self.leave(holder)
            holder.yield_place()
            return True
        return False

    def wait(self, holder: Holder) -> None:
        """Mark `holder` as waiting, with no request in progress; no change if it was. Safe without a place."""
        if holder in self._at:
            self._waiting.setdefault(holder)
            self._addresses[self._at[holder]].waiting.setdefault(holder)

    def work(self, holder: Holder) -> None:
        """Mark `holder` as having a request in progress. Safe without a place."""
        if holder in self._at:
            self._waiting.pop(holder, None)
            self._addresses[self._at[holder]].waiting.pop(holder, None)

    def leave(self, holder: Holder) -> None:
        """Release the place of `holder`; safe without one."""
        self.work(holder)
        key = self._at.pop(holder, None)
        if key is not None:
            address = self._addresses[key]
            address.num_open -= 1
            if not address.num_open:
                del self._addresses[key]

    def check(self) -> None:
        """Assert that the addresses add up to the places that are taken."""
        assert len(self._at) <= self._most, len(self._at)
        assert sum(each.num_open for each in self._addresses.values()) == len(self._at)
        waiting = [holder for each in self._addresses.values() for holder in each.waiting]
        assert set(waiting) == set(self._waiting) and len(waiting) == len(self._waiting)
        assert set(waiting) <= set(self._at)


def network_of(host: str) -> str:
    """Return the network that counts as one address: an IPv4 address, or the first 64 bits of an IPv6 one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and not address.is_loopback:
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> SITE_BITS << SITE_BITS, SITE_BITS)))
    return str(address)


def is_this_machine(network: str) -> bool:
    """Whether it is a loopback address."""
    try:
        return ipaddress.ip_address(network).is_loopback
    except ValueError:
        return False


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, with the limits on connections.

    One address may hold half of them, unless the settings say how many; this machine, where a proxy may run, all.
    """

    def __init__(self, app: Any, settings: ServerSettings, **options: Any) -> None:
        fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_config": None, "access_log": False}
        fixed["loop"] = "asyncio"  # uvloop, which other packages install, has transports of another kind
        # Any client can send `Forwarded` headers: the log names the connection's peer.
        super().__init__(app, http=BoundedProtocol, proxy_headers=False, **fixed, **options)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        self.settings = settings
        most, of_address = settings.max_connections, settings.max_connections_per_address
        self.places = Places(most, of_address=of_address or -(-most // 2), of_this_machine=of_address)
        self.num_refused = 0  # refused connections still open
        self.is_draining = False

    def drain(self, connections: Iterable[Any]) -> None:
        """Close these connections, and those that were just accepted, by their next answer, or once they are idle."""
        self.is_draining = True
        for connection in connections:
            assert isinstance(connection, BoundedProtocol), connection
            connection.drain()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record of uvicorn's is not covered by a log line of ours."""
    message = record.getMessage()
    return message != UNREADABLE.message and not message.startswith(WEB_SOCKETS)


class Framing(h11.Connection):
    """h11's parser and serializer, which counts the chunks and bytes of the body that is being read."""

    _num_chunks = _num_bytes = 0

    def next_event(self) -> Any:
        """Return what h11 returns."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
        return event

    def has_small_chunks(self) -> bool:
        """Whether the body that is being read comes in many chunks of few bytes."""
        is_reading = self.their_state is h11.SEND_BODY
        return is_reading and self._num_chunks > FREE_CHUNKS + self._num_bytes // LEAST_CHUNK_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Bytes still expected of the current body chunk, as announced; h11 has no public access to this."""
        announced: int = getattr(self._reader, "_bytes_in_chunk", 0)
        return announced


class BoundedProtocol(H11Protocol):
    """One connection."""

    config: ConnectionConfig
    conn: Framing
    _is_broken = False  # further input is ignored
    _head_timer: asyncio.TimerHandle | None = None
    _is_refused = False
    _has_begun = False  # a first request has begun

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, or refuse the connection."""
        assert isinstance(transport, asyncio.Transport), transport
        super().connection_made(transport)
        vars(transport)["max_size"] = READ_BYTES  # of asyncio's transports of sockets; there is no other access to it
        self.conn = Framing(h11.SERVER)
        verdict = self.config.places.enter(self, self.client[0] if self.client else "")
        if verdict == "taken":
            self._wait_for_head()
            if self.config.is_draining:
                self.drain()
        else:
            self._refuse(FULL if verdict == "full" else FULL_FOR_ADDRESS)

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; stop the head timeout when a request begins."""
        if self._is_refused or self._is_broken:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._has_begun = True
            self._stop_waiting()
            if self.config.is_draining:
                self.drain()
        elif self._head_timer is None and cycle.response_complete:
            self._wait_for_head()
        self._keep_place()
        most = 2 * self.config.settings.max_body_bytes  # how much of a body that is too large is read
        if self._has_begun and self.conn.chunk_bytes > most:
            self._break_body(f"a chunk of {self.conn.chunk_bytes} bytes is more than any body may have")
        elif self.conn.has_small_chunks():
            self._refuse_chunks()

    def on_response_complete(self) -> None:
        """Wait for the next request, or start it if it is already here."""
        super().on_response_complete()
        self._keep_place()

    def drain(self) -> None:
        """Close by the next answer that begins, which says so, or once nothing has come for a moment.

        An answer that has begun promised an open connection, and its client may send at once: so it stays open then.
        """
        self.timeout_keep_alive = DRAIN_IDLE_S
        if not self._has_begun:
            self._stop_waiting()
            self._head_timer = self.loop.call_later(DRAIN_IDLE_S, self._too_slow)
        elif self.cycle.response_complete:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(DRAIN_IDLE_S, self.timeout_keep_alive_handler)
        elif not self.cycle.response_started:
            headers = self.cycle.scope["headers"]
            # As if the client had asked for it: uvicorn answers in kind.
            self.cycle.scope["headers"] = [*headers, CLOSE]

    def _is_answering(self) -> bool:
        """Whether a request is complete and its answer is not."""
        return self._has_begun and not self.cycle.more_body and not self.cycle.response_complete

    def _refuse_chunks(self) -> None:
        """Read no more of a body that comes in small chunks, and close the connection by the end of the answer."""
        if _is_sending_body(self.cycle):
            self._break_body(SMALL_CHUNKS)
        elif self.cycle.response_complete:
            self.transport.close()
        self._is_broken = True

    def _break_body(self, why: str) -> None:
        """Answer the request that is being read now, then close the connection."""
        self._is_broken = True
        cycle = self.cycle
        break_body(cycle.scope["state"], why)
        cycle.keep_alive = cycle.more_body = False
        cycle.message_event.set()
        self._keep_place()

    def timeout_keep_alive_handler(self) -> None:
        """Close; a client that has not read its answer gets `read_timeout_s` more to do so."""
        super().timeout_keep_alive_handler()
        self._stop_waiting()
        self._head_timer = self.loop.call_later(self.config.settings.read_timeout_s, self.transport.abort)

    def yield_place(self) -> None:
        """Close at once; the unread rest of the last answer is lost."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the place and cancel all timers."""
        self._stop_waiting()
        self.config.places.leave(self)
        if self._is_refused:
            self.config.num_refused -= 1
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()

    def _keep_place(self) -> None:
        """Mark the place as working while a complete request is unanswered, else as waiting."""
        if self._is_answering():
            self.config.places.work(self)
        else:
            self.config.places.wait(self)

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not HTTP, unless an answer has begun; then close the connection."""
        if _is_sending_body(self.cycle):
            self._break_body("the body is not chunked as it should be")
            return
        if self.conn.our_state is h11.IDLE:
            own_id = new_id()
            write_unread(UNREADABLE, self.client[0] if self.client else None, own_id)
            self.transport.write(_encoded(UNREADABLE, {"X-Request-ID": own_id}))
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
        self.transport.write(_encoded(problem))
        try:
            self.transport.write_eof()
        except OSError:  # already disconnected
            self.transport.abort()
            return
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)


def _is_sending_body(cycle: RequestResponseCycle | None) -> bool:
    """Whether a request's body is incomplete and its answer has not begun."""
    return cycle is not None and cycle.more_body and not cycle.response_started


def _encoded(problem: Problem, headers: Mapping[str, str] = NO_HEADERS) -> bytes:
    """Encode the last answer of a connection, which belongs to no request."""
    body = json.dumps(problem.body()).encode()
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in {**problem.headers(), **headers}.items()]
    return "\r\n".join([*lines, "Connection: close", f"Content-Length: {len(body)}", "", ""]).encode() + body
