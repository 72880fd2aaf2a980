"""What one tenant may ask for: requests a minute, requests in progress at a time, and replies within its tokens a day.

Owns the first two counts; `quotas` has the third. A tenant's slow readers and watchers could hold all connections
otherwise, so with several tenants each may have half of them. A connection whose request head has not arrived has no
tenant yet; `places` bounds those. Other modules bound what a request waits for, and how long.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server.border import Problem, dialect_of
from rekindle.server.gate.caller import access_of
from rekindle.server.gate.quotas import Quotas

# Posts that have tokens computed or generated.
COUNTED = re.compile(
    r"/v1/(chat/completions|completions|responses|messages|agents/.+/prefill|coordination/.+)|/api/(chat|generate)"
)


@dataclass(slots=True)
class _Bucket:
    """Requests that may be sent now; `tokens` is as of time `at`."""

    tokens: float
    at: float


class Rates:
    """A token bucket per namespace, of as many requests as it may send a minute (None: any number), which may change.

    Namespaces are few: settings and the file of keys list them.
    """

    def __init__(self, per_minute: Callable[[str], int | None], *, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, namespace: str) -> float:
        """Take one request: 0.0 if it may proceed, else the seconds until one may."""
        most = self._per_minute(namespace)
        if most is None:
            return 0.0
        now, per_s = self._clock(), most / 60
        bucket = self._buckets.setdefault(namespace, _Bucket(most, now))
        bucket.tokens = min(most, bucket.tokens + (now - bucket.at) * per_s)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) / per_s
        bucket.tokens -= 1
        return 0.0

    def problem(self, namespace: str) -> Problem | None:
        """Take one request; return why it may not proceed, if it may not."""
        wait_s = self.take(namespace)
        if not wait_s:
            return None
        message = f"more than {self._per_minute(namespace)} requests a minute: come back in {wait_s:.1f} s"
        return Problem(429, "requests", message, code="rate_limit_exceeded", retry_after_s=wait_s)


class TenantRequests:
    """ASGI middleware inside the guard: answers 503 itself to a tenant that is at its limit."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._has_others = settings.has_tenants()
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


class TokensPerDay:
    """ASGI middleware inside the guard: answers 429 itself to a tenant that has used its tokens of today, and says in
    the heads of other answers what was left when they began.
    """

    def __init__(self, app: ASGIApp, *, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a post that wants tokens; pass others on."""
        if scope["type"] != "http" or scope["method"] != "POST" or not COUNTED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        namespace, dialect = access_of(Request(scope)).namespace, dialect_of(scope)
        left = self._quotas.headers(namespace, dialect)

        async def send_with_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message["headers"]))
                headers.update(left)
                message = {**message, "headers": headers.raw}
            await send(message)

        problem = self._quotas.problem(namespace)
        if problem is None:
            await self._app(scope, receive, send_with_rest if left else send)
        else:
            await problem.response(scope)(scope, receive, send_with_rest)
