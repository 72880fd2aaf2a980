"""A limit on one tenant's requests in progress: otherwise its slow readers and watchers could hold all connections.

Owns that count. With several tenants each may have half of the connections. A connection whose request head has not
arrived has no tenant yet; `places` bounds those. Other modules bound what a request waits for, and how long.
"""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server.errors import Problem
from rekindle.server.gate.caller import access_of


class TenantRequests:
    """ASGI middleware inside the guard: answers 503 itself to a tenant that is at its limit."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._has_others = len(settings.namespaces()) > 1
        self._most = -(-settings.max_connections // 2) if self._has_others else settings.max_connections
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count an HTTP request that has a tenant's key; pass others on."""
        access = access_of(Request(scope)) if scope["type"] == "http" else None
        if access is None or not access.has_key or (access.is_admin and self._has_others):
            await self._app(scope, receive, send)
            return
        if self._under_way[access.namespace] >= self._most:
            message = f"namespace {access.namespace!r} has {self._most} requests under way: try again"
            problem = Problem(503, "server_error", message, code="overloaded", retry_after_s=1)
            await problem.response(scope)(scope, receive, send)
            return
        self._under_way[access.namespace] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way[access.namespace] -= 1
