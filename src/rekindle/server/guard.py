"""Who may come in: Host, Origin and API key, checked before any route runs, and what the key opens.

A page in somebody's browser must not reach a server on this machine. Its own site's requests carry a foreign Origin;
a rebound DNS name carries a foreign Host. On loopback only this machine's names are ours, with an API key or without.
Elsewhere a server with a key answers to any name (it cannot know them all, and a page would need the key), one without
to addresses and its own names. There are no CORS headers. Health checks and the files of
the page, which asks for a key itself, need none.
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
from rekindle.server.caller import Access, grant
from rekindle.server.errors import Problem

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request; other kinds (lifespan) pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        judged = self.judge(scope["path"], Headers(scope=scope))
        if isinstance(judged, Problem):
            await judged.response(scope["path"])(scope, receive, send)
        else:
            grant(scope, judged)
            await self._app(scope, receive, send)

    def judge(self, path: str, headers: Headers) -> Access | Problem:
        """What this request may reach, or why it may not come in."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._host_is_ours(host):
            return _refused(403, f"Host {host!r} is not this server's: for other names set an API key and --host")
        if origin is not None and _netloc(origin) != host.lower():
            return _refused(403, f"requests from pages of {origin!r} are not served")
        access = self._keys.access(headers)
        if access is None and (path == "/" or path.startswith(KEYLESS)):
            return Access(has_key=False)
        return access or _refused(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")

    def _host_is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name == self._settings.host.lower() or is_loopback(name):
            return True
        if is_loopback(self._settings.host):
            return False
        if self._settings.needs_key:
            return True
        # Off loopback an address is safe (rebinding needs a name), and so is the machine's own name.
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())


def _refused(status: int, message: str, *, code: str | None = None) -> Problem:
    return Problem(status, "authentication_error" if status == 401 else "permission_error", message, code=code)


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
