"""Agents as files over HTTP: out of one server, into another, and nothing that a server does not want."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rekindle import Engine
from rekindle.config import ServerSettings, Settings
from rekindle.store.sealed_file import sealed
from tests.proofs import proved
from tests.server.conftest import Served, serving
from tests.store.confined import limit_files

SAID = "The brass bell of the harbour hangs above the third door, and it rings twice at noon. " * 5


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two tenants and a store of its own; no body may be larger than 4 KiB."""
    flags = {"store": tmp_path_factory.mktemp("other"), "threads": 1, "hot_bytes": "64MiB", "disk_bytes": "64MiB"}
    server = ServerSettings(api_keys={"east": "l", "west": "r"}, admin_key="a", max_body_bytes=4096)
    with proved(Engine(Settings.load(flags))) as engine, serving(engine, server) as running:
        yield running


@pytest.fixture(scope="module")
def data(served: Served) -> bytes:
    served.chat(SAID, agent="ada")
    answer = served.send("GET", "/v1/agents/ada/export")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/vnd.rekindle.agent")
    return answer.body


def test_an_agent_goes_from_one_server_to_another(served: Served, other: Served, data: bytes) -> None:
    assert len(data) > 4 * 4096
    answer = other.send("POST", "/v1/agents/b%2Fo/import", data, key="l")
    assert answer.status == 200, answer.body
    was, came = served.send("GET", "/v1/agents/ada").json, answer.json
    assert (came["id"], came["namespace"], came["without_kv"]) == ("b/o", "east", None)
    assert came["kv_tokens"] == came["num_tokens"] == came["saved_tokens"] == was["num_tokens"]
    assert other.send("GET", "/v1/agents", key="r").json["data"] == [], "it is of the namespace that imported it"
    here = served.chat(SAID, agent="ada").json
    there = other.chat(SAID, agent="b%2Fo", key="l").json
    assert there["choices"] == here["choices"]
    assert there["rekindle"]["reused_tokens"] == here["rekindle"]["reused_tokens"]
    assert there["rekindle"]["warm_tokens"] > 0 and here["rekindle"]["warm_tokens"] == 0
    assert other.send("POST", "/v1/agents/b%2Fo/purge", key="l").json["slots_freed"] > 0
    stats = other.engine.stats().store
    assert stats is not None and stats["num_blocks"] == 0


def test_texts_alone_if_that_is_asked_for(other: Served, data: bytes) -> None:
    came = other.send("POST", "/v1/agents/texts/import?kv=off", data, key="l").json
    assert (came["kv_tokens"], came["without_kv"]) == (0, "it was left out, as asked")
    said = other.chat(SAID, agent="texts", key="l").json["rekindle"]
    assert said["reused_tokens"] == 0 and said["computed_tokens"] > 100
    assert other.send("POST", "/v1/agents/texts/import?kv=some", data, key="l").status == 400


def test_what_is_refused_changes_nothing(served: Served, other: Served, data: bytes) -> None:
    assert other.engine.flush()
    before = [other.send("GET", "/v1/agents?namespace=*", key="a").json["data"], other.engine.stats().store]
    hurt = data[: len(data) // 2] + b"\0" + data[len(data) // 2 + 1 :]
    for body, why in (
        (hurt, "nothing has changed: it is damaged: its digest differs"),
        (data[:-1], "nothing has changed: it ends too early"),
        (b"{}", "nothing has changed: it ends too early"),
        (b"x" * 100, "nothing has changed: this is no agent's file"),
        (
            b"".join(sealed([data], b"brass")),
            "it is encrypted, so import it by `rekindle agents import` with its passphrase",
        ),
    ):
        answer = other.send("POST", "/v1/agents/new/import", body, key="r")
        assert (answer.status, answer.error["param"]) == (400, "file") and why in answer.error["message"]
    for path, status in (("a%00", 400), ("new/import", 404)):
        assert other.send("POST", f"/v1/agents/{path}/import", data[:2000], key="r").status == status
    assert other.send("POST", "/v1/agents/new/import", data, content_encoding="gzip", key="r").status == 415
    assert other.send("POST", "/v1/agents/new/import", b"").status == 401
    assert other.send("GET", "/v1/agents/new/export", key="r").status == 404
    assert [other.send("GET", "/v1/agents?namespace=*", key="a").json["data"], other.engine.stats().store] == before
    taken = served.send("POST", "/v1/agents/ada/import", data)
    assert taken.status == 400 and "agent 'ada' has a memory already" in taken.error["message"]
    assert list(Path(other.engine.settings.store.directory()).glob("tmp*")) == []


def test_a_disk_that_is_full_is_said(other: Served, data: bytes) -> None:
    """Also where only the last bytes of a file have no room."""
    assert other.engine.flush()
    limit_files(4096)
    try:
        answers = [other.send("POST", "/v1/agents/full/import", data[:num], key="r") for num in (5000, len(data))]
    finally:
        limit_files(None)
    for answer in answers:
        assert answer.status == 503 and "the file cannot be taken, and nothing" in answer.error["message"], answer.body
    assert other.send("POST", "/v1/agents/full/import", data, key="r").status == 200


def test_a_tenant_has_one_upload_of_its_part_of_the_disk(other: Served, data: bytes) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", other.port, timeout=60)) as slow:
        slow.putrequest("POST", "/v1/agents/slow/import")
        slow.putheader("Authorization", "Bearer r")
        slow.putheader("Content-Length", str(len(data)))
        slow.putheader("Expect", "100-continue")
        slow.endheaders()
        assert slow.sock.recv(100).startswith(b"HTTP/1.1 100 "), "the server reads this body: the upload is under way"
        slow.send(data[:1000])
        assert other.send("POST", "/v1/agents/second/import", b"x", key="r").status == 409
        assert other.send("POST", "/v1/agents/third/import", data, key="l").status == 200, "the other tenant's own"
        slow.send(data[1000:])
        assert slow.getresponse().status == 200
    answer = other.send("POST", "/v1/agents/second/import", b"x" * (22 << 20), key="r")
    assert answer.status == 413 and "the file is larger than 21 MiB" in answer.error["message"]
