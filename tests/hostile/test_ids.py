"""Agents' ids as an attacker would choose them: they are names, never paths, queries or headers."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest

from tests.hostile.conftest import Target

SAID = [{"role": "user", "content": "Remember that the copper key is in the attic. " * 4}]
GOOD = [
    "../../../../etc/passwd",
    "...",
    "/",
    "a/b/../c",
    "C:\\Windows\\system32",
    "%2e%2e%2f",
    "a b",
    "?limit=1#x",
    "' OR 1=1; DROP TABLE agent; --",
    "{{7*7}}",
    "\u05d9\u05de\u05d9\u05df right to left",
    "family \U0001f468\U0001f469\U0001f467",
    "x" * 256,
    "\u00e9" * 128,
    "why",
    "offload",
    "a/why",
]
BAD = ["", "%00", "a%00b", "x" * 257, "x" * 300, "%C3%A9" * 129, "%ED%A0%80", "%FF", "a%0D%0AX-Evil:%201", "%1B[2J"]
STORE_FILES = re.compile(
    r"secret(\.new)?|(responses|sessions)\.db(-wal|-shm)?|formats/.*|.*\.json"
    r"|[0-9a-f]{64}/(lock|index\.db(-wal|-shm)?|layout\.json|blocks-\d+-\d+\.safetensors)"
)


@pytest.mark.parametrize("agent", GOOD)
def test_a_strange_id_is_an_id_like_any_other(target: Target, agent: str) -> None:
    spelled = quote(agent, safe="")
    first = target.chat(SAID, agent=spelled)
    again = target.chat(SAID, agent=spelled)
    assert again["rekindle"]["outcome"] == "exact"
    assert again["choices"] == first["choices"]
    listed = [entry["id"] for entry in target.send("GET", "/v1/agents").json["data"]]
    assert listed.count(agent) == 1
    assert target.send("GET", f"/v1/agents/{spelled}").json["id"] == agent
    assert target.send("DELETE", f"/v1/agents/{spelled}").status == 200
    assert agent not in [entry["id"] for entry in target.send("GET", "/v1/agents").json["data"]]


@pytest.mark.parametrize("raw", [".", "..", "%2E", "%2e."])
def test_a_step_of_a_path_is_no_new_id(target: Target, raw: str) -> None:
    refused = target.send("POST", "/v1/chat/completions", {"messages": SAID, "max_tokens": 1}, X_Agent_ID=raw)
    assert refused.status == 400 and "take out of a path" in refused.json["error"]["message"]


@pytest.mark.parametrize("raw", ["%E2%80%AEright%20to%20left", "ada%E2%80%8B", "ada%C2%A0"])
def test_a_character_that_is_not_seen_is_in_no_new_id(target: Target, raw: str) -> None:
    body = {"messages": SAID, "max_tokens": 1}
    refused = target.send("POST", "/v1/chat/completions", body, X_Agent_ID=raw)
    assert refused.status == 400 and "invisible characters" in refused.json["error"]["message"]
    assert target.send("POST", f"/v1/agents/{raw}/prefill", {"messages": SAID}).status == 400
    assert target.send("GET", f"/v1/agents/{raw}").status == 404, "an older store may have it, so it can be asked for"
    assert target.send("DELETE", f"/v1/agents/{raw}").status == 404


@pytest.mark.parametrize("raw", BAD)
def test_what_is_no_id_is_a_400_everywhere(target: Target, raw: str) -> None:
    body = {"messages": SAID, "max_tokens": 1}
    assert target.send("POST", "/v1/chat/completions", body, X_Agent_ID=raw).status == 400
    if raw:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/offload"), ("GET", "/why")):
            answer = target.send(method, f"/v1/agents/{raw}{path}")
            assert answer.status == 400, f"{method} {path}: {answer.body!r}"
            assert answer.json["error"]["message"]


def test_no_id_became_a_file(target: Target) -> None:
    target.settled()
    names = [path.relative_to(target.store).as_posix() for path in target.store.rglob("*") if path.is_file()]
    assert names
    assert [name for name in names if not STORE_FILES.fullmatch(name)] == []
