"""Who calls: the namespace its key opens, and the agent it names.

The guard judges the key and leaves an `Access` in the request's scope; the headers that clients send name the agent.
Ids are percent-encoded in headers and URLs. They steer placement, never access.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Query, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from rekindle.agent_ids import check_agent_id
from rekindle.errors import BadRequest
from rekindle.server.errors import needs_admin
from rekindle.server.lines import line_of

ALL = "*"  # every namespace, where an admin may ask for that


@dataclass(frozen=True, slots=True)
class _Family:
    """Headers of one make. `own` names an agent, or a session whose sub-agents `sub` tells apart; `parent` names the
    one that a sub-agent was started by, as `own` and `sub` do."""

    own: str
    sub: str | None = None
    parent: str | None = None

    def named_in(self, headers: Headers) -> dict[str, str]:
        """Those of them that a request has; empty ones name nobody."""
        names = (self.own, self.sub, self.parent)
        return {name: value for name in names if name is not None and (value := headers.get(name))}


OWN_FAMILIES = (
    _Family("x-agent-id", parent="x-parent-agent-id"),
    _Family("x-session-id", parent="x-parent-session-id"),
)
# What known clients send of their own accord, the surest first; docs/clients.md says which sends what.
CLIENT_FAMILIES = (
    _Family("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    _Family("x-opencode-session", parent="x-parent-session-id"),
    _Family("x-session-affinity", parent="x-parent-session-id"),
    _Family("session-id", "thread-id", "x-codex-parent-thread-id"),
    _Family("session_id", "thread_id", "x-codex-parent-thread-id"),
    _Family("x-openwebui-chat-id"),
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
    """Who makes one request. `agent` None: unnamed, found by its text alone; `parent`: whose memory a new agent goes on
    from; `headers` are those that named them."""

    namespace: str = "default"
    agent: str | None = None
    is_admin: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Whom the headers of a request name, and which of them do."""

    agent: str | None = None
    parent: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def grant(scope: Scope, access: Access) -> None:
    """Note what the key of a request opens, for its routes and for its line in the log."""
    line = line_of(scope)
    if line is not None and access.has_key:
        line.tenant = access.namespace
    scope.setdefault("state", {})[_STATE] = access


def access_of(request: Request) -> Access:
    """What the guard granted; a KeyError where none stands before the route."""
    granted: Access = request.scope["state"][_STATE]
    return granted


async def _namespace(
    request: Request,
    namespace: Annotated[str | None, Query(description="another namespace than the key's, for admins")] = None,
) -> str:
    access = access_of(request)
    if namespace is None or namespace == access.namespace:
        return access.namespace
    if not access.is_admin:
        raise needs_admin("another namespace")
    return namespace


Namespace = Annotated[str, Depends(_namespace)]


def caller_of(request: Request) -> Caller:
    """The caller of a request; a 400 that names the header if that holds no id."""
    access = access_of(request)
    names = named_by(request.headers)
    return Caller(access.namespace, names.agent, access.is_admin, names.headers, names.parent)


def unnamed(request: Request) -> Caller:
    """The caller of a request that cannot say who it is."""
    access = access_of(request)
    return Caller(access.namespace, None, access.is_admin)


def named_by(headers: Headers) -> Names:
    """Whom these headers name. Empty ones of other makes name nobody, of ours they are a 400."""
    for family in OWN_FAMILIES:
        value = headers.get(family.own)
        if value is not None:
            given = family.named_in(headers) | {family.own: value}
            ids = {name: decode_agent_id(value.encode("latin-1"), where=name) for name, value in given.items()}
            return _names(ids[family.own], ids.get(family.parent or ""), given)
    for family in CLIENT_FAMILIES:
        given = family.named_in(headers)
        if family.own in given:
            return _of_client(family, given)
    return Names()


def _of_client(family: _Family, given: Mapping[str, str]) -> Names:
    """Session and sub-agent are joined so that no other pair is spelled alike; the session alone is its main agent."""
    parts = {name: _part(decode_agent_id(value.encode("latin-1"), where=name)) for name, value in given.items()}
    session, sub = parts[family.own], parts.get(family.sub or "")
    parent = parts.get(family.parent or "")

    def joined(part: str | None) -> str:
        spelled = session if part in (None, session) else f"{session}/{part}"
        return check_agent_id(spelled, where=family.own)

    agent = joined(sub)
    if family.sub is None:
        return _names(agent, parent, given)
    return _names(agent, joined(parent) if agent != session else None, given)


def _names(agent: str, parent: str | None, given: Mapping[str, str]) -> Names:
    return Names(agent, parent if parent != agent else None, given)


def _part(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def decode_agent_id(raw: bytes, *, where: str) -> str:
    """The id spelled by these percent-encoded bytes; a 400 that says what an id may be."""
    try:
        agent = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{where}: the agent's id is not UTF-8", param=where) from None
    return check_agent_id(agent, where=where)
