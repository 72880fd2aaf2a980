"""What one tenant keeps takes no room from another: sessions, responses, pins, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Engine
from rekindle.config import MiB, ServerSettings, Settings
from rekindle.server.gate.limits import MEMORY_BYTES, kept_bytes
from rekindle.server.responses.stored import MAX_BYTES
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.sessions.http.coordinating import SESSIONS, Session

TENANTS = ServerSettings(api_keys={"a": "key-a", "b": "key-b"})  # and the namespace "default"
SESSION_BYTES = MiB // 3  # of each


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = {"store": tmp_path_factory.mktemp("store"), "threads": 1, "hot_bytes": "64MiB", "disk_bytes": "8MiB"}
    more = {"api_keys": dict(TENANTS.api_keys)}
    with proved(Engine(Settings.load({**flags, **more}))) as engine:
        with serving(engine, TENANTS) as running:
            yield running
        engine.check()


LONG = "The copper key is in the warehouse. " * 389  # 14,004 bytes, which fit the context


def create(served: Served, key: str, persona: str) -> Any:
    body = {"agents": [{"name": "Ada", "persona": persona}, {"name": "Bo", "agent": f"bo-{key}"}]}
    return served.send("POST", SESSIONS, body, key=key)


def refused(answer: Any) -> str:
    assert answer.status == 400 and answer.error["code"] == "quota_exceeded", answer.body
    message: str = answer.error["message"]
    return message


def test_sessions_of_a_namespace_have_so_many_bytes_and_others_have_theirs(served: Served) -> None:
    made = []
    while (answer := create(served, "key-a", LONG)).status == 200:
        made.append(Session(served, answer.json["id"], "key-a"))
    assert len(made) in range(20, 26)
    message = refused(answer)
    assert f"namespace 'a' has {len(made)} sessions of" in message and "it may have 0.3 MB: delete some" in message
    assert "'b'" not in message
    other = create(served, "key-b", LONG)
    assert other.status == 200, "another tenant has its own room"

    first = made[0]
    assert first.send("POST", "/messages", {"text": LONG}).status == 400
    assert first.send("POST", "/messages", {"text": "A word more."}).status == 200
    while (answer := first.send("POST", "/messages", {"text": "z" * 700})).status == 200:
        pass
    refused(answer)
    assert len(first.get("/messages")["data"]) > 1, "what is there can be read"
    fork = first.send("POST", "/agents/Ada/fork", {"target": "Cleo", "persona": "z" * 2_000})
    refused(fork)
    assert Session(served, other.json["id"], "key-b").send("POST", "/messages", {"text": "Hi."}).status == 200

    assert made[-1].send("DELETE", "").status == 200
    assert first.send("POST", "/messages", {"text": "z" * 700}).status == 200
    assert create(served, "key-a", "short").status == 200


def test_what_is_kept_lies_within_the_disk_budget(served: Served, tmp_path: Path) -> None:
    stats = served.engine.stats().store
    assert stats is not None and stats["disk_bytes"] == 8 * MiB
    assert kept_bytes(served.engine, TENANTS) == SESSION_BYTES
    assert kept_bytes(served.engine, ServerSettings()) == MiB


def test_without_a_disk_they_have_a_part_of_memory() -> None:
    with Engine(Settings.load({"store": "off", "threads": 1, "hot_bytes": "16MiB"})) as engine:
        assert kept_bytes(engine, TENANTS) == MEMORY_BYTES // 3 <= MAX_BYTES


def test_a_pin_beyond_the_tenants_part_is_refused_and_others_can_pin(served: Served) -> None:
    answers = []
    for number in range(30):
        agent = f"a{number}"
        assert served.chat(f"Remember what number {number} says. " * 40, key="key-a", agent=agent).status == 200
        answers.append(served.send("POST", f"/v1/agents/{agent}/pin", key="key-a"))
        if answers[-1].status != 200:
            break
    assert "pinned agents of namespace 'a' may have" in refused(answers[-1]) and len(answers) > 1
    assert served.chat("Remember me. ", key="key-b", agent="mine").status == 200
    assert served.send("POST", "/v1/agents/mine/pin", key="key-b").status == 200
    assert served.send("DELETE", "/v1/agents/a0/pin", key="key-a").status == 200
    assert served.send("POST", f"/v1/agents/a{len(answers) - 1}/pin", key="key-a").status == 200
