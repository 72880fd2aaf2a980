"""A server in this process for a session: real HTTP over a real engine, with its own clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime

import uvicorn

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import RekindleError
from rekindle.server.app import create_app
from rekindle.server.connections import ConnectionConfig

START_S = 60.0


class SessionClock:
    """The time passed to templates; settable from any thread."""

    def __init__(self, now: datetime) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@contextmanager
def serving(settings: Settings, clock: Callable[[], datetime]) -> Iterator[tuple[Engine, int]]:
    """Serve an engine with these settings; yield it and its loopback port."""
    with Engine(settings, clock=clock) as engine, closing(create_app(engine, settings.server)) as app:
        server = uvicorn.Server(ConnectionConfig(app, settings.server, port=0))
        thread = threading.Thread(target=server.run, name="session-server")
        thread.start()
        try:
            yield engine, _port(server, thread)
        finally:
            server.should_exit = True
            thread.join()


def _port(server: uvicorn.Server, thread: threading.Thread) -> int:
    deadline = time.monotonic() + START_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RekindleError("the server of the session did not start")
        time.sleep(0.005)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port
