"""Two tenants of one server: each sees its own, the operator sees all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving

CANARY = "zanzibar heliotrope"
SECRET = f"Remember that the word is {CANARY}. " * 4
ROUTES = (
    ("GET", "", None),
    ("GET", "/why", None),
    ("POST", "/offload", None),
    ("POST", "/pin", {}),
    ("DELETE", "/pin", None),
    ("POST", "/fork", {"target": "copy"}),
    ("POST", "/rewind", {"turns": 1}),
    ("POST", "/purge", None),
    ("DELETE", "", None),
)


@pytest.fixture(scope="module")
def tenants(served: Served) -> Iterator[Served]:
    settings = ServerSettings(api_keys={"left": "key-l", "right": "key-r"}, admin_key="key-a")
    with serving(served.engine, settings) as running:
        yield running


def test_nothing_of_the_one_reaches_the_other(tenants: Served) -> None:
    first = tenants.chat(SECRET, key="key-l", agent="spy").json
    assert tenants.chat(SECRET, key="key-l", agent="spy").json["rekindle"]["outcome"] == "exact"
    theirs = tenants.chat(SECRET, key="key-r", agent="spy").json
    assert theirs["rekindle"]["outcome"] == "miss"
    assert theirs["rekindle"]["reused_tokens"] == 0
    assert theirs["choices"][0]["message"] == first["choices"][0]["message"]
    near = [tenants.chat("Remember that the word is not known.", key="key-r", agent=name) for name in ("spy2", None)]
    seen = [answer.body for answer in near]
    seen += [tenants.send("GET", path, key="key-r").body for path in ("/v1/agents/spy2/why", "/v1/stats", "/metrics")]
    assert not [body for body in seen if CANARY.encode() in body]


def test_agents_of_the_other_do_not_exist(tenants: Served) -> None:
    tenants.chat(SECRET, key="key-l", agent="only-left")
    for method, path, body in ROUTES:
        answer = tenants.send(method, f"/v1/agents/only-left{path}", body, key="key-r")
        assert answer.status == 404, (method, path, answer.body)
    assert b"only-left" not in tenants.send("GET", "/v1/agents", key="key-r").body
    assert b"only-left" in tenants.send("GET", "/v1/agents", key="key-l").body
    assert tenants.chat(SECRET, key="key-l", agent="only-left").json["rekindle"]["outcome"] == "exact"


def test_purging_ones_own_leaves_the_others(tenants: Served) -> None:
    for key in ("key-l", "key-r"):
        tenants.chat(SECRET, key=key, agent="twin")
    purged = tenants.send("POST", "/v1/agents/twin/purge", key="key-l")
    assert purged.status == 200, purged.body
    assert purged.json["purged"] is True
    assert tenants.send("GET", "/v1/agents/twin", key="key-l").status == 404
    assert tenants.send("GET", "/v1/agents/twin/why", key="key-l").status == 404
    assert tenants.chat(SECRET, key="key-r", agent="twin").json["rekindle"]["outcome"] == "exact"


def test_another_namespace_is_for_admins(tenants: Served) -> None:
    tenants.chat(SECRET, key="key-l", agent="watched")
    for path in ("/v1/agents?namespace=left", "/v1/agents/watched?namespace=left", "/v1/agents?namespace=*"):
        assert tenants.send("GET", path, key="key-r").status == 403
        answer = tenants.send("GET", path, key="key-a")
        assert (answer.status, b"watched" in answer.body) == (200, True), path
    assert tenants.send("GET", "/v1/agents/watched", key="key-a").status == 404
    assert tenants.send("GET", "/v1/agents?namespace=left", key="key-l").status == 200


def test_figures_of_all_are_for_admins(tenants: Served) -> None:
    for path in ("/v1/stats", "/metrics"):
        refused = tenants.send("GET", path, key="key-l")
        assert refused.status == 403
        assert "admin key" in refused.error["message"]
        assert tenants.send("GET", path, key="key-a").status == 200
    assert b"only-left" not in tenants.send("GET", "/metrics", key="key-a").body


def test_without_a_key_there_is_only_health(tenants: Served) -> None:
    for path in ("/v1/agents", "/v1/models", "/metrics", "/version", "/v1/stats"):
        assert tenants.send("GET", path).status == 401
    ready = tenants.send("GET", "/health/ready")
    assert ready.status == 200
    assert ready.json["problems"] == []


def test_one_server_for_one_person_is_open(served: Served) -> None:
    for path in ("/v1/stats", "/metrics", "/v1/agents", "/version"):
        assert served.send("GET", path).status == 200
