"""Passes a request on to a model's process, and its answer back as it comes.

Owns which headers go on, and what becomes of an answer that breaks off. Nothing is kept until it is whole: every piece
goes on as it arrives. A client that leaves closes the connection to the process, which cancels its request there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from rekindle.errors import BackendFailed
from rekindle.server.answers.sse import event, line
from rekindle.server.border import Problem, dialect_of, problem_of
from rekindle.server.lines import REQUEST_ID, line_of
from rekindle_models.places import Process

logger = logging.getLogger("rekindle.server")
CONNECT_S = 30.0  # of a process on this machine, which may be busy
# Of one connection alone, or of this server alone: keys, names by which it was reached.
NOT_PASSED = frozenset(
    b"host connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer upgrade "
    b"transfer-encoding content-length authorization x-api-key origin x-rekindle-model".split()
)
NOT_RETURNED = frozenset(b"connection keep-alive transfer-encoding date server".split())
ENDS_S = 2.0  # until it is known that a process has ended whose answer broke off
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


class Forwarder:
    """Requests to processes, one connection each, so that one that was started again leaves no stale one."""

    def __init__(self) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=0),  # and any number of connections
            verify=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def json(self, url: str, path: str, key: str, **headers: str) -> object:
        """Return the JSON that a process answers a GET with; httpx.HTTPError."""
        response = await self._client.get(url + path, headers={**headers, "Authorization": f"Bearer {key}"})
        response.raise_for_status()
        found: object = response.json()
        return found

    async def forward(self, scope: Scope, body: bytes, send: Send, *, process: Process, key: str | None) -> None:
        """Answer a request by what a process answers; BackendFailed if there is no answer, or it ends before its head.

        An answer that has begun and breaks off ends with an error in its own form, if it is a stream. Cancelling this
        closes the connection.
        """
        query = scope["query_string"]
        url = httpx.URL(process.url).copy_with(raw_path=scope["raw_path"] + (b"?" + query if query else b""))
        request = self._client.build_request(scope["method"], url, headers=_headers(scope, key), content=body)
        is_begun, kind, last = False, "", b""
        try:
            response = await self._client.send(request, stream=True)
            try:
                kind = response.headers.get("content-type", "").partition(";")[0]
                headers = [each for each in response.headers.raw if each[0].lower() not in NOT_RETURNED]
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                is_begun = True
                async for last in response.aiter_raw():
                    await send(_piece(last, more=True))
                await send(_piece(b"", more=False))
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            failure = BackendFailed(await _why(process, error))
            if not is_begun:
                raise failure from error
            await _break_off(scope, send, kind, failure, is_cut=not last.endswith(b"\n"))


def _headers(scope: Scope, key: str | None) -> Sequence[tuple[bytes, bytes]]:
    passed = [(name, value) for name, value in scope["headers"] if name not in NOT_PASSED]
    logged = line_of(scope)
    if logged is not None:  # one id in both logs
        passed = [(name, value) for name, value in passed if name != REQUEST_ID.encode()]
        passed.append((REQUEST_ID.encode(), logged.request_id.encode()))
    if key is not None:
        passed.append((b"authorization", f"Bearer {key}".encode()))
    return [*passed, (b"connection", b"close")]


def _piece(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine, and cancel it when the client leaves; what it raises is raised."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Return once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _why(process: Process, error: Exception) -> str:
    """Return why there is no answer, or no more of it: how the process ended, once that is known."""
    loop = asyncio.get_running_loop()
    end = loop.time() + ENDS_S
    while (problem := process.problem()) is None and loop.time() < end:
        await asyncio.sleep(0.05)
    if problem is None:
        return f"the model's process broke off its answer ({str(error) or type(error).__name__})"
    return f"{problem} before its answer was whole; the next request starts it again"


async def _break_off(scope: Scope, send: Send, kind: str, failure: BackendFailed, *, is_cut: bool) -> None:
    """End an answer that has begun: a stream by an error in its dialect, any other by closing the connection.

    `is_cut`: its last line has not ended.
    """
    problem = problem_of(failure)
    logged = line_of(scope)
    if logged is not None:
        logged.fail(problem.status, problem.message)
    if kind not in (EVENTS, LINES):
        raise failure
    await send(_piece((b"\n" if is_cut else b"") + _last(scope, kind, problem), more=True))
    await send(_piece(b"", more=False))


def _last(scope: Scope, kind: str, problem: Problem) -> bytes:
    """Return the error as the last event or line of a stream; an event that had begun before it is ended."""
    dialect = dialect_of(scope)
    body = problem.body(dialect)
    if kind == LINES:
        return line(body)
    return b"\n" + event(body, "error" if dialect == "anthropic" else None)
