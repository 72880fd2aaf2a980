"""Access control: Host, Origin and API key, checked before any route runs, and what the key grants.

A web page in a browser must not reach a server on this machine. Cross-site requests carry a foreign Origin. A rebound
DNS name carries a foreign Host, but no key, because the page does not know one. So with a valid key any Host is
accepted. Without one the Host must be ours: a name of this machine, the address it listens on, or a public name (that
of a proxy in front). Off loopback, IP addresses are accepted too, and so is any name if keys are set but no public
names, because the server cannot know all its names. An Origin is checked against Host and public names whatever the
key. `Forwarded` and `X-Forwarded-*` headers are ignored: any client can send them. There are no CORS headers. Health
checks and the files of the page, which prompts for a key itself, need no key.
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

KEYLESS = ("/health/", "/page/")
KEYLESS_PATHS = ("/", "/health", "/ping")


class Keys:
    """The access that each key grants. A given key is compared with every known one, by digest, in constant time."""

    def __init__(self, settings: ServerSettings) -> None:
        # With no keys that separate tenants, every caller may see everything.
        all_are_admins = settings.admin_key is None and not settings.api_keys
        named = dict(settings.api_keys)
        if settings.api_key is not None:
            named[DEFAULT_NAMESPACE] = settings.api_key
        self._known = [(_digest(key), Access(name, is_admin=all_are_admins)) for name, key in named.items()]
        if settings.admin_key is not None:
            self._known.append((_digest(settings.admin_key), Access(is_admin=True)))
        self.without = None if settings.needs_key else Access(is_admin=all_are_admins)

    def access(self, headers: Headers) -> Access | None:
        """Return what the key in these headers grants, or what is granted without one; None: nothing."""
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
    """ASGI middleware that answers 401 and 403 itself and passes other requests on with their `Access`."""

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
