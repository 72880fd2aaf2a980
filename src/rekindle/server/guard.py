"""Who may come in: Host, Origin and API key, checked before any route runs.

A page in somebody's browser must not reach a server on this machine. Its own site's requests carry a foreign Origin;
a rebound DNS name carries a foreign Host. On loopback only this machine's names are ours, with an API key or without.
Elsewhere a server with a key answers to any name (it cannot know them all, and a page would need the key), one without
to addresses and its own names. There are no CORS headers. Health checks need no key.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.config import ServerSettings, is_loopback
from rekindle.server.errors import Problem


class Guard:
    """ASGI middleware that answers 401 and 403 itself and lets the rest through."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check an HTTP request; other kinds (lifespan) pass."""
        problem = self.problem(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)

    def problem(self, path: str, headers: Headers) -> Problem | None:
        """Why this request may not come in, or None."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._host_is_ours(host):
            return _refused(403, f"Host {host!r} is not this server's: for other names set an API key and --host")
        if origin is not None and _netloc(origin) != host.lower():
            return _refused(403, f"requests from pages of {origin!r} are not served")
        if self._settings.api_key is not None and not path.startswith("/health/") and not self._has_key(headers):
            return _refused(401, "a valid API key is required: Authorization: Bearer KEY", code="invalid_api_key")
        return None

    def _host_is_ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        if name == self._settings.host.lower() or is_loopback(name):
            return True
        if is_loopback(self._settings.host):
            return False
        if self._settings.api_key is not None:
            return True
        # Off loopback an address is safe (rebinding needs a name), and so is the machine's own name.
        return _is_address(name) or name in (socket.gethostname().lower(), socket.getfqdn().lower())

    def _has_key(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return hmac.compare_digest(given.encode(), (self._settings.api_key or "").encode())


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
