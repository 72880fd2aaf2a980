"""A server process, its settings by their flat names, and its client, for the demo and the benchmarks.

The process is a real `rekindle serve` with exactly the given settings: it does not inherit the caller's REKINDLE_*
variables. The client measures the time to the first token itself.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import httpx

from rekindle.config import ENV_PREFIX, SETTINGS, ServerSettings, Settings
from rekindle.errors import ConfigError, RekindleError, RequestFailed
from rekindle.harness.http import connect, events, url_of

START_S = 300.0  # a large model on a slow disk
HOST = "127.0.0.1"
PORTS = range(10_000, 32_768)


def flags_of(settings: Settings) -> dict[str, Any]:
    """Return names and values of the settings that affect measurements, none of them secret; `Settings.load` reads
    them back."""
    left_out = ("store", "secret", "store_key", "store_key_file")
    mine = (known for known in SETTINGS.values() if known.section != "server" and known.name not in left_out)
    flat = {known.name: getattr(getattr(settings, known.section), known.field) for known in mine}
    given = {name: value for name, value in flat.items() if value is not None and value != ()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def variables(settings: Settings, store: Path) -> dict[str, str]:
    """Return all settings except the server's, with this store, as values of environment variables."""
    own = settings.store
    keys = {"secret": own.secret, "store_key": own.key, "store_key_file": own.key_file}
    given = {**flags_of(settings), **{name: value for name, value in keys.items() if value is not None}, "store": store}
    return {name: _text(value) for name, value in given.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def free_port(host: str = HOST) -> int:
    """Return a currently unused port of `host`; OSError if that is no address of this machine.

    It lies below those that systems give to connections and to servers that take any (from 32,768 on), one of which
    might have it before our server does.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        try:
            with socket.create_server((host, port), family=family):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: text, ids of prompt and reply, the `rekindle` object, seconds to the first token at the client."""

    text: str
    prompt_ids: list[int]
    completion_ids: list[int]
    report: dict[str, Any]
    first_token_s: float


class Client:
    """Client of one server."""

    def __init__(self, port: int, *, host: str = HOST, api_key: str | None = None) -> None:
        self._http = connect(url_of(host, port), api_key=api_key, timeout_s=START_S)

    def json(self, method: str, path: str) -> Any:
        """Return the JSON answer to a request without a body; RequestFailed with the reason if there is none."""
        with self.send(method, path, None, {}) as response:
            return json.loads(response.read())

    def chat(self, messages: Sequence[Mapping[str, Any]], *, agent: str | None = None, **parameters: Any) -> Reply:
        """Stream a greedy answer to its end; `parameters` may include `rekindle`."""
        options = {"return_ids": True, **parameters.pop("rekindle", {})}
        body = {"messages": messages, "temperature": 0, "stream": True, "rekindle": options, **parameters}
        started = time.perf_counter()
        first, texts, report = None, [], None
        with self.send("POST", "/v1/chat/completions", body, {"X-Agent-ID": agent} if agent else {}) as response:
            for _, chunk in events(response):
                if chunk is None:
                    continue
                if "error" in chunk:
                    raise RequestFailed(chunk["error"]["message"])
                first = first or time.perf_counter() - started
                texts.append(chunk["choices"][0]["delta"].get("content", ""))
                report = chunk.get("rekindle")
        if report is None:
            raise RequestFailed("the stream ended without its last chunk")
        return Reply("".join(texts), report.pop("prompt_ids"), report.pop("completion_ids"), report, first or 0.0)

    @contextmanager
    def send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send a request and yield the response, for the caller to read; RequestFailed on an error or a broken one."""
        try:
            content = None if body is None else json.dumps(body)
            with self._http.stream(method, path, content=content, headers=headers) as response:
                if response.status_code != 200:
                    problem = response.read().decode(errors="replace")
                    raise RequestFailed(f"{method} {path}: {response.status_code} {problem}")
                yield response
        except httpx.HTTPError as error:
            raise RequestFailed(f"{method} {path}: {error}") from error


REFUSED = (2, 3, 4)  # exit codes of a command that the user must correct: see cli/border


class Running(Protocol):
    """What is asked of a process: subprocess.Popen does."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def popen(command: Sequence[str], log: BinaryIO, environment: Mapping[str, str]) -> Running:
    """Run a command that writes to a log."""
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


class ServerProcess:
    """`rekindle serve` as a child process; a context manager that always ends it.

    `server` is its address (port 0: any free one) and key; `flags` and `variables` are the other settings, the
    variables by their flat names. `module` is run in place of the command line, with the same flags, by `run`.
    """

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        log: Path,
        server: ServerSettings | None = None,
        variables: Mapping[str, str] | None = None,
        module: str = "rekindle.cli",
        run: Callable[[Sequence[str], BinaryIO, Mapping[str, str]], Running] = popen,
    ) -> None:
        self._server = server or ServerSettings(port=0)
        self._log = log
        self.port = self._server.port or free_port(self._server.host)
        command = [sys.executable, "-m", module, "serve", *flags]
        with log.open("ab") as sink:
            self._log_begin = sink.tell()  # what comes before was written by earlier servers
            self._process = run(command, sink, self._environment(variables or {}))

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        given = {**variables, "host": self._server.host, "port": str(self.port), "open": str(self._server.open).lower()}
        for name in ("api_key", "served_model_name"):
            value = getattr(self._server, name)
            if value is not None:
                given[name] = value
        return own | {ENV_PREFIX + name.upper(): value for name, value in given.items()}

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self) -> Client:
        """Wait until the server answers, and return a client.

        ConfigError with what it refused, if it did; RekindleError with the end of its log if it did not start.
        """
        client = Client(self.port, host=self._server.host, api_key=self._server.api_key)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client.json("GET", "/health/ready")
                return client
            except RequestFailed:
                time.sleep(0.05)
        if self._process.poll() in REFUSED:
            raise ConfigError(self.log_tail(1).removeprefix("rekindle: "))
        raise RekindleError(f"the server did not start:\n{self.log_tail()}")

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of its log."""
        written = self._log.read_bytes()[self._log_begin :].decode(errors="replace")
        return "\n".join(written.splitlines()[-lines:])

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait_end()

    def wait_end(self) -> int:
        """Wait until the process ends, and return its exit code."""
        return self._process.wait(timeout=60)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
