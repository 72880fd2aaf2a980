"""The process of a server: its signals, and a graceful shutdown. Knows neither models nor engines.

The port is opened before anything is loaded, so that a taken port fails at once and early clients wait. After SIGTERM
or SIGINT running answers get a moment to finish while new requests are refused; then control returns to the caller,
which closes what it has. A second signal cuts running answers off at once.

Where the sockets outlast this process (`handover`), nothing is refused: it accepts no more, and every connection is
closed by an answer that says so, or once nothing has come for a moment.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server import descriptors
from rekindle.server.connections import MAX_LINGERING, ConnectionConfig
from rekindle.server.descriptors import Listener
from rekindle.server.gate.keys import Keys
from rekindle.server.gate.limits import ShutdownGate
from rekindle.server.handover import Handover, notify
from rekindle.server.listening import url_of

CLOSE_S = 2  # for cut-off answers to end, and then for connections to close
TICK_S = 0.05


class Application(Protocol):
    """An ASGI application, the gate that a shutdown closes, and its keys, which SIGHUP reads again."""

    gate: ShutdownGate
    keys: Keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or run the lifespan."""


class _Server(uvicorn.Server):
    """Reports when it has started, and stops in two steps: first the gate, then the connections."""

    def __init__(
        self, config: ConnectionConfig, app: Application, handover: Handover, slot: str, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._connections = config
        self._on_started = on_started
        self._app = app
        self._handover = handover
        self._slot = slot
        self._settings = config.settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            if sys.platform != "win32":
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGUSR2, self._start_next)
                if self._settings.key_file is not None:
                    loop.add_signal_handler(signal.SIGHUP, self._app.keys.reload)
            notify("READY=1")
            self._on_started()

    def _start_next(self) -> None:
        listeners = [socket.fileno() for server in self.servers for socket in server.sockets]
        if not self.should_exit:
            self._handover.start_next(listeners, self._slot, loaded=self._follow)

    def _follow(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._handover.abandon()
        if self._handover.is_lasting:
            await self._drain()
        gate = self._app.gate
        gate.close()
        await self._empty(self._settings.stop_s, until=lambda: self.force_exit)
        gate.cut()
        await self._empty(CLOSE_S)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the application would not be closed
            await self.lifespan.shutdown()

    async def _drain(self) -> None:
        """Accept no more, and wait for every connection to end."""
        for server in self.servers:
            server.close()
        self._app.gate.drain()
        self._connections.drain(list(self.server_state.connections))
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.drain_s
        while self.server_state.connections and loop.time() < end and not self.force_exit:
            await asyncio.sleep(TICK_S)

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
    handover: Handover,
    slot: str = "off",
    store_files: int = 0,
) -> int | None:
    """Serve an application until a signal, and return it; None if something else stopped the server, or the next
    process follows.

    `make` is called with the settings, in which connections are limited by the open files that are allowed; signals
    are collected until what it makes is closed. `say` gets the URL once requests are answered; `store_files` are kept
    free for a store, whose `slot` the next process continues. Closes the listeners of `handover`.
    """
    most = descriptors.places(settings.max_connections, lingering=MAX_LINGERING, store_files=store_files)
    settings = replace(settings, max_connections=most)
    listeners = handover.listeners
    host, port = listeners[0].getsockname()[:2]
    url = url_of(host if handover.is_lasting else settings.host, port)
    with ExitStack() as signals, make(settings) as app:
        seen = signals.enter_context(_signals_end_quietly())  # until the application is closed
        config = ConnectionConfig(app, settings, server_header=False, timeout_graceful_shutdown=CLOSE_S)
        running = _Server(config, app, handover, slot, lambda: say(url))
        running.run(sockets=[Listener(each, make_room=config.places.reclaim_one) for each in listeners])
    return seen[-1] if seen else None
