"""Who may come in: Host, Origin and API key, checked before any route runs, and what the key opens.

A page in somebody's browser must not reach a server on this machine. Its own site's requests carry a foreign Origin;
a rebound DNS name carries a foreign Host, but no key, for the page of another name knows none. So a valid key makes
any Host good, and without one a Host must be ours: this machine's names, where it listens, its public names (those of
a proxy in front); off loopback addresses too, and with keys and no public names any name, for the server cannot know
them all. An Origin is held against Host and public names whatever the key. What a proxy writes into `Forwarded` or
`X-Forwarded-*` headers decides nothing: anybody could. There are no CORS headers. Health checks and the files of the
page, which asks for a key itself, need no key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.config import DEFAULT_NAMESPACE, ServerSettings, is_loopback
from rekindle.server.errors import Problem
from rekindle.server.gate.caller import Access, grant

KEYLESS = ("/health/", "/page/")  # and the page itself, at /


class Keys:
    """What each key opens. A key is compared with all, by digests, in the same time whichever it is."""

    def __init__(self, settings: ServerSettings) -> None:
        # Where nothing separates tenants, whoever comes in may see everything.
        everybody = settings.admin_key is None and not settings.api_keys
        named = dict(settings.api_keys)
        if settings.api_key is not None:
            named[DEFAULT_NAMESPACE] = settings.api_key
        self._known = [(_digest(key), Access(name, is_admin=everybody)) for name, key in named.items()]
        if settings.admin_key is not None:
            self._known.append((_digest(settings.admin_key), Access(is_admin=True)))
        self.without = None if settings.needs_key else Access(is_admin=everybody)

    def access(self, headers: Headers) -> Access | None:
        """What the key in these headers opens, or what is open without one; None: nothing."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        digest, found = _digest(given), self.without
        for known, access in self._known:
            if hmac.compare_digest(digest, known):
                found = access
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class Guard:
    """ASGI middleware that answers 401 and 403 itself and lets the rest through, with its `Access`."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = Keys(settings)
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
        """What this request may reach, or why it may not come in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        access = self._keys.access(headers)
        has_valid_key = access is not None and access is not self._keys.without
        if not (has_valid_key or self._host_is_ours(host)):
            message = f"Host {host!r} is not this server's: send an API key, or name it with --public-host"
            return _refused(403, message)
        if origin is not None and not self._origin_is_ours(origin, host):
            return _refused(403, f"requests from pages of {origin!r} are not served")
        if access is None and (path == "/" or path.startswith(KEYLESS)):
            return Access(has_key=False)
        return access or _refused(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")

    def _host_is_ours(self, host: str) -> bool:
        place = _place(host) or ("", None)  # none at all is a name of nobody's: HTTP/1.0 has no Host
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
        """Whether a page is of the very place that its request asks, or of a public name.

        The second is for proxies that do not pass Host on: then the names differ, though the browser sees one.
        """
        try:
            scheme, netloc = urlsplit(origin)[:2]
        except ValueError:
            return False
        place = _place(netloc)
        return place is not None and (netloc.lower() == host.lower() or self._is_public(place, scheme))

    def _is_public(self, place: tuple[str, int | None], scheme: str = "") -> bool:
        """Whether a name and port are among the public ones; one that is given without a port has any."""
        name, port = place
        usual = {"http": (80,), "https": (443,)}.get(scheme, (80, 443))
        ports = (port,) if port is not None else usual
        return any(name == known and (only is None or only in ports) for known, only in self._public)


def _refused(status: int, message: str, *, code: str | None = None) -> Problem:
    return Problem(status, "authentication_error" if status == 401 else "permission_error", message, code=code)


def _place(netloc: str) -> tuple[str, int | None] | None:
    """Name and port of what a Host header says; None where it is none."""
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
