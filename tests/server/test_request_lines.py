"""Every request leaves one line, whoever answered it, with the id that the client gave and got back."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rekindle.config import ServerSettings
from tests.forks import ForkedServer
from tests.server.conftest import Served, serving
from tests.server.logged import Heard, fields, listening, text

SAID = [{"role": "user", "content": "Hello!"}]
CHAT: dict[str, Any] = {"messages": SAID, "max_tokens": 2, "temperature": 0}
SETTINGS = ServerSettings(api_keys={"left": "key-l", "slow": "key-s"}, max_body_bytes=4096, requests_per_minute=1000)
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (INFO|WARNING|ERROR) ")


def crash() -> None:
    raise ValueError("a\nroute that fails")


@pytest.fixture(scope="module")
def keyed(served: Served) -> Iterator[Served]:
    with serving(served.engine, SETTINGS) as running:
        running.app.add_api_route("/crash", crash)
        yield running


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as handler:
        yield handler


# What is sent; the status, the tenant and a word of what was wrong.
CASES: dict[str, tuple[tuple[str, str, Any], dict[str, str], int, str | None, str]] = {
    "answered": (("GET", "/v1/models", None), {"key": "key-l"}, 200, "left", ""),
    "no key": (("GET", "/v1/models", None), {}, 401, None, "API key"),
    "wrong key": (("POST", "/v1/messages", CHAT), {"key": "wrong"}, 401, None, "API key"),
    "foreign host": (("GET", "/v1/models", None), {"host": "evil.example"}, 403, None, "evil.example"),
    "foreign page": (("GET", "/", None), {"origin": "https://evil.example"}, 403, None, "evil.example"),
    "not an admin": (("GET", "/v1/stats", None), {"key": "key-l"}, 403, "left", "admin key"),
    "unknown route": (("GET", "/nowhere?key=secret", None), {"key": "key-l"}, 404, "left", "Not Found"),
    "unknown agent": (("GET", "/v1/agents/nobody", None), {"key": "key-l"}, 404, "left", "nobody"),
    "method": (("PUT", "/v1/models", b"x"), {"key": "key-l"}, 405, "left", "Method Not Allowed"),
    "no JSON": (("POST", "/v1/chat/completions", b"{"), {"key": "key-l"}, 400, "left", "not JSON"),
    "no body": (("POST", "/v1/tokenize", b""), {"key": "key-l"}, 400, "left", "not JSON"),
    "no key for Ollama": (("POST", "/api/chat", CHAT), {}, 401, None, "API key"),
    "no model of Ollama": (("POST", "/api/generate", {"model": "x"}), {"key": "key-l"}, 404, "left", "try pulling"),
    "too large": (("POST", "/v1/messages", b" " * 5000), {"key": "key-l"}, 413, "left", "4096 bytes"),
    "page": (("GET", "/", None), {}, 200, None, ""),
    "alive": (("GET", "/health/live", None), {}, 200, None, ""),
    "crash": (("GET", "/crash", None), {"key": "key-l"}, 500, "left", "a\\nroute that fails"),
}


@pytest.mark.parametrize("name", CASES)
def test_whoever_answers_one_line_is_written(keyed: Served, heard: Heard, name: str) -> None:
    sent, headers, status, tenant, wrong = CASES[name]
    own_id = f"it-is-{name.replace(' ', '-')}"
    answer = keyed.send(*sent, **headers, x_request_id=own_id)
    assert (answer.status, answer.headers["x-request-id"]) == (status, own_id), answer.body
    (record,) = heard.until(keyed, own_id)
    line, known = text(record), fields(record)
    assert LINE.match(line), line
    assert line.splitlines()[0].count(own_id) == 1 and "secret" not in line
    assert (known["request_id"], known["status"], known["tenant"]) == (own_id, status, tenant)
    assert (known["method"], known["path"]) == (sent[0], sent[1].partition("?")[0])
    assert wrong in line and ("error" in known) == bool(wrong)
    assert (len(line.splitlines()) > 1) == (name == "crash"), "a traceback follows a crash, and nothing else"


def test_a_request_too_many_has_a_line(served: Served, heard: Heard) -> None:
    with serving(served.engine, ServerSettings(requests_per_minute=1)) as running:
        answers = [running.send("GET", "/v1/models", x_request_id=f"r{number}") for number in range(2)]
        records = heard.until(running, "r0", "r1")
    assert [answer.status for answer in answers] == [200, 429]
    mine = [fields(record) for record in records if "request_id" in fields(record)]
    assert [(line["request_id"], line["status"]) for line in mine] == [("r0", 200), ("r1", 429)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_reply_says_what_was_reused(served: Served, heard: Heard, stream: bool) -> None:
    body = {**CHAT, "stream": stream, "n": 1 if stream else 2}
    answer = served.send("POST", "/v1/chat/completions", body, x_agent_id="an agent", x_request_id="mine")
    assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
    (record,) = heard.until(served, "mine")
    line, known = text(record), fields(record)
    assert re.search(r'POST /v1/chat/completions 200 [\d,]+ ms tenant=default agent="an agent" id=mine client=', line)
    assert re.search(r": \w+, reused \d+ of \d+", line) and line.count("tokens out") == body["n"]
    assert known["agent"] == "an agent" and known["num_replies"] == body["n"]
    assert known["prompt_tokens"] == known["reused_tokens"] + known["computed_tokens"]


def test_a_client_that_leaves_has_a_line(served: Served, heard: Heard) -> None:
    body = json.dumps({**CHAT, "max_tokens": 3000, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: gone\r\nContent-Length: {len(body)}\r\n"
    chat = head.replace("completions", "chat/completions").encode() + b"\r\n" + body
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=60)) as connection:
        connection.sendall(chat)
        while not served.engine.stats().num_running:  # it is inside
            threading.Event().wait(0.01)
    (record,) = heard.until(served, "gone")
    assert fields(record)["status"] == 499 and "the client left" in text(record)
    served.until_idle()


def test_half_a_body_has_a_line(served: Served, heard: Heard) -> None:
    head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nX-Request-ID: half\r\nContent-Length: 100\r\n\r\n{"
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=60)) as connection:
        connection.sendall(head)
    (record,) = heard.until(served, "half")
    assert fields(record)["status"] == 499


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /\n\xff\r\n\r\n"])
def test_what_is_not_http_has_a_line(served: Served, heard: Heard, sent: bytes) -> None:
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=60)) as connection:
        connection.sendall(sent)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body)["error"]["type"] == "invalid_request_error"
    (own_id,) = re.findall(rb"X-Request-ID: (\S+)", head)
    (record,) = heard.until(served, own_id.decode())
    assert (fields(record)["method"], fields(record)["path"], fields(record)["status"]) == ("-", "-", 400)


@pytest.mark.parametrize("own_id", ["", "two words", "x" * 129, "d\u00e9j\u00e0", "a\tb"])
def test_an_id_that_is_none_is_replaced(served: Served, own_id: str) -> None:
    answer = served.send("GET", "/version", x_request_id=own_id)
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    assert served.send("GET", "/version").headers["x-request-id"] != answer.headers["x-request-id"]
    assert served.send("GET", "/version", x_request_id="~" * 128).headers["x-request-id"] == "~" * 128


def test_nothing_that_is_sent_breaks_a_line(served: Served, heard: Heard) -> None:
    """Neither a path nor a name nor a quoted value can look like another request's line."""
    forged = "x%0a2026-01-01T00:00:00.000+00:00%20INFO%20GET%20/%20200"
    served.send("GET", f"/{forged}{'/long' * 200}", x_request_id="path")
    name = "%E2%80%A8tenant=admin%20%1b[31m"
    served.send("POST", "/v1/chat/completions", CHAT, x_agent_id=name.replace("%1b", ""), x_request_id="agent")
    served.send("POST", "/v1/chat/completions", {**CHAT, "model": "a\nb\u2028c\x1b[31m"}, x_request_id="model")
    records = heard.until(served, "path", "agent", "model")
    assert len(records) == 3
    for record in records:
        line = text(record)
        assert line.isprintable() and len(line) < 1000, line
        assert line.count(" tenant=") == 1 or "\\u2028" in line, line


def test_official_clients_read_the_id(served: Served) -> None:
    chat = served.client().chat.completions
    made = chat.create(**CHAT, model="default", extra_headers={"X-Request-ID": "mine"})
    assert made._request_id == "mine"
    with pytest.raises(openai.BadRequestError) as refused:
        chat.create(**CHAT, model="default", extra_body={"best_of": 2})
    assert (refused.value.request_id or "").startswith("req_")
    client = anthropic.Anthropic(base_url=served.url, api_key="unused", max_retries=0)
    own = {"X-Request-ID": "ours"}
    message = client.messages.create(model="default", max_tokens=2, messages=SAID, extra_headers=own)  # type: ignore[arg-type]
    assert message._request_id == "ours"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.models.retrieve("gpt-9", extra_headers=own)
    assert unknown.value.request_id == "ours" and unknown.value.body["request_id"] == "ours"  # type: ignore[index]


def test_a_process_writes_json_and_keeps_to_its_level(tmp_path: Path) -> None:
    flags = ["--store", "off", "--threads", "1", "--hot-bytes", "32MiB", "--log-format", "json"]
    lines: dict[str, list[dict[str, Any]]] = {}
    for level in ("info", "warning"):
        log = tmp_path / level
        with ForkedServer([*flags, "--log-level", level], log=log) as server:
            server.wait_ready().chat(SAID, agent="ada", max_tokens=2)
            assert server.stop() == 0
        lines[level] = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert lines["warning"] == []
    (line,) = [line for line in lines["info"] if line["event"] == "request" and line["method"] == "POST"]
    assert {"time", "level", "logger", "message", "request_id", "duration_ms", "client"} <= set(line)
    assert (line["tenant"], line["agent"], line["status"], line["outcome"]) == ("default", "ada", 200, "miss")
