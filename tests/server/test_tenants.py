"""Requests under way: those of one tenant leave connections for others."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import Receive, Scope, Send

from rekindle.config import ServerSettings
from rekindle.server.gate.caller import Guard
from rekindle.server.gate.keys import Keys
from rekindle.server.gate.tenants import TenantRequests

KEYS = {"a": "key-a", "b": "key-b"}
WAIT_S = 60.0


class Waiting:
    """An application that answers when it is let go, in the guard's order."""

    def __init__(self, settings: ServerSettings) -> None:
        self.num_inside = 0
        self.let_go = asyncio.Event()
        app = Guard(TenantRequests(self, settings=settings), settings=settings, keys=Keys(settings))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_inside += 1
        if scope["path"] != "/health/live":
            await self.let_go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def get(self, key: str | None, path: str = "/v1/agents") -> httpx.Response:
        return await self._client.get(path, headers={} if key is None else {"Authorization": f"Bearer {key}"})

    async def begin(self, key: str, count: int) -> list[asyncio.Task[httpx.Response]]:
        """So many requests, once they are inside."""
        wanted = self.num_inside + count
        tasks = [asyncio.create_task(self.get(key)) for _ in range(count)]
        async with asyncio.timeout(WAIT_S):
            while self.num_inside < wanted:
                await asyncio.sleep(0)
        return tasks


def test_one_tenant_has_half_of_the_connections_under_way() -> None:
    async def run() -> None:
        waiting = Waiting(ServerSettings(api_keys=KEYS, admin_key="admin", max_connections=8))
        tasks = await waiting.begin("key-a", 4)
        refused = await waiting.get("key-a")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "namespace 'a' has 4 requests under way" in refused.json()["error"]["message"]
        assert (await waiting.get(None, "/health/live")).status_code == 200
        assert (await waiting.get(None)).status_code == 401
        tasks += await waiting.begin("key-b", 4)
        tasks += await waiting.begin("admin", 6)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        tasks += await waiting.begin("key-a", 1)
        waiting.let_go.set()
        assert {(await each).status_code for each in tasks[1:]} == {200}
        assert (await waiting.get("key-a")).status_code == 200

    asyncio.run(run())


def test_a_tenant_that_is_alone_has_all() -> None:
    async def run() -> None:
        waiting = Waiting(ServerSettings(max_connections=4))
        tasks = await waiting.begin("", 4)
        waiting.let_go.set()
        assert {(await each).status_code for each in tasks} == {200}

    asyncio.run(run())
