"""Who calls: the namespace its key opens, and the agent it names.

The guard judges the key and leaves an `Access` in the request's scope; the headers that clients send name the agent. An
id is any UTF-8 of 1 to 256 bytes without control characters, percent-encoded in headers and URLs. It steers placement,
never access.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from rekindle.server.errors import invalid

MAX_ID_BYTES = 256
OWN_HEADERS = ("x-agent-id", "x-session-id")
# What known clients send of their own accord, the surest first. A header further right tells apart what shares the one
# on its left: the sub-agents of one session.
CLIENT_HEADERS = (
    ("x-claude-code-session-id", "x-claude-code-agent-id"),
    ("x-session-affinity",),
    ("session_id",),
    ("session-id",),
    ("x-openwebui-chat-id",),
)
_STATE = "rekindle_access"


@dataclass(frozen=True, slots=True)
class Access:
    """What a key opens: one namespace, and the routes of the operator or not.

    `has_key` False: only health checks were reached, without the key that all else needs.
    """

    namespace: str = "default"
    is_admin: bool = False
    has_key: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes one request. `agent` None: unnamed, found by its text alone; `headers` are those that named it."""

    namespace: str = "default"
    agent: str | None = None
    is_admin: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


def grant(scope: Scope, access: Access) -> None:
    """Note what the key of a request opens."""
    scope.setdefault("state", {})[_STATE] = access


def access_of(request: Request) -> Access:
    """What the guard granted; a KeyError where none stands before the route."""
    granted: Access = request.scope["state"][_STATE]
    return granted


def caller_of(request: Request) -> Caller:
    """The caller of a request; a 400 that names the header if that holds no id."""
    access = access_of(request)
    agent, headers = named_by(request.headers)
    return Caller(access.namespace, agent, access.is_admin, headers)


def unnamed(request: Request) -> Caller:
    """The caller of a request that cannot say who it is."""
    access = access_of(request)
    return Caller(access.namespace, None, access.is_admin)


def named_by(headers: Headers) -> tuple[str | None, Mapping[str, str]]:
    """The agent these headers name, and those that do; None where none does. Empty ones of other makes name nobody."""
    for name in OWN_HEADERS:
        value = headers.get(name)
        if value is not None:
            return decode_agent_id(value.encode("latin-1"), where=name), {name: value}
    for names in CLIENT_HEADERS:
        given = {name: value for name in names if (value := headers.get(name))}
        if names[0] in given:
            spelled = "/".join(given.values())
            return decode_agent_id(spelled.encode("latin-1"), where=names[0]), given
    return None, {}


def decode_agent_id(raw: bytes, *, where: str) -> str:
    """The id spelled by these percent-encoded bytes; a 400 that says what an id may be."""
    try:
        agent = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise invalid(400, f"{where}: the agent's id is not UTF-8", param=where) from None
    return check_agent_id(agent, where=where)


def check_agent_id(agent: str, *, where: str) -> str:
    """The id itself; a 400 that says what an id may be."""
    try:
        num_bytes = len(agent.encode())
    except UnicodeEncodeError:
        raise invalid(400, f"{where}: the agent's id is not UTF-8", param=where) from None
    if not 1 <= num_bytes <= MAX_ID_BYTES:
        raise invalid(400, f"{where}: an agent's id has 1 to {MAX_ID_BYTES} bytes, not {num_bytes}", param=where)
    if any(unicodedata.category(character) == "Cc" for character in agent):
        raise invalid(400, f"{where}: an agent's id has no control characters", param=where)
    return agent
