"""One engine with the bundled model behind a real socket, shared by the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
import uvicorn

from rekindle import Engine
from rekindle.config import Settings
from rekindle.server.app import create_app


@dataclass(frozen=True)
class Served:
    """A running server: its engine, and where it listens."""

    engine: Engine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, agent: str | None = None) -> openai.OpenAI:
        """The official client, speaking as `agent`."""
        headers = {"X-Agent-ID": agent} if agent else {}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", default_headers=headers, max_retries=0)


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Small steps: a long prompt takes hundreds, so that a test can act in the middle of it.
    flags = {"store": tmp_path_factory.mktemp("store"), "threads": 1, "hot_bytes": "256MiB", "max_chunk_tokens": 16}
    settings = Settings.load(flags)
    with Engine(settings) as engine:
        config = uvicorn.Config(create_app(engine, settings.server), port=0, log_config=None, access_log=False)
        server = uvicorn.Server(config)
        started = threading.Event()
        thread = threading.Thread(target=_run, args=(server, started))
        thread.start()
        assert started.wait(30)
        yield Served(engine, server.servers[0].sockets[0].getsockname()[1])
        server.should_exit = True
        thread.join()
        engine.check()


def _run(server: uvicorn.Server, started: threading.Event) -> None:
    startup = server.startup

    async def told(sockets: list[object] | None = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = told
    server.run()
