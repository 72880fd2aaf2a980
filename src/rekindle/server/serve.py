"""The running server: its port, banner, signals, and a graceful shutdown.

The port is opened before the model is loaded, so that a taken port fails at once and early clients wait. After SIGTERM
or SIGINT running answers get a moment to finish while new requests are refused; then control returns to the caller,
which flushes and closes the engine. A second signal cuts running answers off at once.
"""

from __future__ import annotations

import asyncio
import errno
import re
import signal
import socket
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import uvicorn

from rekindle.config import ServerSettings, Settings, show_bytes
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError
from rekindle.model.checkpoint import Source
from rekindle.pocket import ABOUT, is_pocket
from rekindle.server import descriptors
from rekindle.server.app import create_app
from rekindle.server.connections import MAX_LINGERING, ConnectionConfig
from rekindle.server.descriptors import Listener
from rekindle.server.gate.limits import ShutdownGate
from rekindle.spec import ModelFacts
from rekindle.store.files.shards import SHARD_BYTES

INDENT = " " * 11
IN_BITS = {"int8": "8 bits", "int4": "4 bits", "bfloat16": "16 bits (bf16)", "float32": "32 bits (fp32)"}
MANY_BYTES = re.compile(r"\b(\d{1,3}(?:,\d{3}){2,})(?: bytes\b|(?=$|[;,]))")  # not of tokens
NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # for "localhost" without IPv6
BACKLOG = 2048  # connections that may wait to be accepted, as in uvicorn
CLOSE_S = 2  # for cut-off answers to end, and then for connections to close
TICK_S = 0.05


def banner(engine: Engine, settings: Settings, url: str) -> str:
    """Describe the model, its weights, KV formats and why, memory, warm agents, and the URL with a first request."""
    spec, stats = engine.spec, engine.stats()
    name = settings.server.served_model_name or spec.name
    place = engine.settings.store
    store = str(place.own_directory()) if place.enabled else "off: nothing survives a restart"
    source = Source.find(settings.model.model, settings.model.revision)
    about = ABOUT if is_pocket(source.directory) else ""
    if settings.backend.address is None:
        computing = [
            f"weights    {_weights(spec.facts)}",
            f"KV         {spec.layout.describe()}",
            *(f"{INDENT}{_readable(note)}" for note in engine.notes),
        ]
    else:
        notes = "; ".join(engine.notes)
        computing = textwrap.wrap(notes, 100, initial_indent="backend    ", subsequent_indent=INDENT)
    tokens = f"{stats.num_blocks * spec.layout.block_tokens:,} tokens"
    hot = [f"hot        {tokens} in {stats.hot_bytes / 2**20:,.0f} MiB"] if engine.has_kv else []
    kept = "warm " if engine.has_kv else "texts"
    memory = [*hot, f"{kept}      agents found: {engine.num_warm_agents:,}, in {store}"]
    lines = [
        f"model      {name} ({spec.architecture}){_parameters(spec.facts)}, context {engine.max_context:,} tokens",
        *textwrap.wrap(about, 100, initial_indent=INDENT, subsequent_indent=INDENT),
        *computing,
        *memory,
        f"ready      {url}/v1   (OpenAI base URL)",
        *_first_request(url, takes_messages=engine.encoder.template.exists),
        f"           curl {url}/v1/agents",
    ]
    return "\n".join(lines)


def _parameters(facts: ModelFacts) -> str:
    """How many there are, where that is known: of a front's model it is not."""
    if not facts.num_parameters:
        return ""
    unit, name = (1e9, "billion") if facts.num_parameters >= 1e9 else (1e6, "million")
    count = facts.num_parameters / unit
    return f", {count:,.{0 if count >= 10 else 1}f} {name} parameters"


def _weights(facts: ModelFacts) -> str:
    """Their format, and what they take in memory and on disk."""
    kept = IN_BITS.get(facts.weight_format, facts.weight_format)
    files = "a GGUF file" if facts.file_format == "gguf" else "safetensors"
    return f"{kept}, {show_bytes(facts.weight_bytes)} in memory, from {files} of {show_bytes(facts.file_bytes)}"


def _readable(note: str) -> str:
    """A note with its large sizes in MiB or GiB."""
    return MANY_BYTES.sub(lambda found: show_bytes(int(found[1].replace(",", ""))), note)


def _first_request(url: str, *, takes_messages: bool) -> list[str]:
    """A request to copy: a message, or the beginning of a text for a model that has no chat template."""
    if takes_messages:
        path, body = "/v1/chat/completions", '{"messages":[{"role":"user","content":"Hello!"}]}'
    else:
        path, body = "/v1/completions", '{"prompt":"Once upon a time","max_tokens":40}'
    return [f"           curl {url}{path} -H 'X-Agent-ID: me' \\", f"             -d '{body}'"]


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


class _Server(uvicorn.Server):
    """Reports when it has started, and stops in two steps: first the gate, then the connections."""

    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[], None], gate: ShutdownGate, stop_s: float
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._gate = gate
        self._stop_s = stop_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.close()
        await self._empty(self._stop_s, until=lambda: self.force_exit)
        self._gate.cut()
        await self._empty(CLOSE_S)
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this then, and the application would not be closed
            await self.lifespan.shutdown()

    async def _empty(self, most_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for requests in progress to end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + most_s
        while self._gate.num_inside and loop.time() < end and not until():
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


def _store_files(engine: Engine) -> int:
    """Return how many block files the store may open."""
    store = engine.stats().store
    return 0 if store is None else store["disk_bytes"] // SHARD_BYTES + len(engine.spec.layout.parts)


def run_server(
    engine: Engine, settings: Settings, say: Callable[[str], None], *, listeners: list[socket.socket]
) -> int | None:
    """Serve a started engine until a signal, and return it; None if something else stopped the server.

    `say` gets the banner once requests are answered. Closes `listeners`.
    """
    most = settings.server.max_connections
    most = descriptors.places(most, lingering=MAX_LINGERING, store_files=_store_files(engine))
    server = replace(settings.server, max_connections=most)
    url = url_of(server.host, listeners[0].getsockname()[1])
    with ExitStack() as signals, closing(create_app(engine, server, model=settings.model.model)) as app:
        seen = signals.enter_context(_signals_end_quietly())  # until the application is closed
        config = ConnectionConfig(app, server, server_header=False, timeout_graceful_shutdown=CLOSE_S)
        running = _Server(
            config, on_started=lambda: say(banner(engine, settings, url)), gate=app.gate, stop_s=server.stop_s
        )
        running.run(sockets=[Listener(each, make_room=config.places.reclaim_one) for each in listeners])
    return seen[-1] if seen else None
