"""The caller of a request: the namespace its API key grants and the agent its headers name.

The guard checks the key and stores an `Access` in the request's scope; headers sent by the client name the agent.
Ids are percent-encoded in headers and URLs. They decide which memory is used, never what may be accessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import Depends, Query, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from rekindle.agent_ids import check_agent_id, check_new_agent_id
from rekindle.errors import BadRequest
from rekindle.server.errors import needs_admin
from rekindle.server.lines import line_of

ALL = "*"  # every namespace, on routes that let an admin request it


@dataclass(frozen=True, slots=True)
class _Family:
    """Names of the headers that one client sends.

    `own` holds an agent, or a session whose sub-agents `sub` distinguishes; `parent` holds the agent that started a
    sub-agent, in the same form.
    """

    own: str
    sub: str | None = None
    parent: str | None = None

    def named_in(self, headers: Headers) -> dict[str, str]:
        """Return the family's headers that the request has, without empty ones."""
        names = (self.own, self.sub, self.parent)
        return {name: value for name in names if name is not None and (value := headers.get(name))}


OWN_FAMILIES = (
    _Family("x-agent-id", parent="x-parent-agent-id"),
    _Family("x-session-id", parent="x-parent-session-id"),
)
# Headers that known clients send by default, most reliable first; docs/clients.md lists them per client.
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
    """What a key grants: one namespace and, if `is_admin`, the operator's routes.

    `has_key` False: the request has no key and may reach only routes that need none, such as health checks.
    """

    namespace: str = "default"
    is_admin: bool = False
    has_key: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of one request.

    `agent` None: unnamed, matched by its text alone; `parent`: the agent whose memory a new agent continues; `headers`:
    those that named them.
    """

    namespace: str = "default"
    agent: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None


def grant(scope: Scope, access: Access) -> None:
    """Record what the request's key grants, for its routes and its log line."""
    line = line_of(scope)
    if line is not None and access.has_key:
        line.tenant = access.namespace
    scope.setdefault("state", {})[_STATE] = access


def access_of(request: Request) -> Access:
    """Return what the guard granted; KeyError if the route has no guard in front of it."""
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
    """Return the caller of a request; a header without a valid id is a 400 that names the header."""
    return replace(named_by(request.headers), namespace=access_of(request).namespace)


def unnamed(request: Request) -> Caller:
    """Return the caller of a request with its agent left unnamed."""
    return Caller(access_of(request).namespace)


def named_by(headers: Headers) -> Caller:
    """Return the caller that these headers name. An empty header of another client is ignored, one of ours is a 400."""
    for family in OWN_FAMILIES:
        value = headers.get(family.own)
        if value is not None:
            given = family.named_in(headers) | {family.own: value}
            ids = {name: _new_id(value, name) for name, value in given.items()}
            return _named(ids[family.own], ids.get(family.parent or ""), given)
    for family in CLIENT_FAMILIES:
        given = family.named_in(headers)
        if family.own in given:
            return _of_client(family, given)
    return Caller()


def _of_client(family: _Family, given: Mapping[str, str]) -> Caller:
    """Join session and sub-agent so that distinct pairs give distinct ids; the session alone is its main agent."""
    parts = {name: _part(_new_id(value, name)) for name, value in given.items()}
    session, sub = parts[family.own], parts.get(family.sub or "")
    parent = parts.get(family.parent or "")

    def joined(part: str | None) -> str:
        agent_id = session if part in (None, session) else f"{session}/{part}"
        return check_agent_id(agent_id, where=family.own)

    agent = joined(sub)
    if family.sub is None:
        return _named(agent, parent, given)
    return _named(agent, joined(parent) if agent != session else None, given)


def _named(agent: str, parent: str | None, given: Mapping[str, str]) -> Caller:
    return Caller(agent=agent, headers=given, parent=parent if parent != agent else None)


def _part(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")


def decode_agent_id(raw: bytes, *, where: str) -> str:
    """Decode a percent-encoded id; an invalid one is a 400 that states what an id may be."""
    return check_agent_id(_decoded(raw, where), where=where)


def _new_id(value: str, where: str) -> str:
    """Decode the id in a header, under which something may be remembered; an invalid one is a 400 as above."""
    return check_new_agent_id(_decoded(value.encode("latin-1"), where), where=where)


def _decoded(raw: bytes, where: str) -> str:
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{where}: the agent's id is not UTF-8", param=where) from None
