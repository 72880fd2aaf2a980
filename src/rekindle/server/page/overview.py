"""GET /overview: everything the page draws of a namespace's agents, in one answer.

Owns nothing: memory comes from the engine, requests from the history. It is bounded, as the page polls it every other
second, and is outside /v1/, whose requests count against a tenant's limit. It needs only the tenant's key, so it does
not contain the operator's figures.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from rekindle import __version__
from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo, BranchInfo
from rekindle.errors import NotFound
from rekindle.server.agents.routes import AgentDetail, described
from rekindle.server.answers.advice import advice_for
from rekindle.server.border import Router
from rekindle.server.gate.caller import access_of
from rekindle.server.models import ServedModel
from rekindle.server.observers.history import History

MOST_AGENTS = 30  # with branches and requests, most recently used first; the others are only counted
REQUEST_FIELDS = (
    "at endpoint outcome source prompt_tokens reused_tokens hot_tokens warm_tokens computed_tokens completion_tokens "
    "reuse finish_reason error"
).split()
MISSES = ("diverge", "miss")
LOOK_S = 0.2  # of one request; agents not queried in time are queried in the next


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
            return self._engine.agent_info(info.agent, namespace=info.namespace).branch_infos
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


def overview_router(engine: Engine, model: ServedModel, history: History) -> APIRouter:
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
        }

    return router


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
