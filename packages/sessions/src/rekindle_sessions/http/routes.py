"""Routes under /v1/coordination/sessions, each within the namespace of its key.

They run on the event loop, as the coordinator does. Session ids are made here; names of agents are percent-encoded in
URLs, like ids of agents, and decoded after routing.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from rekindle.errors import BadRequest, StoreError
from rekindle.server.border import Router, in_thread
from rekindle.server.gate.caller import ALL, Namespace, decode_agent_id
from rekindle.server.observers.observer import Observer
from rekindle_sessions.http.bodies import (
    ForkBody,
    ImportBody,
    InterruptBody,
    MergeBody,
    MessageBody,
    RewindBody,
    RoundBody,
    SessionBody,
    TurnBody,
    VoteBody,
    WhisperBody,
    audience_of,
    names_of,
    plan_of,
    question_of,
    sampling_of,
)
from rekindle_sessions.http.described import detailed, listed
from rekindle_sessions.http.models import (
    Comparison,
    Deleted,
    MessageEntry,
    MessageList,
    Run,
    RunEvent,
    SessionDetail,
    SessionDocument,
    SessionList,
)
from rekindle_sessions.http.observed import observed, receipt_of, receipted, receipts_of
from rekindle_sessions.http.running import Sessions
from rekindle_sessions.http.streaming import Events, StreamSettings, listened, streamed, whole
from rekindle_sessions.log.exported import ExportedSession
from rekindle_sessions.machine.types import Utterance

T = TypeVar("T")
ForgetReceipts = Callable[[str, Collection[str]], None]
PREFIX = "/v1/coordination/sessions"
MOST_NUMBER = (1 << 53) - 1  # the largest integer that every JSON parser represents exactly
Stop = Literal["nothing", "turn", "round"]
_EVENTS = {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{RunEvent.__name__}"}}}
STREAM: dict[str, Any] = {
    "response_class": Response,
    "responses": {200: {"description": "Events, each with its name", "content": _EVENTS}},
}


async def _one_namespace(namespace: Namespace) -> str:
    if namespace == ALL:
        raise BadRequest("namespace: sessions are seen one namespace at a time", param="namespace")
    return namespace


async def _name(name: Annotated[str, Path(description="the agent's name in the session, percent-encoded")]) -> str:
    return decode_agent_id(name.encode("latin-1"), where="name")


Space = Annotated[str, Depends(_one_namespace)]
Agent = Annotated[str, Depends(_name)]
SessionId = Annotated[str, Path(description="the session's id")]


@contextmanager
def _params_renamed(**params: str) -> Iterator[None]:
    """Rename the parameters of errors to the fields of the body."""
    try:
        yield
    except BadRequest as error:
        error.param = params.get(error.param or "", error.param)
        raise


def sessions_router(
    sessions: Sessions, streams: StreamSettings, observer: Observer, *, forget_receipts: ForgetReceipts
) -> APIRouter:
    """All routes of sessions; turns are reported to `observer`, and what it keeps of them goes with their session."""
    router = Router(prefix=PREFIX, tags=["coordination"])
    _keeping(router, sessions, forget_receipts)
    _running(router, sessions, streams, observer)
    _messaging(router, sessions, streams)
    _changing(router, sessions)
    return router


def _keeping(router: APIRouter, sessions: Sessions, forget_receipts: ForgetReceipts) -> None:
    @router.post("", response_model=SessionDetail)
    async def create_session(space: Space, body: SessionBody) -> dict[str, Any]:
        """Create a session of 2 to 30 agents; no agent speaks yet. Permanent agents bring what they remember."""
        coordinator = await sessions.coordinator()
        with _params_renamed(participants="agents"):
            return detailed(await coordinator.create(space, plan_of(body), id=f"sess_{uuid.uuid4().hex}"))

    @router.get("", response_model=SessionList)
    async def list_sessions(space: Space) -> dict[str, Any]:
        """Every session of the namespace, newest first."""
        found = await (await sessions.coordinator()).listed(space)
        return {"object": "list", "data": [listed(info) for info in reversed(found)]}

    @router.get("/{id}", response_model=SessionDetail)
    async def show_session(space: Space, id: SessionId) -> dict[str, Any]:
        """One session: its agents, who is speaking, its decisions, and the plan that creates another one like it."""
        coordinator = await sessions.coordinator()
        await coordinator.fetch(space, id)
        return detailed(coordinator.show(space, id))

    @router.get("/{id}/export", response_model=SessionDocument)
    async def export_session(space: Space, id: SessionId) -> dict[str, Any]:
        """A session as a document for another server: its plan and its events. Its agents are files of their own."""
        return (await (await sessions.coordinator()).export(space, id)).as_dict()

    @router.post("/import", response_model=SessionDetail)
    async def import_session(space: Space, body: ImportBody) -> dict[str, Any]:
        """Continue a session from another server. Import its agents first, else their first turns compute all."""
        coordinator = await sessions.coordinator()
        past = await in_thread(ExportedSession.from_dict, body.session)
        return detailed(await coordinator.take_in(space, past, id=body.id or f"sess_{uuid.uuid4().hex}"))

    @router.delete("/{id}", response_model=Deleted)
    async def delete_session(space: Space, id: SessionId) -> dict[str, Any]:
        """Delete a session with its receipts and ephemeral agents; permanent ones keep KV and what they remember."""
        coordinator = await sessions.coordinator()
        await coordinator.fetch(space, id)
        receipts = receipts_of(id, coordinator.show(space, id).num_turns)
        await coordinator.delete(space, id)
        sessions.figures.forget(space, id)
        try:
            await in_thread(forget_receipts, space, receipts)
        except StoreError as error:
            message = f"{id!r} is deleted, but not its receipts, which have hashes and numbers alone ({error})"
            raise StoreError(f"{message}: those of newer answers take their place") from error
        return {"id": id, "object": "coordination.session", "deleted": True}


def _running(router: APIRouter, sessions: Sessions, streams: StreamSettings, observer: Observer) -> None:
    async def followed(
        play: Callable[[Sessions, str, str, T], Awaitable[Events]], space: str, id: str, body: T
    ) -> Events:
        events = await play(sessions, space, id, body)
        is_there = partial(sessions.has, space, id)
        return receipted(observed(events, observer, sessions.figures, space, id, is_there=is_there), id)

    @router.post("/{id}/turn", response_model=Run)
    async def run_turn(request: Request, space: Space, id: SessionId, body: TurnBody | None = None) -> dict[str, Any]:
        """Have one agent speak, and wait for the end. An unfinished turn is resumed first."""
        return await whole(request, id, await followed(_turn, space, id, body), streams)

    @router.post("/{id}/turn/stream", **STREAM)
    async def stream_turn(request: Request, space: Space, id: SessionId, body: TurnBody | None = None) -> Response:
        """Have one agent speak, and stream it token by token."""
        return await streamed(request, await followed(_turn, space, id, body), streams)

    @router.post("/{id}/round", response_model=Run)
    async def run_round(request: Request, space: Space, id: SessionId, body: RoundBody | None = None) -> dict[str, Any]:
        """Have the topology's speakers, or these, speak, and wait for the end. An unfinished round is resumed."""
        return await whole(request, id, await followed(_round, space, id, body), streams)

    @router.post("/{id}/round/stream", **STREAM)
    async def stream_round(request: Request, space: Space, id: SessionId, body: RoundBody | None = None) -> Response:
        """Have the topology's speakers, or these, speak, and stream it token by token."""
        return await streamed(request, await followed(_round, space, id, body), streams)

    @router.post("/{id}/vote", response_model=Run)
    async def run_vote(request: Request, space: Space, id: SessionId, body: VoteBody | None = None) -> dict[str, Any]:
        """Put a question to the agents and wait for the decision. Without a question, resume an unfinished vote."""
        return await whole(request, id, await followed(_vote, space, id, body), streams)

    @router.post("/{id}/vote/stream", **STREAM)
    async def stream_vote(request: Request, space: Space, id: SessionId, body: VoteBody | None = None) -> Response:
        """Put a question to the agents and stream the ballots token by token."""
        return await streamed(request, await followed(_vote, space, id, body), streams)


async def _turn(sessions: Sessions, namespace: str, id: str, body: TurnBody | None) -> Events:
    asked, coordinator = body or TurnBody(), await sessions.coordinator()
    to, sampling = audience_of(asked.to), sampling_of(asked.sampling)
    return coordinator.turn(namespace, id, speaker=asked.speaker, to=to, sampling=sampling, topology=asked.topology)


async def _round(sessions: Sessions, namespace: str, id: str, body: RoundBody | None) -> Events:
    asked, coordinator = body or RoundBody(), await sessions.coordinator()
    to, sampling, speakers = audience_of(asked.to), sampling_of(asked.sampling), names_of(asked.speakers)
    return coordinator.round(namespace, id, speakers=speakers, to=to, sampling=sampling, topology=asked.topology)


async def _vote(sessions: Sessions, namespace: str, id: str, body: VoteBody | None) -> Events:
    asked, coordinator = body or VoteBody(), await sessions.coordinator()
    voters, sampling = names_of(asked.voters), sampling_of(asked.sampling)
    with _params_renamed(text="question"):
        return coordinator.vote(namespace, id, question_of(asked), voters=voters, sampling=sampling)


def _messaging(router: APIRouter, sessions: Sessions, streams: StreamSettings) -> None:
    async def send(namespace: str, id: str, body: MessageBody, *, stop: Stop = "nothing") -> dict[str, Any]:
        coordinator = await sessions.coordinator()
        with _params_renamed(by="from"):
            message = await coordinator.post_message(
                namespace, id, body.text, by=body.by, to=audience_of(body.to), stop=stop
            )
        return asdict(message)

    @router.get("/{id}/messages", response_model=MessageList)
    async def list_messages(
        space: Space,
        id: SessionId,
        hears: Annotated[str | None, Query(description="only messages that this agent heard, or sent")] = None,
        after: Annotated[int, Query(ge=-1, le=MOST_NUMBER, description="only later numbers than this")] = -1,
    ) -> dict[str, Any]:
        """The messages in order: from agents, from the host, from outside."""
        coordinator = await sessions.coordinator()
        await coordinator.fetch(space, id)
        found = coordinator.messages(space, id, hears=hears, after=after + 1)
        imported = coordinator.imported(space, id)
        return {"object": "list", "data": [_listed(sessions, space, id, each, imported) for each in found]}

    @router.post("/{id}/messages", response_model=MessageEntry)
    async def put_message(space: Space, id: SessionId, body: MessageBody) -> dict[str, Any]:
        """Send a message. A speaking agent hears it after its own turn; no agent has to answer."""
        return await send(space, id, body)

    @router.post("/{id}/whisper", response_model=MessageEntry)
    async def whisper(space: Space, id: SessionId, body: WhisperBody) -> dict[str, Any]:
        """Send a message that only some agents hear; the others never see it."""
        return await send(space, id, body)

    @router.post("/{id}/interrupt", response_model=MessageEntry)
    async def interrupt(space: Space, id: SessionId, body: InterruptBody) -> dict[str, Any]:
        """Interrupt the running turns (what was said so far stays), or the rest of the round, and send a message."""
        return await send(space, id, body, stop=body.stop)

    @router.get("/{id}/events", **STREAM)
    async def follow(request: Request, space: Space, id: SessionId) -> Response:
        """Stream the session's events from now on, whichever client causes them; for any number of watchers."""
        coordinator = await sessions.coordinator()
        await coordinator.fetch(space, id)
        return await listened(request, receipted(coordinator.events(space, id), id), streams)


def _listed(
    sessions: Sessions, namespace: str, id: str, message: Utterance, imported: frozenset[int]
) -> dict[str, Any]:
    figures = sessions.figures.of(namespace, id, message.turn)
    own = None if message.turn in imported else message.turn
    return {**asdict(message), **figures, "receipt": receipt_of(id, own)}


def _changing(router: APIRouter, sessions: Sessions) -> None:
    @router.post("/{id}/agents/{name}/fork", response_model=SessionDetail)
    async def fork(space: Space, id: SessionId, agent: Agent, body: ForkBody) -> dict[str, Any]:
        """Add an agent that remembers and has heard all that this one has; no KV is copied."""
        coordinator = await sessions.coordinator()
        return detailed(await coordinator.fork(space, id, agent, body.target, persona=body.persona))

    @router.post("/{id}/agents/{name}/rewind", response_model=SessionDetail)
    async def rewind(space: Space, id: SessionId, agent: Agent, body: RewindBody | None = None) -> dict[str, Any]:
        """Make an agent forget its last turns and what it heard since; others keep what they heard of it."""
        coordinator = await sessions.coordinator()
        return detailed(await coordinator.rewind(space, id, agent, (body or RewindBody()).turns))

    @router.post("/{id}/agents/{name}/merge", response_model=SessionDetail)
    async def merge(space: Space, id: SessionId, agent: Agent, body: MergeBody) -> dict[str, Any]:
        """Give an agent the messages that another sent and heard and it did not."""
        return detailed(await (await sessions.coordinator()).merge(space, id, body.source, agent))

    @router.get("/{id}/compare", response_model=Comparison)
    async def compare(
        space: Space, id: SessionId, agents: Annotated[str, Query(description="two names, separated by a comma")]
    ) -> dict[str, Any]:
        """Where the messages of two agents diverge, and how much of their prompts they share."""
        names = [name.strip() for name in agents.split(",")]
        return await (await sessions.coordinator()).compare(space, id, names)
