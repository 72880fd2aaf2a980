"""POST /v1/agents/ID/prefill and /load: prepare an agent before its next request.

Prefilling computes a conversation and remembers it without a reply; loading brings KV from disk into memory and
computes nothing. Both answer with the report that a request would have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, GenerationRequest
from rekindle.server.agents.routes import PREFIX, Agent, Body
from rekindle.server.answers.answer import Answer, accepted
from rekindle.server.answers.choice import Choice
from rekindle.server.answers.options import RekindleReport, Tool, read_functions, template_fields, template_kwargs
from rekindle.server.answers.validation import Items, validated
from rekindle.server.border import Router
from rekindle.server.gate.caller import Caller, Namespace, unnamed
from rekindle.server.models import ServedModel
from rekindle.server.observers.observer import Observer
from rekindle.server.openai.bodies import Messages
from rekindle.server.openai.replies import DataEvents
from rekindle.text.messages import Message, normalise_messages
from rekindle.text.omissions import Omissions

PATH = f"{PREFIX}/{{id}}/prefill"


class PrefillBody(Body):
    """The next request, as far as it is known; its last message need not be the user's."""

    messages: Messages
    model: str | None = Field(default=None, description="the served name, the path it was loaded from, or `default`")
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")


class AgentReport(BaseModel):
    """How much of a conversation was cached, and how much was computed."""

    id: str
    object: str = "agent"
    rekindle: RekindleReport


class _PrefillReply(DataEvents):
    """The answer to a prefill: a report without text."""

    id = None

    def __init__(self, agent: str, generation: Generation) -> None:
        self._agent = agent
        self._choice = Choice(0, generation)

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Note the delta; there are no events."""
        self._choice.add(delta)
        return []

    def has_ended(self, index: int) -> bool:
        """Always False: the generation decides."""
        return False

    def message(self, index: int) -> Message:
        """An empty message."""
        return Message("assistant", "")

    def ending(self) -> list[dict[str, Any]]:
        """The report."""
        return [self.whole()]

    def whole(self) -> dict[str, Any]:
        """Agent and report."""
        return {"id": self._agent, "object": "agent", "rekindle": self._choice.described(return_ids=False)}


def prefill_router(engine: Engine, model: ServedModel, observer: Observer, *, ping_s: float, strict: bool) -> APIRouter:
    """Both routes. A prefill is observed and queued like a request, and ends when its client disconnects."""
    router = Router(prefix=PREFIX, tags=["agents"])

    @router.post("/{id}/prefill", response_model=AgentReport)
    async def prefill_agent(request: Request, agent: Agent, namespace: Namespace) -> Response:
        """Prefill a conversation and remember it, so that the agent's next request computes only its new tokens."""
        caller = replace(unnamed(request), agent=agent, namespace=namespace)

        def submit(body: Any, caller: Caller) -> Generation:
            return engine.submit(_request(body, caller, model, Omissions(strict=strict, sees=engine.sees)))

        generation, watch = await accepted(request, observer, request.scope["route"].path, submit, caller=caller)
        answer = Answer(_PrefillReply(agent, generation), [generation], watch, params={}, ping_s=ping_s)
        return await answer.whole(request)

    @router.post("/{id}/load", response_model=AgentReport)
    def load_agent(agent: Agent, namespace: Namespace) -> dict[str, Any]:
        """Load an agent's latest conversation from disk into memory, as far as memory allows; nothing is computed."""
        report = engine.agent(agent, namespace=namespace).load()
        return {"id": agent, "object": "agent", "rekindle": report.as_dict()}

    return router


def _request(body: Any, caller: Caller, model: ServedModel, omissions: Omissions) -> GenerationRequest:
    given = validated(PrefillBody, body, omissions=omissions, harmless=frozenset(), neutral={})
    model.require(given.model)
    return GenerationRequest(
        messages=normalise_messages(given.messages, omissions),
        agent=caller.agent,
        namespace=caller.namespace,
        tools=read_functions(given.tools, body.get("tools"), omissions).shown,
        **template_fields(template_kwargs(given.chat_template_kwargs, None), given.chat_template_kwargs),
        task="prefill",
        omitted=omissions.all(),
        pictures=omissions.pictures,
    )
