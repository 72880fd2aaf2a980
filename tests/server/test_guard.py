"""Who may come in: hosts, origins, keys."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from rekindle.config import ServerSettings
from rekindle.server.guard import Guard


async def nothing(*_: object) -> None:
    """The application behind the guard."""


def status(settings: ServerSettings, path: str = "/v1/models", **headers: str) -> int:
    problem = Guard(nothing, settings=settings).problem(path, Headers(headers))
    return 200 if problem is None else problem.status


LOCAL = ServerSettings()
OPEN = ServerSettings(host="0.0.0.0", open=True)
KEYED = ServerSettings(host="0.0.0.0", api_key="secret")
KEYED_LOCAL = ServerSettings(api_key="secret")


@pytest.mark.parametrize("host", ["127.0.0.1:7354", "localhost", "localhost:80", "[::1]:7354", "LOCALHOST:1"])
def test_loopback_names_are_ours(host: str) -> None:
    assert status(LOCAL, host=host) == 200


@pytest.mark.parametrize("host", ["evil.example", "10.0.0.1:7354", "localhost.evil.example", "", "127.0.0.1.nip.io"])
def test_rebound_names_are_refused(host: str) -> None:
    assert status(LOCAL, host=host) == 403


def test_open_servers_answer_to_addresses_but_not_to_foreign_names() -> None:
    assert status(OPEN, host="10.0.0.1:7354") == 200
    assert status(OPEN, host="localhost") == 200
    assert status(OPEN, host="evil.example") == 403


def test_on_loopback_a_key_opens_no_other_name() -> None:
    assert status(KEYED_LOCAL, host="evil.example", authorization="Bearer secret") == 403
    assert status(KEYED_LOCAL, host="localhost", authorization="Bearer secret") == 200
    assert status(KEYED_LOCAL, "/health/live", host="evil.example") == 403


def test_elsewhere_with_a_key_any_name_will_do() -> None:
    assert status(KEYED, host="llm.example", authorization="Bearer secret") == 200
    assert status(KEYED, host="llm.example", **{"x-api-key": "secret"}) == 200


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic secret", "Bearer secret2", "Bearer sécret"])
def test_a_wrong_key_is_401(given: str) -> None:
    assert status(KEYED, host="llm.example", authorization=given) == 401


def test_health_needs_no_key() -> None:
    assert status(KEYED, "/health/live", host="llm.example") == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
def test_foreign_pages_are_refused(origin: str) -> None:
    assert status(LOCAL, host="localhost:7354", origin=origin) == 403


def test_our_own_page_is_served() -> None:
    assert status(LOCAL, host="localhost:7354", origin="http://localhost:7354") == 200
