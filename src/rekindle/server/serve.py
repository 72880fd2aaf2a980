"""The running server: banner, signals, and a stop that loses nothing.

SIGTERM and SIGINT stop listening, let running answers end for a moment, then return to the caller, which flushes and
closes the engine.
"""

from __future__ import annotations

import signal
import socket
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.pocket import ABOUT
from rekindle.server.app import create_app

INDENT = " " * 11
STOP_S = 5  # running answers may go on for so long after a SIGTERM


def banner(engine: Engine, settings: Settings, url: str) -> str:
    """What is served, in which formats and why, how much memory, who is warm, and where."""
    spec, stats = engine.spec, engine.stats()
    formats = ", ".join(f"{name} on {count} layers" for name, count in spec.layout.formats().items())
    per_token = spec.layout.block_bytes / spec.layout.block_tokens
    name = settings.server.served_model_name or spec.name
    store = str(settings.store.directory()) if settings.store.enabled else "off: nothing survives a restart"
    about = ABOUT if settings.model.model is None else ""
    lines = [
        f"model      {name} ({spec.architecture}), context {engine.max_context:,} tokens",
        *textwrap.wrap(about, 100, initial_indent=INDENT, subsequent_indent=INDENT),
        f"KV         {formats} (K/V); {per_token:,.0f} bytes a token",
        *(f"{INDENT}{note}" for note in engine.notes),
        f"hot        {stats.num_blocks * spec.layout.block_tokens:,} tokens in {stats.hot_bytes / 2**20:,.0f} MiB",
        f"warm       agents found: {engine.num_warm_agents:,}, in {store}",
        f"ready      {url}/v1   (OpenAI base URL)",
        f"           curl {url}/v1/chat/completions -H 'X-Agent-ID: me' \\",
        """             -d '{"messages":[{"role":"user","content":"Hello!"}]}'""",
        f"           curl {url}/v1/agents",
    ]
    return "\n".join(lines)


def url_of(host: str, port: int) -> str:
    """A URL to copy; a wildcard address is spelled as this machine's own."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Tells its port once it listens."""

    def __init__(self, config: uvicorn.Config, *, on_listening: Callable[[int], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signal that stopped it once more; it has done its work by then."""
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.signal(kind, lambda *_: None) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def run_server(engine: Engine, settings: Settings, say: Callable[[str], None]) -> None:
    """Serve a started engine until a signal; `say` gets the banner once connections are accepted."""
    server = settings.server
    config = uvicorn.Config(
        create_app(engine, server, model=settings.model.model),
        host=server.host,
        port=server.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
    )
    listening = _Server(config, on_listening=lambda port: say(banner(engine, settings, url_of(server.host, port))))
    with _signals_end_quietly():
        listening.run()
