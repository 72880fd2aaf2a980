"""The process of a server: its port, signals, and a graceful shutdown. Knows neither models nor engines.

The port is opened before anything is loaded, so that a taken port fails at once and early clients wait. After SIGTERM
or SIGINT running answers get a moment to finish while new requests are refused; then control returns to the caller,
which closes what it has. A second signal cuts running answers off at once.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.errors import ConfigError
from rekindle.server import descriptors
from rekindle.server.connections import MAX_LINGERING, ConnectionConfig
from rekindle.server.descriptors import Listener
from rekindle.server.gate.keys import Keys
from rekindle.server.gate.limits import ShutdownGate

NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # for "localhost" without IPv6
BACKLOG = 2048  # connections that may wait to be accepted, as in uvicorn
CLOSE_S = 2  # for cut-off answers to end, and then for connections to close
TICK_S = 0.05


def url_of(host: str, port: int) -> str:
    """Return a URL to copy; a wildcard address is replaced by this machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_listeners(settings: ServerSettings) -> list[socket.socket]:
    """Open sockets that listen on every address of the host, on one port; ConfigError if that fails."""
    listeners: list[socket.socket] = []
    port = settings.port
    try:
        found = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in sorted(set(found)):  # IPv4 first
            try:
                listeners.append(_listener(family, (address[0], port, *address[2:])))
            except OSError as error:
                if not listeners or error.errno not in NO_SUCH_FAMILY:
                    raise
            port = listeners[0].getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {_reason(error)}") from error
    return listeners


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # otherwise a restart waits for old connections
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program has this port; choose another --port (0 takes any free one)"
    return f"{error.strerror or error}; choose another --host or --port"


class Application(Protocol):
    """An ASGI application, the gate that a shutdown closes, and its keys, which SIGHUP reads again."""

    gate: ShutdownGate
    keys: Keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""


class _Server(uvicorn.Server):
    """Reports when it has started, and stops in two steps: first the gate, then the connections."""

    def __init__(
        self, config: uvicorn.Config, app: Application, settings: ServerSettings, *, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._app = app
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if self._settings.key_file is not None and sys.platform != "win32":
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._app.keys.reload)
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        gate = self._app.gate
        gate.close()
        await self._empty(self._settings.stop_s, until=lambda: self.force_exit)
        gate.cut()
        await self._empty(CLOSE_S)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the application would not be closed
            await self.lifespan.shutdown()

    async def _empty(self, most_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for requests in progress to end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + most_s
        while self._app.gate.num_inside and loop.time() < end and not until():
            await asyncio.sleep(TICK_S)


@contextmanager
def _signals_end_quietly() -> Iterator[list[int]]:
    """Collect the signals that stopped uvicorn: it raises them again at its end, the last one first."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    seen: list[int] = []
    before = {kind: signal.signal(kind, lambda number, _: seen.append(number)) for kind in kinds}
    try:
        yield seen
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def run_application(
    make: Callable[[ServerSettings], AbstractContextManager[Application]],
    settings: ServerSettings,
    say: Callable[[str], None],
    *,
    listeners: list[socket.socket],
    store_files: int = 0,
) -> int | None:
    """Serve an application until a signal, and return it; None if something else stopped the server.

    `make` is called with the settings, in which connections are limited by the open files that are allowed; signals
    are collected until what it makes is closed. `say` gets the URL once requests are answered; `store_files` are kept
    free for a store. Closes `listeners`.
    """
    most = descriptors.places(settings.max_connections, lingering=MAX_LINGERING, store_files=store_files)
    settings = replace(settings, max_connections=most)
    url = url_of(settings.host, listeners[0].getsockname()[1])
    with ExitStack() as signals, make(settings) as app:
        seen = signals.enter_context(_signals_end_quietly())  # until the application is closed
        config = ConnectionConfig(app, settings, server_header=False, timeout_graceful_shutdown=CLOSE_S)
        running = _Server(config, app, settings, on_started=lambda: say(url))
        running.run(sockets=[Listener(each, make_room=config.places.reclaim_one) for each in listeners])
    return seen[-1] if seen else None
