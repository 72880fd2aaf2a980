"""Session service: one per event loop, over one engine and one file.

    coordinator = Coordinator(engine, SessionRecords.open(path))
    await coordinator.start()
    info = await coordinator.create("default", Plan((Participant("Ada"), Participant("Ben"))))
    async for event in coordinator.round("default", info.id): ...

Owns the set of sessions, at most one run at a time in each, and the memories that permanent agents carry between
sessions. Plain methods return a snapshot immediately; coroutines run to completion even if the caller is cancelled. All
must be called on the event loop on which `start` ran. Only durable state is shown, except for the text being generated.

`turn`, `round` and `vote` raise errors on their first step. Closing them early stops the speakers within a step and
keeps their turns begun; `turn` and `round` resume unfinished turns, as does `vote` without a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Literal

from rekindle.engine.api import Engine
from rekindle.errors import BadRequest, Cancelled, NotFound
from rekindle.text.messages import check_json, check_text
from rekindle.worker import contained
from rekindle_sessions.log.exported import ExportedSession
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.log.usage import Quota
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.decisions import Question
from rekindle_sessions.machine.participants import check_look
from rekindle_sessions.machine.rounds import RoundRequest
from rekindle_sessions.machine.types import (
    Audience,
    Event,
    Forked,
    Merged,
    MessagePosted,
    Plan,
    Rewound,
    Speak,
    Topology,
    Utterance,
    VoteBegun,
)
from rekindle_sessions.service import changes
from rekindle_sessions.service.comparison import Picture, compared
from rekindle_sessions.service.events import SessionEvent, SessionInfo
from rekindle_sessions.service.fitting import check_fits
from rekindle_sessions.service.registry import Registry
from rekindle_sessions.service.run import Run, check_no_vote
from rekindle_sessions.service.session import SessionContext, check_agents
from rekindle_sessions.service.turn import sampling_of

__all__ = ["Coordinator", "SessionEvent", "SessionInfo"]
NO_QUOTA = Quota()
Sampling = Mapping[str, Any] | None
Events = AsyncGenerator[SessionEvent, None]


class Coordinator:
    """The sessions stored in `records`, run on `engine`. `clock` gives wall time, `timer` measures gaps.

    `quota` limits each namespace; exceeding it raises QuotaExceeded.

    Closing it closes neither engine nor records. `registry` holds the sessions, `shared` their common context.
    """

    def __init__(
        self,
        engine: Engine,
        records: SessionRecords,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
        quota: Quota = NO_QUOTA,
    ) -> None:
        writer = ThreadPoolExecutor(1, thread_name_prefix="rekindle-sessions")
        self.shared = SessionContext(engine, records, writer, clock, timer, quota)
        self.registry = Registry(self.shared)

    async def start(self) -> None:
        """Load the index of sessions; each session is read from the file on first use."""
        await self.registry.load()

    async def close(self) -> None:
        """Stop speakers and listeners; turns stay begun. All published events are durable. Closing twice is safe."""
        await self.registry.close()

    # Sessions.

    async def create(self, namespace: str, plan: Plan, *, id: str | None = None) -> SessionInfo:
        """Begin a session; nobody speaks yet. Its permanent agents bring their memories.

        Raises BadRequest for an invalid plan, Conflict if the id is taken.
        """
        name = uuid.uuid4().hex[:12] if id is None else id
        return self.registry.info(await self.registry.run_to_completion(self.registry.create(namespace, plan, name)))

    async def export(self, namespace: str, id: str) -> ExportedSession:
        """Return what a session is the fold of, as far as it is durable; NotFound, StoreError."""
        session = await self.registry.fetch(namespace, id)
        await session.reload()
        await session.written()
        return await self.registry.run_to_completion(self.registry.exported(session))

    async def take_in(self, namespace: str, past: ExportedSession, *, id: str) -> SessionInfo:
        """Continue a session from elsewhere under this id, with whatever memory its agents have here.

        Raises BadRequest for one that cannot be, Conflict if the id is taken; nothing has changed then.
        """
        coming = self.registry.create(namespace, past.plan, id, past)
        return self.registry.info(await self.registry.run_to_completion(coming))

    async def listed(self, namespace: str) -> list[SessionInfo]:
        """Return every session of a namespace, oldest first."""
        return [self.registry.info(session) async for session in self.registry.fetched(namespace)]

    async def with_agent(self, namespace: str, agent: str) -> tuple[str, ...]:
        """Return the ids of the sessions that an agent takes part in, oldest first; reads at most one of them."""
        owner = agent.partition("/")[0]  # of an ephemeral agent
        found = []
        for card in self.registry.sessions.cards(namespace):
            if agent in card.agents or (card.id == owner != agent and await self._has(namespace, owner, agent)):
                found.append(card.id)
        return tuple(found)

    async def _has(self, namespace: str, id: str, agent: str) -> bool:
        with contextlib.suppress(NotFound, Cancelled):  # it is being deleted
            session = await self.registry.fetch(namespace, id)
            return agent in {each.agent for each in self.registry.info(session).agents.values()}
        return False

    async def fetch(self, namespace: str, id: str) -> None:
        """Load a session into memory, so that the next call need not wait for the file; raises NotFound."""
        await self.registry.fetch(namespace, id)

    def show(self, namespace: str, id: str) -> SessionInfo:
        """Return one session; raises NotFound."""
        return self.registry.info(self.registry.found(namespace, id))

    async def delete(self, namespace: str, id: str) -> None:
        """Stop and delete a session: the KV of its ephemeral agents, then its record.

        Permanent agents keep their KV and memories. Raises NotFound, StoreError.
        """
        await self.registry.run_to_completion(self.registry.delete(namespace, id))

    async def forget(self, namespace: str, agent: str) -> None:
        """Make a permanent agent bring nothing of earlier sessions into later ones; existing sessions continue.

        Raises StoreError: call it again then.
        """
        await self.registry.run_to_completion(self.registry.forget(namespace, agent))

    def messages(self, namespace: str, id: str, *, hears: str | None = None, after: int = 0) -> list[Utterance]:
        """Return utterances from number `after` on; with `hears`, those that reached that agent, including its own."""
        said = self.registry.found(namespace, id).said(hears)
        return [each for each in said if each.number >= after]

    def imported(self, namespace: str, id: str) -> frozenset[int]:
        """Return the numbers of a session's turns that ended on another server."""
        return self.registry.found(namespace, id).imported

    async def compare(self, namespace: str, id: str, names: Sequence[str]) -> dict[str, Any]:
        """Return where the contexts of two agents diverge, and how many tokens their prompts share."""
        if len(names) != 2:
            raise BadRequest(f"name two agents to be compared, not {len(names)}", param="agents")
        session = await self.registry.fetch(namespace, id)
        await session.reload()
        one, other = (Picture.of(session.machine, name) for name in names)
        await session.written()
        return await asyncio.to_thread(contained(compared), self.shared.engine, one, other)

    # Runs.

    def turn(
        self,
        namespace: str,
        id: str,
        *,
        speaker: str | None = None,
        to: Audience = None,
        sampling: Sampling = None,
        topology: Topology | None = None,
    ) -> Events:
        """Have one agent speak, or resume unfinished turns; `to` limits who hears it."""

        def begun(machine: Coordination) -> Event | None:
            if machine.is_unfinished and speaker in (None, *(turn.speaker for turn in machine.begun())):
                check_no_vote(machine)
                return None
            return machine.next_turn(RoundRequest(None if speaker is None else (speaker,), to, topology))

        return self._played(namespace, id, begun, sampling)

    def round(
        self,
        namespace: str,
        id: str,
        *,
        speakers: Sequence[str] | None = None,
        to: Audience = None,
        sampling: Sampling = None,
        topology: Topology | None = None,
    ) -> Events:
        """Play a round of the topology, or resume an unfinished one."""

        def begun(machine: Coordination) -> Event | None:
            if machine.is_unfinished and speakers is None:
                check_no_vote(machine)
                return None
            return machine.next_round(RoundRequest(None if speakers is None else tuple(speakers), to, topology))

        return self._played(namespace, id, begun, sampling)

    def vote(
        self,
        namespace: str,
        id: str,
        question: Question | None,
        *,
        voters: Sequence[str] | None = None,
        sampling: Sampling = None,
    ) -> Events:
        """Put a question to the voters (None: everybody); without a question, resume an unfinished vote."""

        def begun(machine: Coordination) -> Event | None:
            if question is not None:
                check_json(asdict(question), "question")
                self.registry.check_room(namespace, num_bytes=len(str(question).encode()))
                return VoteBegun(question, tuple(machine.participants if voters is None else voters))
            if machine.voting is None:
                raise BadRequest("no vote is under way: put a question", param="question")
            return None

        return self._played(namespace, id, begun, sampling, says="" if question is None else question.text)

    async def _played(
        self, namespace: str, id: str, begun: Callable[[Coordination], Event | None], sampling: Sampling, says: str = ""
    ) -> Events:
        """Yield events until the machine has no more directives; `begun` returns the event to begin with, which `says`
        a text.

        None: resume the turns that have begun and not ended.
        """
        await check_fits(self.shared.engine, [says])
        session = await self.registry.ready(namespace, id)
        self.registry.check_room(namespace, num_bytes=1)
        event = begun(session.machine)
        defaults = self.shared.engine.sampling.named("llama-server")
        run = Run(session, sampling_of(defaults, dict(session.machine.plan.sampling), sampling or {}))
        if event is None:
            run.begin([Speak(turn) for turn in session.machine.begun()], None)
        else:
            run.begin(*session.commit(event))
        try:
            while (each := await run.events.get()) is not None:
                yield each
            await run.wait()
            run.result()
        finally:
            await run.stop()

    # Changes from outside.

    async def post_message(
        self,
        namespace: str,
        id: str,
        text: str,
        *,
        by: str | None = None,
        to: Audience = None,
        stop: Literal["nothing", "turn", "round"] = "nothing",
    ) -> Utterance:
        """Post a message, by the host unless `by` is given; in a participant's name it counts as its own words.

        `stop`: "turn" interrupts the current speakers, and all hear the message before anybody else speaks; "round"
        also drops the rest of the round. Durable when it returns.
        """
        check_text(text, "text")
        check_text(by or "", "by")
        await check_fits(self.shared.engine, [text])
        session = await self.registry.fetch(namespace, id)
        message, run = MessagePosted(session.machine.plan.host if by is None else by, text, to), session.run
        session.machine.check_message(message)
        if message.by not in session.machine.names:
            check_look(message.by, session.machine.names, param="by")
        self.registry.check_room(namespace, num_bytes=len(text.encode()))
        if stop == "round":
            return await self.registry.run_to_completion(changes.drop_round(session, run, message))
        pending = run.interrupt(message) if stop == "turn" and run is not None else None
        return await self.registry.run_to_completion(changes.post(session, message, pending))

    async def fork(self, namespace: str, id: str, source: str, target: str, *, persona: str = "") -> SessionInfo:
        """Add an agent with the context and KV of another; it lives as long as the session."""
        session = await self.registry.fetch(namespace, id)
        check_json([target, persona], "name")
        check_agents(id, [(target, None)])
        await check_fits(self.shared.engine, [persona])
        self.registry.check_room(namespace, num_bytes=len(persona.encode()))
        await self.registry.run_to_completion(changes.fork(session, Forked(source, target, persona)))
        return self.registry.info(session)

    async def rewind(self, namespace: str, id: str, name: str, turns: int = 1) -> SessionInfo:
        """Make an agent forget its last turns and what it heard since; others keep what they heard."""
        return await self._changed(namespace, id, Rewound(name, turns))

    async def merge(self, namespace: str, id: str, source: str, target: str) -> SessionInfo:
        """Add to the context of `target` what `source` said and heard and it did not."""
        return await self._changed(namespace, id, Merged(source, target))

    async def _changed(self, namespace: str, id: str, event: Event) -> SessionInfo:
        session = await self.registry.fetch(namespace, id)
        await self.registry.run_to_completion(changes.apply_event(session, event))
        return self.registry.info(session)

    async def events(self, namespace: str, id: str) -> Events:
        """Yield all events of a session from now on; ends when the session is deleted."""
        session = await self.registry.fetch(namespace, id)
        queue = session.watch()
        try:
            while (each := await queue.get()) is not None:
                yield each
        finally:
            session.unwatch(queue)

    async def settle(self, namespace: str, id: str) -> None:
        """Wait until all listeners have prefilled what they can for now."""
        await (await self.registry.fetch(namespace, id)).listening.settle()

    def check(self) -> None:
        """Assert the invariants of every session and of the file."""
        self.registry.check()
