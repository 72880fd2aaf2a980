"""What fails on a server's threads ends one request; a thread that dies is reported, and requests are turned away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import pytest
from fastapi import FastAPI, Query
from starlette.testclient import TestClient

from rekindle import Engine
from rekindle.config import ServerSettings
from rekindle.errors import RekindleError
from rekindle.server.border import Route, in_thread, on_error
from tests.engine.dying import REASON, THREADS, TOO_HARD, Panic, died, panicking_model, poison, raising
from tests.given import settings_of
from tests.proofs import proved
from tests.server.conftest import Served, serving

ROOT = Path(__file__).parents[2]
SAID = [{"role": "user", "content": "Hello!"}]
ASKED = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "Hello!"},
    "/v1/responses": {"input": "Hello!"},
    "/v1/messages": {"messages": SAID, "max_tokens": 4, "model": "default"},
    "/api/chat": {"messages": SAID},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one whose tokenizer panics at `TOO_HARD`."""
    return panicking_model(tmp_path_factory.mktemp("models"))


@contextmanager
def server(store: Path, model: Path, **settings: str) -> Iterator[Served]:
    """A server of its own, since it is not to be used afterwards."""
    flags = {"model": str(model), "store": store, "threads": 1, "hot_bytes": "64MiB", "readers": 1}
    with proved(Engine(settings_of(**flags))) as engine, serving(engine, ServerSettings(**settings)) as running:
        yield running


@pytest.mark.parametrize("thread", THREADS)
def test_health_fails_and_requests_are_turned_away(tmp_path: Path, model: Path, thread: str) -> None:
    with server(tmp_path, model, api_key="k") as running:
        assert running.chat("Hello!", key="k").status == 200
        assert running.send("GET", "/health/live").status == 200
        died(poison(running.engine, thread))
        short = f"the {thread} thread has ended; restart the server"
        long = f"the {thread} thread has ended: {REASON}; restart the server"
        for path in ("/health/live", "/health/ready"):
            for key, problem in (("k", long), (None, short)):
                answer = running.send("GET", path, key=key)
                assert (answer.status, answer.json["status"], answer.json["problems"]) == (503, "failed", [problem])
        for path, body in ASKED.items():
            for more in ({}, {"stream": True}):
                answer = running.send("POST", path, {**body, **more}, key="k")
                error = answer.json["error"]
                assert (answer.status, error if path == "/api/chat" else error["message"]) == (503, short), answer.body
                if path not in ("/v1/messages", "/api/chat"):
                    assert answer.error["code"] == "unavailable"
        metrics = running.send("GET", "/metrics", key="k")
        assert metrics.status == 200 and b"rekindle_dead_threads 1.0" in metrics.body
        for path in ("/v1/agents", "/v1/agents/ada", "/v1/tokenize"):
            assert running.send("GET", path, key="k").status, "it is answered"


def test_a_stop_does_not_wait_for_dead_threads(tmp_path: Path, model: Path) -> None:
    command = [sys.executable, "-m", "tests.server.dying_server", str(model), str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'pocket' / 'src'}:{ROOT}"}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            assert int(process.stdout.readline())
            for thread in THREADS:
                process.stdin.write(f"{thread}\n")
                process.stdin.flush()
                assert process.stdout.readline() == f"the {thread} thread has ended: {REASON}; restart the server\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "closed\n"
            assert process.wait() == 0
        finally:
            process.kill()
    assert "within" not in (tmp_path / "log").read_text(), "nothing was waited for in vain"


def test_a_panic_of_the_tokenizer_is_an_answer_in_the_dialects_own_shape(tmp_path: Path, model: Path) -> None:
    hard = [{"role": "user", "content": TOO_HARD}]
    with server(tmp_path, model) as running:
        for path, body in (
            ("/v1/tokenize", {"text": TOO_HARD}),
            ("/v1/tokenize", {"messages": hard}),
            ("/v1/chat/completions", {"messages": hard}),
            ("/v1/chat/completions", {"messages": hard, "stream": True}),
            ("/v1/completions", {"prompt": TOO_HARD}),
            ("/v1/responses", {"input": TOO_HARD}),
        ):
            answer = running.send("POST", path, body)
            assert (answer.status, answer.error["type"]) == (500, "server_error"), answer.body
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = running.send("POST", path, {"messages": hard, "max_tokens": 4, "model": "default"})
            assert (answer.status, answer.json["error"]["type"]) == (500, "api_error"), answer.body
        assert running.chat("Hello!").status == 200
        assert running.send("GET", "/health/live").json == {"status": "ok"}


@pytest.mark.parametrize("kind", [Panic, KeyboardInterrupt, SystemExit, ValueError])
def test_what_a_route_raises_on_a_worker_thread_is_answered(kind: type[BaseException]) -> None:
    app = FastAPI()
    app.router.route_class = Route

    @app.get("/worker")
    def worker(number: Annotated[int, Query()] = 1) -> None:
        raising(kind)()

    @app.get("/aside")
    async def aside() -> None:
        await in_thread(raising(kind))

    for each in (RekindleError, Exception):
        app.add_exception_handler(each, on_error)
    with TestClient(app, raise_server_exceptions=False) as client:
        for path in ("/worker?number=2", "/aside"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_panic_on_the_event_loop_is_answered() -> None:
    app = FastAPI()
    app.router.route_class = Route

    @app.get("/")
    async def root() -> None:
        raising(Panic)()

    app.add_exception_handler(RekindleError, on_error)
    with TestClient(app) as client:
        assert client.get("/").json()["error"]["message"] == REASON
