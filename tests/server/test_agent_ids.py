"""An agent's id: any UTF-8 of 1 to 256 bytes without control characters, kept apart from every other."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rekindle.server.caller import check_agent_id, decode_agent_id, named_by
from rekindle.server.errors import HttpError

ids = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=64)


@given(ids)
def test_every_id_survives_its_spelling(agent: str) -> None:
    assert decode_agent_id(quote(agent, safe="").encode(), where="id") == agent


def test_longest() -> None:
    assert decode_agent_id(b"a" * 256, where="id") == "a" * 256
    assert decode_agent_id("é".encode() * 128, where="id") == "é" * 128


@pytest.mark.parametrize("raw", [b"", b"a" * 257, b"%00", b"a%0Ab", b"%7F", b"%C2%85", b"%ff", b"%ED%A0%80"])
def test_what_is_no_id_is_refused(raw: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        decode_agent_id(raw, where="x-agent-id")
    assert caught.value.problem.status == 400
    assert caught.value.problem.param == "x-agent-id"


def test_headers_name_the_agent_in_order() -> None:
    assert named_by(Headers({"x-session-id": "s", "x-agent-id": "a%2Fb"}))[0] == "a/b"
    assert named_by(Headers({"x-session-id": "s"}))[0] == "s"
    assert named_by(Headers({})) == (None, {})
    with pytest.raises(HttpError):
        named_by(Headers({"x-agent-id": ""}))


@pytest.mark.parametrize(
    ("headers", "agent", "named"),
    [
        ({"x-claude-code-session-id": "s"}, "s", ["x-claude-code-session-id"]),
        (
            {"x-claude-code-agent-id": "a", "x-claude-code-session-id": "s"},
            "s/a",
            ["x-claude-code-session-id", "x-claude-code-agent-id"],
        ),
        ({"x-claude-code-agent-id": "a"}, None, []),
        ({"x-session-affinity": "s", "x-openwebui-chat-id": "o"}, "s", ["x-session-affinity"]),
        ({"session_id": "s"}, "s", ["session_id"]),
        ({"session-id": "s"}, "s", ["session-id"]),
        ({"x-openwebui-chat-id": "o"}, "o", ["x-openwebui-chat-id"]),
        ({"x-openwebui-chat-id": "o", "x-session-id": "mine"}, "mine", ["x-session-id"]),
        ({"x-openwebui-chat-id": ""}, None, []),
        ({"user": "u", "x-request-id": "r"}, None, []),
    ],
)
def test_headers_of_known_clients_name_the_agent(headers: dict[str, str], agent: str | None, named: list[str]) -> None:
    found, by = named_by(Headers(headers))
    assert (found, list(by)) == (agent, named)


def test_an_id_in_json_obeys_the_same_rule() -> None:
    for good in ("a", "../../etc/passwd", "\U0001f600", "100%"):
        assert check_agent_id(good, where="target") == good
    for bad in ("", "x" * 257, "a\x00b", "\ud800"):
        with pytest.raises(HttpError):
            check_agent_id(bad, where="target")
