"""A stop: running answers end, new ones are turned away, a second signal is obeyed at once."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.forks import ForkedServer

LONG = {
    "messages": [{"role": "user", "content": "Tell me of the attic."}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 3000,
    "ignore_eos": True,
}
FLAGS = ["--threads", "1", "--hot-bytes", "64MiB"]


def opened(port: int, body: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), {"X-Agent-ID": "ada"})
    return connection, connection.getresponse()


def refused(port: int) -> bool:
    """Whether the server turns new requests away now."""
    connection, response = opened(port, {**LONG, "stream": False, "max_tokens": 1})
    with closing(connection):
        body = json.loads(response.read())
    return response.status == 503 and body["error"]["code"] == "stopping" and "retry-after" in response.headers


def test_running_answers_end_and_new_ones_are_turned_away(tmp_path: Path) -> None:
    flags, variables = [*FLAGS, "--store", str(tmp_path / "store")], {"stop_s": "60"}
    with ForkedServer(flags, log=tmp_path / "log", variables=variables) as server:
        server.wait_ready()
        connection, response = opened(server.port, {**LONG, "max_tokens": 600})
        with closing(connection):
            response.read(1)
            os.kill(server.pid, signal.SIGTERM)
            while not refused(server.port):
                time.sleep(0.01)
            events = response.read().decode()
        assert server.wait_end() == 0
    assert '"finish_reason":"length"' in events
    assert events.endswith("data: [DONE]\n\n")
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once_and_what_was_said_is_kept(tmp_path: Path, again: signal.Signals) -> None:
    flags, variables = [*FLAGS, "--store", str(tmp_path / "store")], {"stop_s": "3600"}
    with ForkedServer(flags, log=tmp_path / "log", variables=variables) as server:
        server.wait_ready()
        connection, response = opened(server.port, LONG)
        with closing(connection):
            response.read(1)
            os.kill(server.pid, signal.SIGTERM)
            while not refused(server.port):
                time.sleep(0.01)
            os.kill(server.pid, again)
            events = response.read().decode()
            assert server.wait_end() == 0
    assert "the request was cancelled" in events and '"code":"stopping"' in events
    assert "Traceback" not in (tmp_path / "log").read_text()
    with ForkedServer(flags, log=tmp_path / "log") as server:
        assert server.wait_ready().chat(LONG["messages"], agent="ada", max_tokens=1).report["reused_tokens"] > 0
        assert server.stop() == 0


def test_files_that_hang_on_their_way_do_not_outlast_a_stop(tmp_path: Path) -> None:
    flags, variables = [*FLAGS, "--store", str(tmp_path / "store")], {"stop_s": "1"}
    with ForkedServer(flags, log=tmp_path / "log", variables=variables) as server:
        server.wait_ready().chat([{"role": "user", "content": "brass bell " * 1000}], agent="eve", max_tokens=1)
        with (
            closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as upload,
            closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as download,
        ):
            upload.putrequest("POST", "/v1/agents/ada/import")
            upload.putheader("Content-Length", "1000000")
            upload.endheaders(b"RKAGENT")
            download.sendall(b"GET /v1/agents/eve/export HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert download.recv(15) == b"HTTP/1.1 200 OK"
            while refused(server.port):
                time.sleep(0.01)
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait_end() == 0
    log = (tmp_path / "log").read_text()
    assert "the client left before all of the file had come" in log and "GET /v1/agents/eve/export 200" in log
    assert "Traceback" not in log
