"""Who may come in: hosts, origins, keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.datastructures import Headers

from rekindle.config import ServerSettings
from rekindle.server.border import Problem
from rekindle.server.gate.caller import Guard
from rekindle.server.gate.keys import Access, Keys


async def nothing(*_: object) -> None:
    """The application behind the guard."""


def status(settings: ServerSettings, path: str = "/v1/models", **headers: str) -> int:
    judged = Guard(nothing, settings=settings, keys=Keys(settings)).judge(path, Headers(headers))
    return judged.status if isinstance(judged, Problem) else 200


LOCAL = ServerSettings()
OPEN = ServerSettings(host="0.0.0.0", open=True)
KEYED = ServerSettings(host="0.0.0.0", api_key="secret")
KEYED_LOCAL = ServerSettings(api_key="secret")
PUBLIC = ServerSettings(api_key="secret", public_host=("llm.example", "two.example:8443", "[2001:db8::1]"))


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


def test_on_loopback_a_valid_key_opens_any_name_and_nothing_else_does() -> None:
    """A page at a rebound name knows no key; a proxy's clients do, whatever Host it passes on."""
    for host in ("evil.example", "llm.example:8443", ""):
        assert status(KEYED_LOCAL, host=host, authorization="Bearer secret") == 200
        for key in ("", "Bearer wrong", "Bearer "):
            assert status(KEYED_LOCAL, host=host, authorization=key) == 403
        assert status(KEYED_LOCAL, "/", host=host) == status(KEYED_LOCAL, "/health/live", host=host) == 403
    assert status(KEYED_LOCAL, host="localhost", authorization="Bearer secret") == 200
    assert status(ServerSettings(admin_key="a"), host="evil.example", authorization="Bearer other") == 403
    assert status(ServerSettings(admin_key="a"), host="evil.example", authorization="Bearer a") == 200


def test_a_key_does_not_open_foreign_pages() -> None:
    for settings in (KEYED_LOCAL, KEYED, PUBLIC):
        key = {"authorization": "Bearer secret"}
        assert status(settings, host="localhost", origin="https://evil.example", **key) == 403
        assert status(settings, host="localhost", origin="null", **key) == 403


@pytest.mark.parametrize(
    "host", ["llm.example", "LLM.Example.", "llm.example:8443", "two.example:8443", "[2001:db8::1]"]
)
def test_public_names_are_ours(host: str) -> None:
    assert status(PUBLIC, "/", host=host) == status(PUBLIC, "/health/live", host=host) == 200
    assert status(PUBLIC, host=host) == 401
    assert status(LOCAL, "/", host=host) == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "llm.example.evil.example", "two.example", "two.example:1", "a:b", "["]
)
def test_other_names_are_not(host: str) -> None:
    assert status(PUBLIC, "/", host=host) == 403
    assert status(replace(PUBLIC, host="0.0.0.0"), "/", host=host) == 403, "public names are all there are"


def test_pages_of_public_names_are_ours_whatever_host_a_proxy_passes_on() -> None:
    for host in ("llm.example", "llm.example:8443", "127.0.0.1:7354"):
        for origin in ("https://llm.example", "https://llm.example:8443", "https://two.example:8443"):
            assert status(PUBLIC, "/health/live", host=host, origin=origin) == 200
        for origin in ("https://evil.example", "https://two.example", "null", "llm.example", "https://["):
            assert status(PUBLIC, "/health/live", host=host, origin=origin) == 403
    usual = replace(PUBLIC, public_host=("llm.example:443",))
    assert status(usual, "/", host="llm.example", origin="https://llm.example") == 200
    assert status(usual, "/", host="127.0.0.1", origin="http://llm.example") == 403


def test_what_proxies_write_into_headers_decides_nothing() -> None:
    said = {
        "x-forwarded-host": "localhost",
        "forwarded": "host=localhost;for=127.0.0.1",
        "x-forwarded-for": "127.0.0.1",
    }
    assert status(PUBLIC, "/", host="evil.example", **said) == 403
    assert status(PUBLIC, host="llm.example", **said) == 401


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


def access(settings: ServerSettings, key: str | None = None, path: str = "/v1/models") -> Access | None:
    headers = Headers({"host": "localhost", **({"authorization": f"Bearer {key}"} if key is not None else {})})
    judged = Guard(nothing, settings=settings, keys=Keys(settings)).judge(path, headers)
    return None if isinstance(judged, Problem) else judged


def test_a_key_opens_its_namespace_and_no_other() -> None:
    tenants = ServerSettings(api_key="d", api_keys={"left": "l", "right": "r"}, admin_key="a")
    assert access(tenants, "l") == Access("left")
    assert access(tenants, "r") == Access("right")
    assert access(tenants, "d") == Access("default")
    assert access(tenants, "a") == Access("default", is_admin=True)
    for wrong in (None, "", "lr", "L", "l r", "left"):
        assert access(tenants, wrong) is None
    assert access(tenants, None, "/health/ready") == Access(has_key=False)
    assert access(tenants, "l", "/health/ready") == Access("left")


def test_whoever_comes_in_is_admin_where_nothing_separates_tenants() -> None:
    assert access(ServerSettings()) == access(ServerSettings(), "unused") == Access(is_admin=True)
    assert access(ServerSettings(api_key="d"), "d") == Access(is_admin=True)
    assert access(ServerSettings(api_key="d", admin_key="a"), "d") == Access()
    assert access(ServerSettings(admin_key="a")) == access(ServerSettings(admin_key="a"), "unused") == Access()
    assert access(ServerSettings(admin_key="a"), "a") == Access(is_admin=True)
    assert access(ServerSettings(api_keys={"left": "l"}), "l") == Access("left")
