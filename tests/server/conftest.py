"""One engine with the bundled model behind a real socket, shared by the tests of this folder."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import uvicorn

from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from rekindle.server.app import App, create_app
from rekindle.server.connections import ConnectionConfig
from tests.engine.idle import until_idle
from tests.proofs import proved


@dataclass(frozen=True)
class Answer:
    """Status, headers in lower case, and the body as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape."""
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found


@dataclass(frozen=True)
class Served:
    """A running server: its engine, and where it listens."""

    engine: Engine
    port: int
    app: App
    server: uvicorn.Server

    def num_connections(self) -> int:
        """Connections that are open, those that were turned away too."""
        assert isinstance(self.server.config, ConnectionConfig)
        return len(self.server.server_state.connections) + self.server.config.num_refused

    def until_idle(self) -> None:
        """Wait until the engine has nothing to do."""
        until_idle(self.engine)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, agent: str | None = None) -> openai.OpenAI:
        """The official client, speaking as `agent`."""
        headers = {"X-Agent-ID": agent} if agent else {}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", default_headers=headers, max_retries=0)

    def send(self, method: str, path: str, body: Any = None, *, key: str | None = None, **headers: str) -> Answer:
        """One request over its own connection; `body` is sent as JSON, `x_agent_id="a"` as X-Agent-ID."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["Authorization"] = f"Bearer {key}"
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body=data, headers=named)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def chat(self, text: str, *, key: str | None = None, agent: str | None = None, **more: Any) -> Answer:
        """A short greedy reply to one message."""
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 4, **more}
        return self.send("POST", "/v1/chat/completions", body, key=key, **({"x_agent_id": agent} if agent else {}))


@contextmanager
def serving(engine: Engine, settings: ServerSettings) -> Iterator[Served]:
    """A server over `engine` with other settings, on a port of its own."""
    with closing(create_app(engine, settings)) as app:
        server = uvicorn.Server(ConnectionConfig(app, settings, port=0))
        started = threading.Event()
        thread = threading.Thread(target=_run, args=(server, started))
        thread.start()
        assert started.wait(120)
        try:
            yield Served(engine, server.servers[0].sockets[0].getsockname()[1], app, server)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Small steps: a long prompt takes hundreds, so that a test can act in the middle of it.
    flags = {"store": tmp_path_factory.mktemp("store"), "threads": 1, "hot_bytes": "256MiB", "max_chunk_tokens": 16}
    settings = Settings.load(flags)
    with proved(Engine(settings)) as engine:
        with serving(engine, settings.server) as running:
            yield running
        engine.check()


def _run(server: uvicorn.Server, started: threading.Event) -> None:
    startup = server.startup

    async def told(sockets: list[object] | None = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = told
    server.run()
