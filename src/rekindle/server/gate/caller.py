"""The caller of a request: whether it may ask, the namespace its API key grants, and the agent its headers name.

The guard checks the key and stores an `Access` in the request's scope; headers sent by the client name the agent.
Ids are percent-encoded in headers and URLs. They decide which memory is used, never what may be accessed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated
from urllib.parse import unquote_to_bytes, urlsplit

from fastapi import Depends, Query, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.agent_ids import check_agent_id, check_new_agent_id
from rekindle.config import ServerSettings, is_loopback
from rekindle.errors import BadRequest
from rekindle.server.border import Problem, needs_admin
from rekindle.server.gate.keys import Access, Keys
from rekindle.server.lines import line_of

ALL = "*"  # every namespace, on routes that let an admin request it
KEYLESS = ("/health/", "/page/")
KEYLESS_PATHS = ("/", "/health", "/ping")


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
    _Family("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    _Family("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    _Family("x-opencode-session", parent="x-parent-session-id"),
    _Family("x-session-affinity", parent="x-parent-session-id"),
    _Family("session-id", "thread-id", "x-codex-parent-thread-id"),
    _Family("session_id", "thread_id", "x-codex-parent-thread-id"),
    _Family("x-openwebui-chat-id"),
)
_STATE = "rekindle_access"


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says of its session, in the words of other servers, for its place in the queue and what follows.

    `priority`: the seconds by which it counts as older. `anticipates`: whether the next prompt is to be computed ahead
    (None: not said). `ends_by`: the parameter that says that the session ends with this reply. `ignored`: parameters
    that have no effect here.
    """

    priority: int = 0
    anticipates: bool | None = None
    ends_by: str | None = None
    ignored: tuple[str, ...] = ()


NO_HINTS = Hints()


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
    hints: Hints = NO_HINTS


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


def named_in_body(session: str, where: str, headers: Headers) -> Caller:
    """Return the caller of a session that a body names, verbatim: the one that a client's header with it would name.

    Its parent is the first that a header names in full.
    """
    agent = check_agent_id(_part(check_new_agent_id(session, where=where)), where=where)
    for family in (*OWN_FAMILIES, *CLIENT_FAMILIES):
        name = family.parent if family.sub is None else None
        if name is not None and (value := headers.get(name)):
            parent = _new_id(value, name)
            return _named(agent, parent if family in OWN_FAMILIES else _part(parent), {name: value})
    return Caller(agent=agent)


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


# Access control: Host, Origin and API key, checked before any route runs, and what the key grants.
#
# A web page in a browser must not reach a server on this machine. Cross-site requests carry a foreign Origin. A rebound
# DNS name carries a foreign Host, but no key, because the page does not know one. So with a valid key any Host is
# accepted. Without one the Host must be ours: a name of this machine, the address it listens on, or a public name (that
# of a proxy in front). Off loopback, IP addresses are accepted too, and so is any name if keys are set but no public
# names, because the server cannot know all its names. An Origin is checked against Host and public names whatever the
# key. `Forwarded` and `X-Forwarded-*` headers are ignored: any client can send them. There are no CORS headers. Health
# checks and the files of the page, which prompts for a key itself, need no key.


class Guard:
    """ASGI middleware that answers 401 and 403 itself and passes other requests on with their `Access`."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, keys: Keys) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._public = [place for name in settings.public_host if (place := _place(name)) is not None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        judged = self.judge(scope["path"], Headers(scope=scope))
        if isinstance(judged, Problem):
            await judged.response(scope)(scope, receive, send)
        else:
            grant(scope, judged)
            await self._app(scope, receive, send)

    def judge(self, path: str, headers: Headers) -> Access | Problem:
        """Return what this request may access, or why it is refused."""
        host, origin = headers.get("host", ""), headers.get("origin")
        access = self._keys.access(headers)
        has_valid_key = access is not None and access is not self._keys.without
        if not (has_valid_key or self._host_is_ours(host)):
            message = f"Host {host!r} is not this server's: send an API key, or name it with --public-host"
            return _refused(403, message)
        if origin is not None and not self._origin_is_ours(origin, host):
            return _refused(403, f"requests from pages of {origin!r} are not served")
        if access is None and (path in KEYLESS_PATHS or path.startswith(KEYLESS)):
            return Access(has_key=False)
        return access or _refused(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")

    def _host_is_ours(self, host: str) -> bool:
        place = _place(host) or ("", None)  # a missing Host, as in HTTP/1.0, matches no name
        name = place[0]
        if name == self._settings.host.lower() or is_loopback(name) or self._is_public(place):
            return True
        if is_loopback(self._settings.host):
            return False
        if self._settings.needs_key and not self._public:
            return True
        # Off loopback an address is safe (rebinding needs a name), and so is the machine's own name.
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def _origin_is_ours(self, origin: str, host: str) -> bool:
        """Whether a page has the same host and port as its request, or a public name.

        The public name covers proxies that do not forward Host: the names differ then, though the browser sees one.
        """
        try:
            scheme, netloc = urlsplit(origin)[:2]
        except ValueError:
            return False
        place = _place(netloc)
        return place is not None and (netloc.lower() == host.lower() or self._is_public(place, scheme))

    def _is_public(self, place: tuple[str, int | None], scheme: str = "") -> bool:
        """Whether a name and port are public; a public name configured without a port matches every port."""
        name, port = place
        usual = {"http": (80,), "https": (443,)}.get(scheme, (80, 443))
        ports = (port,) if port is not None else usual
        return any(name == known and (only is None or only in ports) for known, only in self._public)


def _refused(status: int, message: str, *, code: str | None = None) -> Problem:
    return Problem(status, "authentication_error" if status == 401 else "permission_error", message, code=code)


def _place(netloc: str) -> tuple[str, int | None] | None:
    """Parse a Host header into name and port; None if it is not valid."""
    try:
        parts = urlsplit(f"//{netloc}")
        return ((parts.hostname or "").rstrip("."), parts.port) if parts.hostname else None
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
