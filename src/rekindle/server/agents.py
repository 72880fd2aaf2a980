"""Agents over HTTP: how a request names one, and what can be seen and done of their memories.

An id is any UTF-8 of 1 to 256 bytes without control characters, percent-encoded in headers and URLs. It steers
placement, never access.
"""

from __future__ import annotations

import unicodedata
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter, Request
from starlette.datastructures import Headers

from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo
from rekindle.server.errors import invalid

MAX_ID_BYTES = 256
NAMESPACE = "default"
HEADERS = ("x-agent-id", "x-session-id")
_PREFIX, _EVICT = b"/v1/agents/", b"/evict"


def decode_agent_id(raw: bytes, *, where: str) -> str:
    """The id spelled by these percent-encoded bytes; a 400 that says what an id may be."""
    spelled = unquote_to_bytes(raw)
    try:
        agent = spelled.decode()
    except UnicodeDecodeError:
        raise invalid(400, f"{where}: the agent's id is not UTF-8", param=where) from None
    if not 1 <= len(spelled) <= MAX_ID_BYTES:
        raise invalid(400, f"{where}: an agent's id has 1 to {MAX_ID_BYTES} bytes, not {len(spelled)}", param=where)
    if any(unicodedata.category(character) == "Cc" for character in agent):
        raise invalid(400, f"{where}: an agent's id has no control characters", param=where)
    return agent


def agent_of(headers: Headers) -> str | None:
    """The agent a request names, or None: then it is found by its text alone."""
    for name in HEADERS:
        value = headers.get(name)
        if value is not None:
            return decode_agent_id(value.encode("latin-1"), where=name)
    return None


def _agent_in_path(request: Request, *, suffix: bytes = b"") -> str:
    raw: bytes = request.scope["raw_path"]
    return decode_agent_id(raw.removeprefix(_PREFIX).removesuffix(suffix), where="id")


def _described(info: AgentInfo) -> dict[str, Any]:
    described = asdict(info)
    return {"id": described.pop("agent"), "object": "agent", **described}


def agents_router(engine: Engine) -> APIRouter:
    """Routes under /v1/agents. Plain functions: they run in worker threads and may wait for the engine."""
    router = APIRouter(prefix="/v1/agents")

    @router.get("")
    def list_agents() -> dict[str, Any]:
        return {"object": "list", "data": [_described(info) for info in engine.agents(NAMESPACE)]}

    @router.post("/{id:path}/evict")
    def evict_agent(request: Request) -> dict[str, Any]:
        agent = _agent_in_path(request, suffix=_EVICT)
        num_blocks = engine.evict(agent, namespace=NAMESPACE)
        return {**_described(engine.agent(agent, namespace=NAMESPACE)), "evicted_blocks": num_blocks}

    @router.get("/{id:path}")
    def show_agent(request: Request) -> dict[str, Any]:
        return _described(engine.agent(_agent_in_path(request), namespace=NAMESPACE))

    @router.delete("/{id:path}")
    def delete_agent(request: Request) -> dict[str, Any]:
        agent = _agent_in_path(request)
        engine.delete(agent, namespace=NAMESPACE)
        return {"id": agent, "object": "agent", "deleted": True}

    return router
