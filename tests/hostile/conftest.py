"""A server process that is treated badly: its own child, so that what it holds can be counted from outside.

Whatever a test sends, the server answers with something below 500 (or 503), lives on, and holds no more than before.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.forks import ForkedServer

KEYS = {"left": "key-of-the-left", "right": "key-of-the-right"}
ADMIN = "key-of-the-admin"
CONTEXT = 512
SETTLE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """Status, headers in lower case, and the body as it came."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Target:
    """The running server, and what can be seen of its process."""

    port: int
    process: psutil.Process
    store: Path

    def send(
        self, method: str, path: str, body: Any = None, *, key: str | None = KEYS["left"], **headers: str
    ) -> Answer:
        """One request over its own connection; `body` as bytes, or anything JSON can spell."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["Authorization"] = f"Bearer {key}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body=data, headers=named)
            response = connection.getresponse()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()
        assert answer.status < 500 or answer.status == 503, f"{method} {path}: {answer.status} {answer.body[:500]!r}"
        return answer

    def chat(
        self, said: list[dict[str, Any]], *, key: str = KEYS["left"], agent: str | None = None, **more: Any
    ) -> Any:
        """The JSON of a greedy answer that must succeed."""
        body = {"messages": said, "temperature": 0, "max_tokens": 4, **more}
        headers = {} if agent is None else {"X_Agent_ID": agent}
        answer = self.send("POST", "/v1/chat/completions", body, key=key, **headers)
        assert answer.status == 200, answer.body
        return answer.json

    def stats(self) -> dict[str, Any]:
        """/v1/stats, as the admin."""
        answer = self.send("GET", "/v1/stats", key=ADMIN)
        assert answer.status == 200, answer.body
        found: dict[str, Any] = answer.json
        return found

    def settled(self) -> dict[str, Any]:
        """Statistics once nothing runs or waits any more."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            stats = self.stats()
            if not stats["num_running"] and not stats["num_waiting"] and not stats["num_held_blocks"]:
                return stats
            time.sleep(0.05)
        raise AssertionError(f"requests did not end: {stats}")

    def answers(self) -> bool:
        """Whether a new connection is let in, given a moment: all that came before it have been accepted then."""
        deadline = time.monotonic() + SETTLE_S
        while (status := self.send("GET", "/v1/agents").status) == 503 and time.monotonic() < deadline:
            time.sleep(0.05)
        return status == 200

    def num_open(self, at_most: float = math.inf) -> int:
        """Descriptors of the server beside its store's files, given a moment to come down to `at_most`."""
        deadline = time.monotonic() + SETTLE_S
        while (count := self.process.num_fds() - self.num_files()) > at_most and time.monotonic() < deadline:
            time.sleep(0.05)
        return count

    def num_files(self) -> int:
        """Descriptors of the store's files: as many as ever were read at once stay open."""
        return sum(self.store in Path(file.path).parents for file in self.process.open_files())


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("hostile")
    store, log = directory / "store", directory / "log"
    flags = ["--store", str(store), "--threads", "1", "--hot-bytes", "16MiB", "--disk-bytes", "24MiB"]
    variables = {
        "api_keys": ",".join(f"{name}={key}" for name, key in KEYS.items()),
        "admin_key": ADMIN,
        "max_context": str(CONTEXT),
        "request_timeout_s": "20",
        "debug": "1",  # the engine checks itself whenever it is idle
    }
    with ForkedServer(flags, log=log, variables=variables) as server:
        server.wait_ready()
        found = Target(server.port, psutil.Process(server.pid), store)
        yield found
        assert found.process.is_running(), server.log_tail()
        found.settled()
        assert server.stop() == 0, server.log_tail(60)
    text = log.read_text()
    assert "Traceback" not in text, text[text.index("Traceback") - 500 :][:4000]
