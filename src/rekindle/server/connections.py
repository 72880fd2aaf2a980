"""Connections: how many there may be, and how long one may take to say what it wants.

Owns the two bounds that stand below HTTP. Who connects and says nothing, or a byte a minute, is cut off after
`read_timeout_s`; who comes when all places are taken is told so at once. Bodies are timed in `limits`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.config import ServerSettings
from rekindle.server.errors import Problem

LINGER_S = 1.0  # a connection that was turned away stays open so long, or the answer would be lost
FULL = Problem(503, "server_error", "too many connections: try again", code="overloaded", retry_after_s=1)


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration, with the settings that bound connections."""

    def __init__(self, app: Any, settings: ServerSettings, **options: Any) -> None:
        fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_config": None, "access_log": False}
        super().__init__(app, http=BoundedProtocol, **fixed, **options)
        self.settings = settings
        self.num_refused = 0  # connections that were turned away and linger


class BoundedProtocol(H11Protocol):
    """One connection."""

    config: ConnectionConfig
    _head_timer: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place, or be turned away."""
        assert isinstance(transport, asyncio.Transport), transport
        super().connection_made(transport)
        if len(self.connections) > self.config.settings.max_connections:
            self._refuse()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; what begins a request must go on to the end of its head."""
        if self._is_refused:
            return
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._stop_waiting()
        elif self._head_timer is None and cycle.response_complete:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave nothing behind."""
        self._stop_waiting()
        if self._is_refused:
            self.config.num_refused -= 1
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.config.settings.read_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        self.timeout_keep_alive_handler()

    def _refuse(self) -> None:
        self.connections.discard(self)
        self._is_refused = True
        self.config.num_refused += 1
        if self.config.num_refused > self.config.settings.max_connections:
            self.transport.abort()
            return
        body = json.dumps(FULL.body()).encode()
        lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in FULL.headers().items()]
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()
        self.transport.write(head + body)
        try:
            self.transport.write_eof()
        except OSError:  # it has left already
            self.transport.abort()
            return
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)
