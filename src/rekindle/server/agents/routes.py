"""Routes that show and change agents' memories, each within the namespace of its key.

An id is percent-encoded in URLs and decoded after routing, so that it may contain a slash.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from pydantic import BaseModel, ConfigDict, Field

from rekindle.agent_ids import check_new_agent_id
from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo
from rekindle.errors import BadRequest, NotFound
from rekindle.server.agents.deletions import Deletions, Forgotten
from rekindle.server.border import Router
from rekindle.server.gate.caller import ALL, Namespace, access_of, decode_agent_id
from rekindle.server.observers.history import History

PREFIX = "/v1/agents"


async def _agent(id: Annotated[str, Path(description="the agent's id, percent-encoded")]) -> str:
    return decode_agent_id(id.encode("latin-1"), where="id")


Agent = Annotated[str, Depends(_agent)]


class Body(BaseModel):
    """A request body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PinBody(Body):
    """How long to pin; null or absent: until it is unpinned."""

    ttl_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class ForkBody(Body):
    """The id of the new agent, verbatim, not percent-encoded."""

    target: str


class RewindBody(Body):
    """How many turns to take back."""

    turns: int = Field(default=1, ge=1)


class AgentEntry(BaseModel):
    """What an agent remembers: tokens of its longest branch, how many are durable, and on which tier they are."""

    model_config = ConfigDict(extra="allow")
    id: str
    object: str = "agent"
    namespace: str
    branches: int
    num_tokens: int
    saved_tokens: int
    hot_tokens: int
    warm_tokens: int
    last_use: float = Field(description="Unix seconds")
    pinned: bool
    pinned_until: float | None = Field(description="Unix seconds; null: without a limit, or not pinned")


class BranchEntry(BaseModel):
    """One stored conversation: its tokens, how many are durable, on which tier, and which agents share them."""

    model_config = ConfigDict(extra="allow")
    number: int
    num_tokens: int
    saved_tokens: int
    hot_tokens: int
    warm_tokens: int
    shared_tokens: int = Field(description="length of the prefix shared with other agents")
    shared_with: list[str] = Field(description="ids of those agents; `unnamed` stands for all without one")
    num_turns: int = Field(description="requests that ended in it")
    parent: int | None = Field(default=None, description="number of the agent's older branch that it began with")
    parent_tokens: int = Field(default=0, description="length of the prefix that it shares with that one")


class AgentDetail(AgentEntry):
    """An agent with every branch."""

    branch_infos: list[BranchEntry] = []


class DiskWear(BaseModel):
    """Bytes written to the disk for records and their index."""

    today: int = Field(description="since 00:00 UTC, by all models of the store's directory")
    a_day: int | None = Field(description="most on a day; null: any number")
    a_turn: int | None = Field(description="for each turn that was saved since the start; null before the first")


class AgentList(BaseModel):
    """Agents, most recently used first."""

    object: str = "list"
    data: list[AgentEntry]
    written: DiskWear | None = Field(description="with a store, for admins")


def written(engine: Engine, request: Request) -> dict[str, Any] | None:
    """What the store has written, which concerns all namespaces: for admins alone."""
    wear = engine.wear() if access_of(request).is_admin else None
    return None if wear is None else asdict(wear)


def described(info: AgentInfo, **more: Any) -> dict[str, Any]:
    """An agent as JSON; a pin without a limit has `pinned_until` null, as JSON has no infinity."""
    fields = asdict(info)
    until = fields.pop("pinned_until")
    finite = until if until is not None and math.isfinite(until) else None
    if not fields.get("branch_infos"):  # known for a single agent, not in lists
        fields.pop("branch_infos", None)
    return {
        "id": fields.pop("agent"),
        "object": "agent",
        **fields,
        "pinned": until is not None,
        "pinned_until": finite,
        **more,
    }


def agents_router(engine: Engine, history: History, deletions: Deletions) -> APIRouter:
    """Routes under /v1/agents. Plain functions run in worker threads and may wait for engine and disk."""
    router = Router(prefix=PREFIX, tags=["agents"])
    _looking(router, engine, history, deletions)
    _keeping(router, engine)
    _changing(router, engine)
    _ending(router, deletions)
    return router


def _shown(engine: Engine, agent: str, namespace: str, **more: Any) -> dict[str, Any]:
    return described(engine.agent(agent, namespace=namespace).info(), **more)


def _looking(router: APIRouter, engine: Engine, history: History, deletions: Deletions) -> None:
    @router.get("", response_model=AgentList)
    def list_agents(namespace: Namespace, request: Request) -> dict[str, Any]:
        """Every named agent of the namespace, most recently used first; with namespace=* those of all namespaces.

        An agent that was partly deleted, because the disk refused the rest, has no tokens and no branches.
        """
        space = None if namespace == ALL else namespace
        found = engine.agents(space)
        known = {(info.namespace, info.agent) for info in found}
        left = [info for info in deletions.unfinished(space) if (info.namespace, info.agent) not in known]
        data = [described(info) for info in (*left, *found)]
        return {"object": "list", "data": data, "written": written(engine, request)}

    @router.get("/{id}", response_model=AgentDetail)
    def show_agent(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """One agent's memory, branch by branch."""
        try:
            return _shown(engine, agent, namespace)
        except NotFound:
            left = [info for info in deletions.unfinished(namespace) if info.agent == agent]
            if not left:
                raise
            return described(left[0])

    @router.get("/{id}/why")
    def why(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """The agent's last requests, the newest first: what was reused, from where, how long it took and why.

        Includes agents that remember nothing (their requests failed, or disabled reuse). `problems` are those of the
        server, such as turns that cannot be saved.
        """
        entries = history.of(namespace, agent)
        if not entries:
            engine.agent(agent, namespace=namespace).info()
        return {"id": agent, "object": "list", "data": entries, "problems": engine.health().problems}


def _keeping(router: APIRouter, engine: Engine) -> None:
    @router.post("/{id}/offload", response_model=AgentEntry)
    def offload_agent(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """Make an agent durable and drop its blocks from memory, except those that other agents share."""
        num_blocks = engine.agent(agent, namespace=namespace).offload()
        return _shown(engine, agent, namespace, evicted_blocks=num_blocks)

    @router.post("/{id}/pin", response_model=AgentEntry)
    def pin_agent(agent: Agent, namespace: Namespace, body: PinBody | None = None) -> dict[str, Any]:
        """Keep an agent on disk whatever else needs room, for a time or without a limit."""
        engine.agent(agent, namespace=namespace).pin(ttl_s=body.ttl_s if body else None)
        return _shown(engine, agent, namespace)

    @router.delete("/{id}/pin", response_model=AgentEntry)
    def unpin_agent(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """Unpin an agent, so that it can be evicted again."""
        engine.agent(agent, namespace=namespace).unpin()
        return _shown(engine, agent, namespace)


def _changing(router: APIRouter, engine: Engine) -> None:
    @router.post("/{id}/fork", response_model=AgentEntry)
    def fork_agent(agent: Agent, namespace: Namespace, body: ForkBody) -> dict[str, Any]:
        """Give another agent all that this one remembers, without copying KV. Answers with the new agent."""
        target = check_new_agent_id(body.target, where="target")
        engine.agent(agent, namespace=namespace).fork(target)
        return _shown(engine, target, namespace)

    @router.post("/{id}/rewind")
    def rewind_agent(agent: Agent, namespace: Namespace, body: RewindBody) -> dict[str, Any]:
        """Remove an agent's last turns; answers with how many tokens it still remembers. With 0 it is forgotten."""
        num_tokens = engine.agent(agent, namespace=namespace).rewind(body.turns)
        return {"id": agent, "object": "agent", "num_tokens": num_tokens}


def _rest(forgotten: Forgotten) -> dict[str, Any]:
    return {"responses_deleted": forgotten.num_responses, "sessions": list(forgotten.sessions)}


def _ending(router: APIRouter, deletions: Deletions) -> None:
    @router.post("/{id}/purge")
    async def purge_agent(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """Delete an agent and prove it: its bytes on disk and in memory are overwritten with zeros and read back.

        The answer lists what stays: blocks that others share, and sessions that it takes part in, with their messages.
        """
        purged, forgotten = await deletions.purge(namespace, agent)
        report = asdict(purged)
        return {"id": report.pop("agent"), "object": "agent", "purged": True, **report, **_rest(forgotten)}

    @router.delete("/{id}")
    async def delete_agent(request: Request, agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """Delete an agent on every tier; blocks that others share stay.

        A 503 has changed nothing, or says what is left: the agent is then still listed and can be deleted again.
        """
        unknown = next(iter(request.query_params), None)
        if unknown is not None:  # `?purge=true` would be believed to have been obeyed
            name = unknown[:80]
            raise BadRequest(f"DELETE takes no parameter {name!r}: POST to /purge proves a deletion", param=name)
        await deletions.delete(namespace, agent)
        return {"id": agent, "object": "agent", "deleted": True}
