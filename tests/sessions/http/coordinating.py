"""Helps tests of sessions over HTTP: bodies, calls, and streams read event by event."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from rekindle_sessions.http.running import Sessions
from rekindle_sessions.log.records import SessionRecords
from tests.server.conftest import Answer, Served

SESSIONS = "/v1/coordination/sessions"
SHORT = {"max_tokens": 6, "temperature": 0}
NAMES = ("Ada", "Bo", "Cy")
Event = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Session:
    """One session of a served application, called with one key."""

    served: Served
    id: str
    key: str | None = None

    def send(self, method: str, path: str = "", body: Any = None) -> Answer:
        return self.served.send(method, f"{SESSIONS}/{self.id}{path}", body, key=self.key)

    def get(self, path: str = "") -> Any:
        answer = self.send("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.send("POST", path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def texts(self, query: str = "") -> list[str]:
        """What was said."""
        return [each["text"] for each in self.get(f"/messages{query}")["data"]]

    @contextmanager
    def stream(self, method: str, path: str, body: Any = None) -> Iterator[Iterator[Event]]:
        """Events as they come; leaving early hangs up."""
        data = None if body is None else json.dumps(body)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=60)) as connection:
            connection.request(method, f"{SESSIONS}/{self.id}{path}", body=data, headers=headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.getheader("content-type", "").startswith("text/event-stream")
            yield events(response)

    def run(self, path: str, body: Any = None) -> list[Event]:
        """All events of a stream."""
        with self.stream("POST", f"{path}/stream", body) as told:
            return list(told)


def records_of(served: Served) -> SessionRecords:
    """The open file of sessions."""
    (extension,) = served.app.extensions
    assert isinstance(extension.state, Sessions) and extension.state.records is not None
    return extension.state.records


def events(lines: http.client.HTTPResponse) -> Iterator[Event]:
    """Name and data of each event; comments are passed over."""
    kind = ""
    for raw in lines:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def create(served: Served, *names: str, key: str | None = None, **fields: Any) -> Session:
    """A session of agents with short turns."""
    body = {"agents": [{"name": name} for name in names or NAMES], "sampling": SHORT} | fields
    answer = served.send("POST", SESSIONS, body, key=key)
    assert answer.status == 200, answer.body
    return Session(served, answer.json["id"], key)
