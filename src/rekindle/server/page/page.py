"""The page at `/`: its files, with headers that restrict the browser, and what it draws, in one answer.

The files need no key: the page itself asks for one if it is needed. A browser loads scripts, styles and data from this
server only, runs no text as HTML or script, and does not show the page in a foreign frame.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from rekindle import __version__
from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo, BranchInfo
from rekindle.errors import NotFound
from rekindle.server.agents.routes import AgentDetail, DiskWear, described, written
from rekindle.server.answers.advice import advice_for
from rekindle.server.border import Router
from rekindle.server.extension import Extension
from rekindle.server.gate.caller import access_of
from rekindle.server.models import ServedModel
from rekindle.server.observers.history import History
from rekindle.server.observers.today import OutcomeOfHour, SavedToday, Today

INDEX = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",  # revalidated each time, sent again only if it changed
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
MOST_AGENTS = 30  # with branches and requests, most recently used first; the others are only counted
REQUEST_FIELDS = (
    "at endpoint outcome source prompt_tokens reused_tokens hot_tokens warm_tokens computed_tokens completion_tokens "
    "reuse finish_reason error receipt choice"
).split()
MISSES = ("diverge", "miss")
LOOK_S = 0.2  # of one request; agents not queried in time are queried in the next


@dataclass(frozen=True, slots=True)
class _File:
    """One file as it is sent; `tag` identifies its content."""

    content: bytes
    kind: str
    tag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser already has it."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "Content-Type": self.kind})


def page_router(
    engine: Engine, model: ServedModel, history: History, today: Today, extensions: Sequence[Extension] = ()
) -> APIRouter:
    """The page with the views of extensions, its files, and the one route that serves it data."""
    router = Router()
    found = _files(extensions)

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return found[INDEX].response(request)

    @router.get("/page/{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in found:
            raise NotFound(f"the page has no file {name!r}", param="name")
        return found[name].response(request)

    router.include_router(overview_router(engine, model, history, today))
    return router


def _files(extensions: Sequence[Extension]) -> dict[str, _File]:
    """All files of the page by name: some 80 KB, read once."""
    parts = [(extension.name, extension.page) for extension in extensions if extension.page is not None]
    folders: list[Traversable] = [files("rekindle.server.page") / "static", *(folder for _, folder in parts)]
    entries = (entry for folder in folders for entry in folder.iterdir() if PurePath(entry.name).suffix in TYPES)
    content = {entry.name: entry.read_bytes() for entry in entries}
    content[INDEX] = _index(content[INDEX].decode(), {name: content.pop(f"{name}.html").decode() for name, _ in parts})
    return {
        name: _File(data, TYPES[PurePath(name).suffix], f'"{hashlib.sha256(data).hexdigest()[:24]}"')
        for name, data in content.items()
    }


def _index(index: str, views: Mapping[str, str]) -> bytes:
    """The page with a link and an element for each view, whose script has the view's name."""
    links = "".join(f'\n      <a href="#{name}" id="to-{name}">{name.capitalize()}</a>' for name in views)
    index = index.replace('data-views=""', f'data-views="{" ".join(views)}"')
    index = index.replace("\n      <!-- links -->", links)
    return index.replace("\n    <!-- views -->\n", "".join(views.values())).encode()


# GET /overview: everything the page draws of a namespace's agents, in one answer.
#
# Owns nothing: memory comes from the engine, requests from the history and from what is counted of today. It is
# bounded, as the page polls it every other second, and is outside /v1/, whose requests count against a tenant's limit.
# It needs only the tenant's key, and contains the operator's figures for an admin's.


# Agents' branches, queried from the engine as they change, within a time limit per request.
#
# Querying one agent costs two calls to the engine thread and a scan of every branch, so an open page must not query all
# agents every other second.


@dataclass(frozen=True, slots=True)
class _Known:
    """One agent's branches, with its info and that of all agents at the time of the query."""

    branches: tuple[BranchInfo, ...]
    info: AgentInfo
    all_infos: Sequence[AgentInfo]


class Details:
    """Caches the engine's answers about agents, by namespace. May be called from any thread."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, _Known]] = {}

    def of(self, namespace: str, infos: Sequence[AgentInfo]) -> list[AgentInfo]:
        """Return these agents of one namespace with their branches, as far as they are known by now.

        Changed agents are queried first, then unchanged ones if any agent changed: what they share may have changed
        too. At least one is queried, and none after `LOOK_S`.
        """
        with self._lock:
            before = self._namespaces.get(namespace, {})
            known = {info.agent: before[info.agent] for info in infos if info.agent in before}
            self._namespaces[namespace] = known
            changed = [info for info in infos if info.agent not in known or known[info.agent].info != info]
            unchanged = [info for info in infos if info.agent in known and known[info.agent].info == info]
            stale = [info for info in unchanged if known[info.agent].all_infos != infos]
            deadline = self._clock() + LOOK_S
            for info in (*changed, *stale):
                known[info.agent] = _Known(self._branches(info), info, infos)
                if self._clock() >= deadline:
                    break
            return [
                replace(info, branch_infos=known[info.agent].branches if info.agent in known else ()) for info in infos
            ]

    def _branches(self, info: AgentInfo) -> tuple[BranchInfo, ...]:
        """The agent's branches; empty if it was deleted meanwhile."""
        try:
            return self._engine.agent(info.agent, namespace=info.namespace).info().branch_infos
        except NotFound:
            return ()


class OverviewRequest(BaseModel):
    """One of an agent's last requests; one that failed has `error` and little else."""

    model_config = ConfigDict(extra="allow")
    at: float = Field(description="Unix seconds")
    outcome: str | None = None
    first_token_ms: float | None = None


class OverviewAgent(AgentDetail):
    """An agent, its branches, its last requests and the last that recomputed what could have been reused."""

    requests: list[OverviewRequest]
    last_miss: dict[str, Any] | None = Field(description="a request with `explanation` and `advice`")


class MemoryUse(BaseModel):
    """Bytes of blocks of all namespaces on each tier, those that several share once, and what waits for the disk."""

    hot_used: int
    hot_bytes: int = Field(description="that blocks may take in memory")
    disk_used: int | None = Field(description="null without a store, like the next two")
    disk_bytes: int | None = Field(description="that blocks may take on disk")
    waiting_saves: int | None
    checked: int | None = Field(description="restored blocks that were computed again; null: none are checked")
    differed: int | None = Field(description="those of them that had other bits, and were dropped")


class Overview(BaseModel):
    """The agents used last, and how many there are in all."""

    object: str = "overview"
    model: str
    version: str
    namespace: str
    block_tokens: int
    sampling: dict[str, float] = Field(description="what the page's chat is sampled with, unless it says otherwise")
    num_agents: int
    agents: list[OverviewAgent]
    hour: dict[str, OutcomeOfHour] = Field(description="requests of the last hour, by outcome")
    saved: SavedToday
    memory: MemoryUse | None = Field(description="for admins")
    written: DiskWear | None = Field(description="with a store, for admins")


def overview_router(engine: Engine, model: ServedModel, history: History, today: Today) -> APIRouter:
    """The route. A plain function: it runs in a worker thread and waits for the engine."""
    router = Router(tags=["agents"])
    details = Details(engine)

    @router.get("/overview", response_model=Overview)
    def overview(request: Request) -> dict[str, Any]:
        """The agents of the key's namespace with memory, requests and last misses, for a page that shows them."""
        namespace = access_of(request).namespace
        infos = engine.agents(namespace)
        shown = details.of(namespace, infos[:MOST_AGENTS])
        return {
            "model": model.name,
            "version": __version__,
            "namespace": namespace,
            "block_tokens": engine.spec.layout.block_tokens,
            "sampling": engine.sampling.named("llama-server"),
            "num_agents": len(infos),
            "agents": [_agent(info, history.of(namespace, info.agent)) for info in shown],
            "hour": today.hour(namespace),
            "saved": today.saved(namespace),
            "memory": _memory_use(engine) if access_of(request).is_admin else None,
            "written": written(engine, request),
        }

    return router


def _memory_use(engine: Engine) -> dict[str, int | None]:
    stats = engine.stats()
    store = stats.store or {}
    return {
        "hot_used": stats.used_hot_bytes,
        "hot_bytes": stats.hot_bytes,
        "disk_used": store.get("used_bytes"),
        "disk_bytes": store.get("disk_bytes"),
        "waiting_saves": store.get("queue_length"),
        "checked": stats.num_checked,
        "differed": stats.num_differed,
    }


def _agent(info: AgentInfo, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    miss = next((entry for entry in entries if is_miss(entry)), None)
    return {
        "branch_infos": [],
        **described(info),
        "requests": [_request(entry) for entry in entries],
        "last_miss": None if miss is None else _request(miss) | explained(miss),
    }


def is_miss(entry: Mapping[str, Any]) -> bool:
    """Whether a request of the history recomputed what might have been reused: a first turn, of which nothing can be
    stored, did not, unless there is a setting to offer."""
    explanation = entry.get("explanation")
    if explanation is None or (explanation["cause"] == "not_stored" and explanation.get("offer") is None):
        return False
    return entry["outcome"] in MISSES or explanation["cause"] == "evicted"


def explained(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The explanation of a request, with advice."""
    explanation = entry["explanation"]
    return {"explanation": explanation, "advice": advice_for(explanation)}


def _request(entry: Mapping[str, Any]) -> dict[str, Any]:
    first_token_ms = entry.get("timings", {}).get("first_token_ms")
    return {name: entry[name] for name in REQUEST_FIELDS if name in entry} | {"first_token_ms": first_token_ms}
