"""An agent's id: any UTF-8 of 1 to 256 bytes without control characters, kept apart from every other."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rekindle.server.agents import agent_of, decode_agent_id
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
    assert agent_of(Headers({"x-session-id": "s", "x-agent-id": "a%2Fb"})) == "a/b"
    assert agent_of(Headers({"x-session-id": "s"})) == "s"
    assert agent_of(Headers({})) is None
    with pytest.raises(HttpError):
        agent_of(Headers({"x-agent-id": ""}))
