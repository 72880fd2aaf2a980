"""The server with a real nginx and a real Caddy in front, configured as docs/proxy.md says: TLS, streams, the page."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.config import ServerSettings
from rekindle.harness.client import free_port
from tests.programs import program
from tests.server.conftest import Served, serving
from tests.server.logged import fields, listening

PAGE = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text()
NAME = "llm.example"
KEY = {"Authorization": "Bearer the-key"}
SETTINGS = ServerSettings(api_key="the-key", public_host=(NAME,))
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "temperature": 0}
LONG = {**CHAT, "max_tokens": 3000, "ignore_eos": True}
WAIT_S = 60.0
NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; {user}
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {server}
}}
"""
CADDY = "{{\n admin off\n auto_https off\n}}\n{site}"
# As it is where nobody read the page: HTTP/1.0 to the server, its address as Host, buffers.
BARE = "proxy_pass http://127.0.0.1:7354;\n"


@dataclass(frozen=True)
class Proxy:
    """A proxy in front of a server; `url` is where it listens."""

    served: Served
    url: str
    trusted: ssl.SSLContext

    def client(self) -> httpx.Client:
        """A client that believes only in the proxy's certificate; names are resolved by hand."""
        return httpx.Client(base_url=self.url, verify=self.trusted, timeout=WAIT_S, headers={"Host": self.host})

    @property
    def host(self) -> str:
        return f"{NAME}:{httpx.URL(self.url).port}"

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.request(method, path, extensions={"sni_hostname": NAME}, **more)


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def certified(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for the name, signed by itself."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split()
    subject = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*command, *subject, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


def placed(config: str, port: int, upstream: int, key: Path, certificate: Path) -> str:
    for told, real in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        (f"https://{NAME} ", f"https://{NAME}:{port} "),
        ("127.0.0.1:7354", f"127.0.0.1:{upstream}"),
        ("/etc/ssl/llm.example.pem", str(certificate)),
        ("/etc/ssl/llm.example.key", str(key)),
    ):
        config = config.replace(told, real)
    return config


def command(kind: str, folder: Path, config: str) -> list[str]:
    file = folder / "config"
    if kind == "caddy":
        file.write_text(CADDY.format(site=config))
        return [program("caddy"), "run", "--adapter", "caddyfile", "--config", str(file)]
    user = "user root;" if Path.home() == Path("/root") else ""
    file.write_text(NGINX.format(folder=folder, server=config, user=user))
    return [program("nginx"), "-p", str(folder), "-c", str(file)]


@contextmanager
def proxied(kind: str, served: Served, folder: Path) -> Iterator[Proxy]:
    """A proxy as a child of this process; it ends with this."""
    port, (key, certificate) = free_port(), certified(folder)
    config = block("caddy" if kind == "caddy" else "nginx")
    if kind == "bare nginx":
        config = re.sub(r"(location / {\n).*?\n( +}\n)", rf"\1{BARE}\2", config, flags=re.DOTALL)
        assert "proxy_buffering" not in config
    config = placed(config, port, served.port, key, certificate)
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), str(folder))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command(kind, folder, config), stdout=log, stderr=log, env=os.environ | homes)
    try:
        until(lambda: listens(port) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield Proxy(served, f"https://127.0.0.1:{port}", ssl.create_default_context(cafile=certificate))
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def until(is_so: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


@pytest.fixture(scope="module", params=["nginx", "bare nginx", "caddy"])
def proxy(request: pytest.FixtureRequest, served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("proxy")
    with serving(served.engine, SETTINGS) as running, proxied(request.param, running, folder) as found:
        yield found


def is_bare(proxy: Proxy) -> bool:
    """Whether the proxy passes its own idea of Host on."""
    return proxy.ask("GET", "/v1/models", headers={"Host": "evil.example"}).status_code == 401


def test_a_reply_and_its_id_come_through(proxy: Proxy) -> None:
    with listening() as heard:
        own = {**KEY, "X-Request-ID": "through", "X-Forwarded-For": "203.0.113.9"}
        answer = proxy.ask("POST", "/v1/chat/completions", json=CHAT, headers=own)
        (record,) = heard.until(proxy.served, "through")
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "through"), answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 2
    assert fields(record)["client"] == "127.0.0.1"


def test_keys_hosts_and_pages_are_checked(proxy: Proxy) -> None:
    assert proxy.ask("GET", "/v1/models").status_code == 401
    assert proxy.ask("GET", "/v1/models", headers=KEY).status_code == 200
    own = {"Origin": f"https://{proxy.host}"}
    assert proxy.ask("GET", "/overview", headers={**KEY, **own}).status_code == 200
    foreign = {**KEY, "Origin": "https://evil.example"}
    assert proxy.ask("GET", "/overview", headers=foreign).status_code == 403
    if not is_bare(proxy):
        answer = proxy.ask("GET", "/health/live", headers={"Host": "evil.example"})
        # Caddy has a site of that name only, and answers all others itself, with nothing.
        assert answer.status_code == 403 or not answer.content


def test_a_stream_comes_in_pieces_and_ends_with_its_client(proxy: Proxy) -> None:
    served = proxy.served
    with proxy.client() as client:
        asking = {"json": {**LONG, "stream": True}, "headers": KEY, "extensions": {"sni_hostname": NAME}}
        with client.stream("POST", "/v1/chat/completions", **asking) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            events = answer.iter_lines()
            assert json.loads(next(events).removeprefix("data: "))["choices"]
            assert served.engine.stats().num_running == 1, "its first words are here before its last are computed"
    served.until_idle()


def test_a_whole_answer_ends_with_its_client(proxy: Proxy) -> None:
    served = proxy.served
    body = json.dumps(LONG).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {proxy.host}\r\nAuthorization: {KEY['Authorization']}\r\n"
    raw = socket.create_connection(("127.0.0.1", httpx.URL(proxy.url).port or 0), timeout=WAIT_S)
    with listening() as heard, proxy.trusted.wrap_socket(raw, server_hostname=NAME) as connection:
        connection.sendall(f"{head}X-Request-ID: left\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: served.engine.stats().num_running == 1)
        connection.close()
        (record,) = heard.until(served, "left")
    assert fields(record)["status"] == 499
    served.until_idle()


def test_the_page_and_what_it_asks_for(proxy: Proxy) -> None:
    page = proxy.ask("GET", "/")
    assert page.status_code == 200 and "Content-Security-Policy" in page.headers
    files = re.findall(r'(?:src|href)="(/?page/[^"]+)"', page.text)
    assert files and all(proxy.ask("GET", f"/{name.lstrip('/')}").status_code == 200 for name in files)
    assert proxy.ask("GET", "/overview", headers=KEY).json()["object"] == "overview"
    assert proxy.ask("GET", "/health/ready").status_code == 200


def test_bodies_have_the_bound_of_the_server(proxy: Proxy) -> None:
    large = {**CHAT, "messages": [{"role": "user", "content": "word " * 600_000}]}
    refused = proxy.ask("POST", "/v1/chat/completions", json=large, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    too_large = proxy.ask("POST", "/v1/chat/completions", content=b" " * (33 << 20), headers=KEY)
    assert too_large.status_code == 413


def test_there_are_no_websockets(proxy: Proxy) -> None:
    upgrade = {**KEY, "Connection": "Upgrade", "Upgrade": "websocket"}
    direct = {name.lower(): value for name, value in upgrade.items()}
    with listening() as heard:
        assert proxy.served.send("GET", "/v1/models", **direct, x_request_id="direct").status == 200
        assert proxy.ask("GET", "/v1/models", headers={**upgrade, "X-Request-ID": "proxied"}).status_code == 200
        records = heard.until(proxy.served, "direct", "proxied")
    lines = [fields(record) for record in records if "request_id" in fields(record)]
    assert {(line["request_id"], line["status"]) for line in lines} == {("direct", 200), ("proxied", 200)}
    assert len(lines) == 2
    assert {record.levelname for record in records} == {"INFO"}
