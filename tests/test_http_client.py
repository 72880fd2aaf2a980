"""The HTTP transport of the commands and benchmarks: where requests go, and how streams of events are read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from typer.testing import CliRunner

from rekindle.cli import app
from rekindle.cli.remote import Remote, Unreachable, agent_path
from rekindle.errors import ConfigError, RequestFailed
from rekindle.harness.client import Client, free_port
from rekindle.harness.http import connect, events, url_of

STREAM = (
    b": ping\n\n"
    b'data: {"text": "a\xe2\x80\xa8b"}\n\n'
    b'event: turn_start\r\ndata: {"turn": 1}\r\n\r\n'
    b"data:[DONE]\n\n"
    b'data: {"text": "trunc'
)
EVENTS = [("", {"text": "a\u2028b"}), ("turn_start", {"turn": 1}), ("", None)]


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_events_are_the_same_however_their_bytes_arrive(size: int) -> None:
    parts = [STREAM[begin : begin + size] for begin in range(0, len(STREAM), size)]
    assert list(events(httpx.Response(200, content=iter(parts)))) == EVENTS


def test_an_event_is_there_before_the_next_bytes_are() -> None:
    def arriving() -> Iterator[bytes]:
        yield b'data: {"n": 1}\n'
        raise AssertionError("read too far")

    assert next(events(httpx.Response(200, content=arriving()))) == ("", {"n": 1})


@contextmanager
def recording(moved_to: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server that has no agents, its URL, and the request lines it got; `/v1/agents` may have moved."""
    lines: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

        def do_GET(self) -> None:
            lines.append(self.path)
            data = json.dumps({"data": []}).encode()
            moved = moved_to is not None and self.path.endswith("/v1/agents")
            self.send_response(301 if moved else 200)
            self.send_header("Content-Length", str(len(data)))
            if moved:
                self.send_header("Location", str(moved_to))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", lines
    finally:
        server.shutdown()
        server.server_close()


def test_proxies_of_the_environment_are_for_the_commands_and_other_machines_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with recording() as (url, lines):
        for proxy in (url, url.removeprefix("http://")):
            monkeypatch.setenv("http_proxy", proxy)
            assert Remote("http://elsewhere.invalid", None).ask("GET", "/v1/agents") == {"data": []}
        assert lines == ["http://elsewhere.invalid/v1/agents"] * 2
        monkeypatch.setenv("no_proxy", "elsewhere.invalid")
        with pytest.raises(Unreachable, match="no server answers"):
            Remote("http://elsewhere.invalid", None).ask("GET", "/v1/agents")
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
        assert Remote(url, None).ask("GET", "/v1/agents") == {"data": []}
        assert connect(url, timeout_s=60.0).get("/v1/agents").json() == {"data": []}
        monkeypatch.delenv("no_proxy")
        monkeypatch.setenv("http_proxy", url)
        with pytest.raises(httpx.ConnectError):
            connect("http://elsewhere.invalid", timeout_s=60.0).get("/v1/agents")
        assert lines[2:] == ["/v1/agents"] * 2


def test_a_command_follows_a_server_on_another_machine_that_has_moved() -> None:
    with recording(moved_to="/other") as (url, lines):
        env = {"http_proxy": url, "no_proxy": ""}
        result = CliRunner(env=env).invoke(app, ["agents", "--url", "http://elsewhere.invalid"])
    assert result.exit_code == 0, result.output
    assert lines == ["http://elsewhere.invalid/v1/agents", "http://elsewhere.invalid/other"]


def test_every_agent_id_is_one_segment_of_a_path() -> None:
    wanted = {"..": "/v1/agents/%2E%2E/pin", "a/b ü": "/v1/agents/a%2Fb%20%C3%BC/pin", ".": "/v1/agents/%2E/pin"}
    with recording() as (url, lines):
        for agent in wanted:
            Remote(url, None).ask("GET", agent_path(agent, "pin"))
    assert lines == list(wanted.values())


@pytest.mark.parametrize("url", ["localhost:1", "ftp://a", "http://", "http://a:b", "", "http://[::1", "http://\x00"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        connect(url, timeout_s=1.0)


def test_a_server_that_listens_everywhere_is_reached_on_this_machine() -> None:
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::", 2) == "http://[::1]:2"
    assert url_of("example.org", 3) == "http://example.org:3"


def test_a_client_says_why_a_request_failed() -> None:
    with pytest.raises(RequestFailed, match=r"^GET /health/ready: .*refused"):
        Client(free_port()).json("GET", "/health/ready")
