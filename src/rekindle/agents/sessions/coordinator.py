"""The service of sessions: one per event loop, over one engine and one file.

    coordinator = Coordinator(engine, SessionRecords.open(path))
    await coordinator.start()
    info = await coordinator.create("default", Plan((Participant("Ada"), Participant("Ben"))))
    async for event in coordinator.round("default", info.id): ...

Owns which sessions there are, that one thing at a time is played in each, and what permanent agents carry from one
session into the next. Methods that are no coroutines return at once, what they return is a picture of this moment;
coroutines do what was asked for to its end, whether or not whoever asked is cancelled meanwhile. All of them belong to
the event loop on which `start` ran. What is not durable is shown to nobody, but for the words of who is speaking.

`turn`, `round` and `vote` raise what is wrong from their first step on. Leaving them early stops the speakers within a
step and leaves their turns begun; `turn` and `round` go on with what is unfinished, so does `vote` without a question.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Literal

from rekindle.agents.log.records import SessionRecords
from rekindle.agents.log.usage import Quota
from rekindle.agents.machine.coordination import Coordination
from rekindle.agents.machine.decisions import Question
from rekindle.agents.machine.participants import check_look
from rekindle.agents.machine.rounds import RoundRequest
from rekindle.agents.machine.types import (
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
from rekindle.agents.sessions import changes
from rekindle.agents.sessions.comparison import Picture, compared
from rekindle.agents.sessions.events import SessionEvent, SessionInfo
from rekindle.agents.sessions.registry import Registry
from rekindle.agents.sessions.run import Run, check_no_vote
from rekindle.agents.sessions.session import SessionContext, check_agents
from rekindle.agents.sessions.turn import sampling_of
from rekindle.engine.api import Engine
from rekindle.errors import BadRequest
from rekindle.text.messages import check_json, check_text
from rekindle.worker import contained

__all__ = ["Coordinator", "SessionEvent", "SessionInfo"]
NO_QUOTA = Quota()
Sampling = Mapping[str, Any] | None
Events = AsyncGenerator[SessionEvent, None]


class Coordinator:
    """The sessions over `engine` that `records` keeps. `clock` is the wall's, `timer` measures gaps.

    `quota` is what each namespace may have; what would be more raises QuotaExceeded.

    Closing it closes neither engine nor records. `registry` holds the sessions, `desk` is what they share.
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
        self.desk = SessionContext(engine, records, writer, clock, timer, quota)
        self.registry = Registry(self.desk)

    async def start(self) -> None:
        """Learn which sessions there are; each is read from the file when it is first asked for."""
        await self.registry.load()

    async def close(self) -> None:
        """Stop whoever speaks or listens; turns stay begun. All that was told is durable. Closing twice is safe."""
        await self.registry.close()

    # Sessions.

    async def create(self, namespace: str, plan: Plan, *, id: str | None = None) -> SessionInfo:
        """Begin a session; nobody speaks yet. Its permanent agents bring what they remember.

        Raises BadRequest for a plan that is none, Conflict where the id is taken.
        """
        name = uuid.uuid4().hex[:12] if id is None else id
        return self.registry.info(await self.registry.whole(self.registry.create(namespace, plan, name)))

    def sessions(self, namespace: str) -> list[SessionInfo]:
        """Every session of a namespace, the oldest first."""
        return [self.registry.info(session) for session in self.registry.of(namespace)]

    async def listed(self, namespace: str) -> list[SessionInfo]:
        """The same, without keeping the event loop waiting for the file."""
        return [self.registry.info(session) async for session in self.registry.fetched(namespace)]

    async def fetch(self, namespace: str, id: str) -> None:
        """Have a session in memory, so that what is asked of it next need not wait for the file; raises NotFound."""
        await self.registry.fetch(namespace, id)

    def show(self, namespace: str, id: str) -> SessionInfo:
        """One session; raises NotFound."""
        return self.registry.info(self.registry.found(namespace, id))

    async def delete(self, namespace: str, id: str) -> None:
        """Forget a session, stopping what is played in it: ephemeral agents' KV, then what was said.

        Permanent agents keep their KV and what they remember. Raises NotFound, StoreError.
        """
        await self.registry.whole(self.registry.delete(namespace, id))

    async def forget(self, namespace: str, agent: str) -> None:
        """Have a permanent agent bring nothing of earlier sessions into later ones; those that are held go on.

        Raises StoreError, and then it is to be called again.
        """
        await self.registry.whole(self.registry.forget(namespace, agent))

    def messages(self, namespace: str, id: str, *, hears: str | None = None, after: int = 0) -> list[Utterance]:
        """What was said, from number `after` on; with `hears` what reached that agent, its own words included."""
        said = self.registry.found(namespace, id).said(hears)
        return [each for each in said if each.number >= after]

    async def compare(self, namespace: str, id: str, names: Sequence[str]) -> dict[str, Any]:
        """Where the contexts of two agents part, and how many tokens their prompts share."""
        if len(names) != 2:
            raise BadRequest(f"name two agents to be compared, not {len(names)}", param="agents")
        session = await self.registry.fetch(namespace, id)
        await session.reload()
        one, other = (Picture.of(session.machine, name) for name in names)
        await session.written()
        return await asyncio.to_thread(contained(compared), self.desk.engine, one, other)

    # What is played.

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
        """Have one agent speak, or go on with what is unfinished; `to` bounds who hears it."""

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
        """Have a round played as the topology says, or go on with what is unfinished."""

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
        """Put a question to the voters (None: everybody); without a question go on with an unfinished vote."""

        def begun(machine: Coordination) -> Event | None:
            if question is not None:
                check_json(asdict(question), "question")
                self.registry.check_room(namespace, num_bytes=len(str(question).encode()))
                return VoteBegun(question, tuple(machine.participants if voters is None else voters))
            if machine.voting is None:
                raise BadRequest("no vote is under way: put a question", param="question")
            return None

        return self._played(namespace, id, begun, sampling)

    async def _played(
        self, namespace: str, id: str, begun: Callable[[Coordination], Event | None], sampling: Sampling
    ) -> Events:
        """What happens until the machine wants nothing more; `begun` says with what event it begins.

        None: with the turns that have begun and not ended.
        """
        session = await self.registry.ready(namespace, id)
        self.registry.check_room(namespace, num_bytes=1)
        event = begun(session.machine)
        run = Run(session, sampling_of(dict(session.machine.plan.sampling), sampling or {}))
        if event is None:
            run.begin([Speak(turn) for turn in session.machine.begun()], None)
        else:
            run.begin(*session.commit(event))
        try:
            while (told := await run.told.get()) is not None:
                yield told
            await run.wait()
            run.result()
        finally:
            await run.stop()

    # What is said and done from outside.

    async def tell(
        self,
        namespace: str,
        id: str,
        text: str,
        *,
        by: str | None = None,
        to: Audience = None,
        stop: Literal["nothing", "turn", "round"] = "nothing",
    ) -> Utterance:
        """Say something, as the host unless it is `by` somebody; a participant's words become its own.

        `stop`: "turn" has whoever is speaking now end there, and all hear it before anybody else speaks; "round" has
        nobody speak after it either. Durable when it returns.
        """
        session = await self.registry.fetch(namespace, id)
        check_text(text, "text")
        check_text(by or "", "by")
        told, run = MessagePosted(session.machine.plan.host if by is None else by, text, to), session.run
        session.machine.check_message(told)
        if told.by not in session.machine.names:
            check_look(told.by, session.machine.names, param="by")
        self.registry.check_room(namespace, num_bytes=len(text.encode()))
        if stop == "round":
            return await self.registry.whole(changes.give_up(session, run, told))
        pending = run.interrupt(told) if stop == "turn" and run is not None else None
        return await self.registry.whole(changes.put_in(session, told, pending))

    async def fork(self, namespace: str, id: str, source: str, target: str, *, persona: str = "") -> SessionInfo:
        """Add an agent that remembers all that another does, its KV included; it lives as long as the session."""
        session = await self.registry.fetch(namespace, id)
        check_json([target, persona], "name")
        check_agents(id, [(target, None)])
        self.registry.check_room(namespace, num_bytes=len(persona.encode()))
        await self.registry.whole(changes.fork(session, Forked(source, target, persona)))
        return self.registry.info(session)

    async def rewind(self, namespace: str, id: str, name: str, turns: int = 1) -> SessionInfo:
        """Have an agent forget its last turns and what it heard since; others keep what they heard."""
        return await self._changed(namespace, id, Rewound(name, turns))

    async def merge(self, namespace: str, id: str, source: str, target: str) -> SessionInfo:
        """Have `target` take in what `source` said and heard that it did not."""
        return await self._changed(namespace, id, Merged(source, target))

    async def _changed(self, namespace: str, id: str, event: Event) -> SessionInfo:
        session = await self.registry.fetch(namespace, id)
        await self.registry.whole(changes.happen(session, event))
        return self.registry.info(session)

    async def events(self, namespace: str, id: str) -> Events:
        """What happens in a session from now on, whoever has it played; ends when the session does."""
        session = await self.registry.fetch(namespace, id)
        queue = session.watch()
        try:
            while (told := await queue.get()) is not None:
                yield told
        finally:
            session.unwatch(queue)

    async def settle(self, namespace: str, id: str) -> None:
        """Wait until everybody has taken in what can be taken in now."""
        await (await self.registry.fetch(namespace, id)).listening.settle()

    def check(self) -> None:
        """Assert what must hold of every session and of the file."""
        self.registry.check()
