"""An agent's id: any UTF-8 of 1 to 256 bytes without control characters, kept apart from every other."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rekindle.agent_ids import check_agent_id, check_new_agent_id
from rekindle.errors import BadRequest
from rekindle.server.gate.caller import Caller, decode_agent_id, named_by

DOTS = (".", "..")
# Of any version of Unicode, so without what is not assigned in some.
seen = st.characters(exclude_categories=("C", "Zl", "Zp", "Zs"), include_characters=" ")
ids = st.text(seen.filter(str.isprintable), min_size=1, max_size=64).filter(lambda agent: agent not in DOTS)
kept = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=64)
UNSEEN = [
    "\u202eada",
    "a\u200bda",
    "a\u2066da",
    "ad\u00ada",
    "ada\ufeff",
    "ada\u2028",
    "ada\u00a0",
    "a\u200dda",
    "\U000e0061da",
]


@given(kept)
def test_every_id_survives_its_spelling(agent: str) -> None:
    assert decode_agent_id(quote(agent, safe="").encode(), where="id") == agent


def test_longest() -> None:
    assert decode_agent_id(b"a" * 256, where="id") == "a" * 256
    assert decode_agent_id("é".encode() * 128, where="id") == "é" * 128


@pytest.mark.parametrize("raw", [b"", b"a" * 257, b"%00", b"a%0Ab", b"%7F", b"%C2%85", b"%ff", b"%ED%A0%80"])
def test_what_is_no_id_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_agent_id(raw, where="x-agent-id")
    assert caught.value.param == "x-agent-id"


def test_headers_name_the_agent_in_order() -> None:
    assert named_by(Headers({"x-session-id": "s", "x-agent-id": "a%2Fb"})).agent == "a/b"
    assert named_by(Headers({"x-session-id": "s"})).agent == "s"
    assert named_by(Headers({})) == Caller()
    with pytest.raises(BadRequest):
        named_by(Headers({"x-agent-id": ""}))


CLAUDE = ("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id")
DYNAMO = ("x-dynamo-session-id", "x-dynamo-parent-session-id")
CODEX = ("session-id", "thread-id", "x-codex-parent-thread-id")


@pytest.mark.parametrize(
    ("headers", "agent", "parent", "named"),
    [
        ({CLAUDE[0]: "s"}, "s", None, CLAUDE[:1]),
        ({CLAUDE[1]: "a", CLAUDE[0]: "s"}, "s/a", "s", CLAUDE[:2]),
        ({CLAUDE[0]: "s", CLAUDE[1]: "b", CLAUDE[2]: "a"}, "s/b", "s/a", CLAUDE),
        ({CLAUDE[1]: "a"}, None, None, ()),
        ({CODEX[0]: "s", CODEX[1]: "s"}, "s", None, CODEX[:2]),
        ({CODEX[0]: "s", CODEX[1]: "t", CODEX[2]: "s"}, "s/t", "s", CODEX),
        ({CODEX[0]: "s", CODEX[1]: "u", CODEX[2]: "t"}, "s/u", "s/t", CODEX),
        ({"session-id": "s"}, "s", None, ("session-id",)),
        ({"session_id": "s"}, "s", None, ("session_id",)),
        ({"session_id": "s", "thread_id": "t"}, "s/t", "s", ("session_id", "thread_id")),
        # opencode, for a provider of its own and for others
        (
            {"x-opencode-session": "s", "x-parent-session-id": "p"},
            "s",
            "p",
            ("x-opencode-session", "x-parent-session-id"),
        ),
        (
            {"x-session-affinity": "s", "x-session-id": "s", "x-parent-session-id": "p"},
            "s",
            "p",
            ("x-session-id", "x-parent-session-id"),
        ),
        ({"x-session-affinity": "s", "x-openwebui-chat-id": "o"}, "s", None, ("x-session-affinity",)),
        ({"x-openwebui-chat-id": "o"}, "o", None, ("x-openwebui-chat-id",)),
        ({"x-openwebui-chat-id": "o", "x-session-id": "mine"}, "mine", None, ("x-session-id",)),
        ({"x-agent-id": "a", "x-parent-agent-id": "b%2Fc"}, "a", "b/c", ("x-agent-id", "x-parent-agent-id")),
        ({"x-agent-id": "a", "x-parent-agent-id": "a"}, "a", None, ("x-agent-id", "x-parent-agent-id")),
        ({"x-dynamo-session-id": "d", "x-claude-code-session-id": "s"}, "d", None, DYNAMO[:1]),
        ({"x-dynamo-session-id": "d%2F1", "x-dynamo-parent-session-id": "p"}, "d%2F1", "p", DYNAMO),
        ({"x-dynamo-session-id": "", "x-claude-code-session-id": "s"}, "s", None, CLAUDE[:1]),
        ({"x-openwebui-chat-id": ""}, None, None, ()),
        ({"user": "u", "x-request-id": "r", "x-parent-agent-id": "p"}, None, None, ()),
    ],
)
def test_headers_of_known_clients_name_the_agent(
    headers: dict[str, str], agent: str | None, parent: str | None, named: tuple[str, ...]
) -> None:
    found = named_by(Headers(headers))
    assert (found.agent, found.parent, tuple(found.headers)) == (agent, parent, named)


@given(ids, ids, ids, ids)
def test_no_two_sub_agents_are_named_alike(session: str, agent: str, other_session: str, other_agent: str) -> None:
    def named(session: str, agent: str) -> str | None:
        given = {CLAUDE[0]: quote(session, safe=""), CLAUDE[1]: quote(agent, safe="")}
        return named_by(Headers(given)).agent

    for one, other in (((session, agent), (other_session, other_agent)), (("a/b", "c"), ("a", "b/c"))):
        if one != other and one[0] != one[1] and other[0] != other[1]:
            assert named(*one) != named(*other)
    assert named_by(Headers({CLAUDE[0]: "s%2Fa"})).agent != named("s", "a")


def test_an_id_in_json_obeys_the_same_rule() -> None:
    for good in ("a", "../../etc/passwd", "\U0001f600", "100%"):
        assert check_agent_id(good, where="target") == good
    for bad in ("", "x" * 257, "a\x00b", "\ud800"):
        with pytest.raises(BadRequest):
            check_agent_id(bad, where="target")


@pytest.mark.parametrize("agent", UNSEEN)
def test_a_new_id_has_only_characters_that_are_seen(agent: str) -> None:
    spelled = quote(agent, safe="")
    for headers in ({"x-agent-id": spelled}, {"x-agent-id": "a", "x-parent-agent-id": spelled}, {CLAUDE[0]: spelled}):
        with pytest.raises(BadRequest, match=r"U\+[0-9A-F]{4,5}: leave it out") as caught:
            named_by(Headers(headers))
        assert caught.value.param == list(headers)[-1]
    with pytest.raises(BadRequest, match="target: an agent's id has no invisible"):
        check_new_agent_id(agent, where="target")
    assert decode_agent_id(spelled.encode(), where="id") == agent, "one of an older store can be read and deleted"


@pytest.mark.parametrize("agent", DOTS)
def test_a_new_id_is_no_step_of_a_path(agent: str) -> None:
    for spelled in (agent, quote(agent).replace(".", "%2E")):
        with pytest.raises(BadRequest, match="browsers take out of a path") as caught:
            named_by(Headers({"x-agent-id": spelled}))
        assert caught.value.param == "x-agent-id"
    with pytest.raises(BadRequest, match="target: an agent's id is not"):
        check_new_agent_id(agent, where="target")
    assert decode_agent_id(b"%2E" * len(agent), where="id") == agent, "one of an older store can be read and deleted"
