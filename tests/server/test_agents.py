"""What can be done to an agent over HTTP."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from rekindle.config import ServerSettings
from tests.server.conftest import Served, serving

SAID = "A brass lamp stands on the third shelf of the pantry. " * 4


@pytest.mark.parametrize(
    "agent", ["why", "offload", "a/why", "...", "%2e", "a b?c#d", "\U0001f468\U0001f469", "x" * 256]
)
def test_an_id_is_a_name_and_no_path(served: Served, agent: str) -> None:
    spelled = quote(agent, safe="")
    served.chat(SAID, agent=spelled)
    assert served.send("GET", f"/v1/agents/{spelled}").json["id"] == agent
    assert served.send("GET", f"/v1/agents/{spelled}/why").json["id"] == agent
    assert served.send("DELETE", f"/v1/agents/{spelled}").status == 200
    assert served.send("GET", f"/v1/agents/{spelled}").status == 404


@pytest.mark.parametrize("raw", ["%00", "%FF", "%ED%A0%80", "x" * 300, "a%0D%0Ab"])
def test_what_is_no_id_is_a_400(served: Served, raw: str) -> None:
    for method, path in (("GET", ""), ("GET", "/why"), ("POST", "/offload"), ("POST", "/purge"), ("DELETE", "")):
        assert served.send(method, f"/v1/agents/{raw}{path}").error["param"] == "id"


def test_pins(served: Served) -> None:
    served.chat(SAID, agent="pinned")
    assert served.send("GET", "/v1/agents/pinned").json["pinned"] is False
    for body in (None, {}, {"ttl_s": None}):
        pinned = served.send("POST", "/v1/agents/pinned/pin", body).json
        assert (pinned["pinned"], pinned["pinned_until"]) == (True, None)
    until = served.send("POST", "/v1/agents/pinned/pin", {"ttl_s": 3600}).json["pinned_until"]
    assert until > served.send("GET", "/v1/agents/pinned").json["last_use"]
    assert served.send("DELETE", "/v1/agents/pinned/pin").json["pinned"] is False
    for bad in ({"ttl_s": 0}, {"ttl_s": -1}, {"ttl_s": "long"}, {"ttl": 1}, [], "x"):
        assert served.send("POST", "/v1/agents/pinned/pin", bad).status == 400, bad
    assert served.send("POST", "/v1/agents/pinned/pin", b'{"ttl_s": NaN}').status == 400
    assert served.send("POST", "/v1/agents/nobody/pin").status == 404


def test_forks_and_rewinds(served: Served) -> None:
    served.chat(SAID, agent="trunk")
    fork = served.send("POST", "/v1/agents/trunk/fork", {"target": "the twig/1"})
    assert (fork.status, fork.json["id"]) == (200, "the twig/1")
    assert served.chat(SAID, agent=quote("the twig/1", safe="")).json["rekindle"]["outcome"] == "exact"
    back = served.send("POST", "/v1/agents/the%20twig%2F1/rewind", {"turns": 1})
    assert (back.status, back.json["id"]) == (200, "the twig/1")
    assert back.json["num_tokens"] < fork.json["num_tokens"]
    for path, body in (("fork", {}), ("fork", {"target": "a\x00"}), ("fork", {"target": ""}), ("rewind", {"turns": 0})):
        assert served.send("POST", f"/v1/agents/trunk/{path}", body).status == 400, (path, body)
    assert served.send("POST", "/v1/agents/nobody/fork", {"target": "x"}).status == 404
    assert served.send("POST", "/v1/agents/nobody/rewind", {"turns": 1}).status == 404


def test_purging_says_what_it_did(served: Served) -> None:
    text = "A word that nobody else knows is heliotrope. " * 6
    served.chat(text, agent="gone")
    assert served.engine.flush()
    purged = served.send("POST", "/v1/agents/gone/purge").json
    assert purged["bytes_zeroed"] > 0
    assert {"slots_freed", "blocks_shared", "hot_blocks_zeroed"} <= set(purged)
    assert served.send("POST", "/v1/agents/gone/purge").status == 404
    assert served.chat(text, agent="gone").json["rekindle"]["outcome"] != "exact"
    assert len(served.send("GET", "/v1/agents/gone/why").json["data"]) == 1


def test_why_numbers_requests_of_the_own_tenant(served: Served) -> None:
    with serving(served.engine, ServerSettings(api_keys={"east": "l", "west": "r"})) as running:
        for _ in range(3):
            running.chat(SAID, key="l", agent="busy")
        answer = running.chat(SAID, key="r", agent="curious")
        (entry,) = running.send("GET", "/v1/agents/curious/why", key="r").json["data"]
    assert (entry["request"], entry["request_id"]) == (1, answer.headers["x-request-id"])


def test_purging_says_what_it_left(served: Served) -> None:
    served.chat(SAID, agent="pia")
    body = {"input": SAID, "max_output_tokens": 2}
    kept = served.send("POST", "/v1/responses", body, x_agent_id="pia").json["id"]
    plan = {"agents": [{"name": "Pia", "agent": "pia"}, {"name": "Bo"}]}
    session = served.send("POST", "/v1/coordination/sessions", plan).json["id"]
    purged = served.send("POST", "/v1/agents/pia/purge").json
    assert (purged["responses_deleted"], purged["sessions"]) == (1, [session])
    assert served.send("GET", f"/v1/responses/{kept}").status == 404
    assert served.send("DELETE", f"/v1/coordination/sessions/{session}").status == 200


def test_why_tells_the_last_requests(served: Served) -> None:
    for number in range(10):
        served.chat(f"{SAID} Number {number}.", agent="asked")
    refused = served.chat(SAID, agent="asked", temperature=-1)
    assert refused.status == 400
    why = served.send("GET", "/v1/agents/asked/why").json
    failed, *entries = why["data"]
    assert failed["error"]["message"] == refused.error["message"]
    assert len(entries) == 7
    assert [entry["request"] for entry in entries] == sorted((entry["request"] for entry in entries), reverse=True)
    newest = entries[0]
    assert newest["outcome"] == "diverge"
    assert newest["prompt_tokens"] == newest["reused_tokens"] + newest["computed_tokens"]
    assert newest["explanation"]["sent"].startswith("Number 9") or "Number 9" in newest["explanation"]["sent"]
    assert newest["finish_reason"] in ("stop", "length")
    assert newest["timings"]["first_token_ms"] > 0
    assert served.send("GET", "/v1/agents/nobody/why").status == 404


def test_why_also_tells_of_an_agent_that_remembers_nothing(served: Served) -> None:
    assert served.chat(SAID, agent="hapless", temperature=-1).status == 400
    assert served.send("GET", "/v1/agents/hapless").status == 404
    (entry,) = served.send("GET", "/v1/agents/hapless/why").json["data"]
    assert entry["error"]["param"] == "temperature"
