"""One session that is held: its machine, its rows in the file, its listeners, and who watches it.

    event ──▶ machine ──▶ directives, at once
       └────▶ journal ──▶ a future: only then anybody may be told of it

Owns the order of events: as they were applied, so they are written. Where one cannot be written the session goes back
to what is in the file (`reload`). A session that is closed takes nothing more. For one event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rekindle.agent_ids import check_agent_id
from rekindle.agents.log.codec import check_readable
from rekindle.agents.log.journal import Durable, Journal, failure, written
from rekindle.agents.log.records import SavedSession, SessionRecords
from rekindle.agents.log.usage import Quota
from rekindle.agents.machine.coordination import Coordination
from rekindle.agents.machine.types import (
    Directive,
    Entry,
    Event,
    Hear,
    Merged,
    MessagePosted,
    Participant,
    Rewound,
    Utterance,
)
from rekindle.agents.sessions.events import SessionEvent, Standing
from rekindle.agents.sessions.interruptions import Answer
from rekindle.agents.sessions.listeners import Listening
from rekindle.agents.sessions.turn import Speaker
from rekindle.engine.api import Engine
from rekindle.engine.types import Reuse
from rekindle.errors import RekindleError, StoreError
from rekindle.text.messages import Message

MOST_UNREAD = 4096  # events that a watcher may be behind


def agent_of(session: str, name: str, identity: str | None) -> str:
    """The id of an agent's memory: its own where it outlives the session, else the session's and its name."""
    if identity is not None:
        return identity
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return f"{session}/{escaped}"


def check_agents(session: str, named: Iterable[tuple[str, str | None]]) -> None:
    """Refuse names, each with an identity or none, that cannot be an agent's id."""
    for name, identity in named:
        check_agent_id(agent_of(session, name, identity), where="agents")


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What all sessions of one coordinator share."""

    engine: Engine
    records: SessionRecords
    writer: Executor  # one thread
    clock: Callable[[], float]
    timer: Callable[[], float]
    quota: Quota


@dataclass(frozen=True, slots=True)
class Shown:
    """How much of a session is durable: what anybody may be shown of what was said and done in it."""

    num_utterances: int
    num_decisions: int
    num_participants: int
    num_rounds: int
    num_turns: int

    @classmethod
    def of(cls, machine: Coordination) -> Shown:
        """All of it."""
        said, decided = len(machine.utterances), len(machine.decisions)
        return cls(said, decided, len(machine.participants), machine.num_rounds, machine.num_turns)


class ActiveRun(Protocol):
    """What is being played in a session, as those may deal with it who did not begin it."""

    def announce(self, event: SessionEvent, durable: Durable) -> bool:
        """Report what somebody else did, in its place among the run's own events; False: the run is over."""
        ...

    def interrupt(self, told: MessagePosted) -> Answer:
        """End the turns of all who speak with what was said by now, and put this in after them."""
        ...

    async def drop(self) -> None:
        """End the turns of all who speak, and have nobody speak after them."""
        ...

    async def stop(self) -> None:
        """Cancel within a step and wait for the end; turns stay begun."""
        ...


class Session:
    """A session made of what was kept of it. `shown`: how much of it is durable; `closed`: why it takes nothing more.

    `changing` is held by whoever changes who takes part; `spoke_last_at` is when the last turn said its last; `journal`
    takes its events to the file.
    """

    def __init__(self, desk: SessionContext, kept: SavedSession) -> None:
        """Raises RekindleError where the events do not fit together."""
        self.namespace = kept.namespace
        self.id = kept.id
        self.created = kept.created
        self.last_use = kept.last_use
        self.number = kept.number
        self.desk = desk
        self.machine = _folded(kept)
        self.shown = Shown.of(self.machine)
        self.listening = self._listeners()
        self.run: ActiveRun | None = None  # what is being played
        self.spoke_last_at: float | None = None
        self.closed: RekindleError | None = None
        self.changing = asyncio.Lock()
        self._kept = kept
        self.journal = Journal(desk.records, desk.writer, kept.number, len(kept.events))
        self._reloading = asyncio.Lock()
        self._watchers: set[asyncio.Queue[SessionEvent | None]] = set()

    def _listeners(self) -> Listening:
        me = weakref.ref(self)  # a session that nobody has is to leave memory at once

        def held() -> Session:
            session = me()
            assert session is not None, "a session with listeners is held"
            return session

        def prompt(name: str, partial: Entry | None) -> tuple[Message, ...]:
            return held().machine.prompt(name, partial=partial, cue=False)

        def agent(name: str) -> str:
            return held().agent(name)

        return Listening(self.desk.engine, self.namespace, prompt=prompt, agent=agent, owner=held)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost if it leaves memory: it can be read from the file as it is."""
        is_quiet = self.run is None and not self._watchers and not self.changing.locked()
        return is_quiet and self.listening.is_idle and self.journal.is_settled

    def agent(self, name: str) -> str:
        """The id of a participant's memory in the engine."""
        return agent_of(self.id, name, self.machine.participants[name].agent)

    def speaker(self, name: str) -> Speaker:
        """A participant as the engine needs it."""
        reuse: Reuse | None = None if self.machine.plan.reuse == "on" else "off"
        return Speaker(self.namespace, self.agent(name), self.machine.stops(name), reuse)

    @property
    def listens(self) -> bool:
        """Whether others take in at once what is said."""
        return self.machine.plan.listen == "now" and self.machine.plan.reuse == "on"

    def commit(self, event: Event) -> tuple[list[Directive], Durable]:
        """Let an event happen; what is to be done now, and when it is durable (StoreError where it cannot be).

        Raises what the machine does, BadRequest for an event that could not be read back: then nothing has happened.
        """
        if (refusal := self.closed or self.journal.failed) is not None:
            raise refusal
        check_readable(event)
        done = self.machine.apply(event)
        for each in done:
            if isinstance(each, Hear):
                self.listening.heard(each.listeners)
        if isinstance(event, Merged):
            self._fall_behind([event.target])
        elif isinstance(event, Rewound):
            self.listening.num_tokens.pop(event.name, None)
            self._fall_behind([event.name])
        self.last_use = self.desk.clock()
        durable = self.journal.write(event, self.last_use)
        durable.add_done_callback(partial(self._show, Shown.of(self.machine)))
        return done, durable

    def _show(self, shown: Shown, durable: Durable) -> None:
        if failure(durable) is None:
            self.shown = shown

    async def reload(self) -> None:
        """After a failed write: be what is in the file again, which ends what is played.

        Raises StoreError while that cannot be read.
        """
        async with self._reloading:
            if self.journal.failed is not None:
                await self.stop()
                events = await self.journal.reread()
                self.machine = _folded(replace(self._kept, events=events))
                self.shown = Shown.of(self.machine)
                self.journal.resume(len(events))
                self.fall_behind()

    async def written(self) -> None:
        """Wait until all that has happened by now is durable; StoreError where it cannot be."""
        await written(self.journal.last)

    def said(self, hears: str | None = None) -> list[Utterance]:
        """All that was said and is durable, by number; with `hears` what reached that participant."""
        said = self.machine.utterances if hears is None else self.machine.heard_by(hears)
        return [each for each in said if each.number < self.shown.num_utterances]

    def participants(self) -> dict[str, Participant]:
        """Who takes part, in order."""
        return dict(list(self.machine.participants.items())[: self.shown.num_participants])

    def close(self, why: RekindleError) -> None:
        """Nothing may happen any more."""
        self.closed = why

    def reopen(self) -> None:
        """It goes on after all."""
        self.closed = None
        self.fall_behind()
        self.catch_up()

    async def stop(self) -> None:
        """Have whoever speaks or listens end; turns stay begun."""
        if self.run is not None:
            await self.run.stop()
        await self.listening.stop()

    def tell(self, event: SessionEvent) -> None:
        """Let everybody know who watches; who does not keep up is let go."""
        for queue in list(self._watchers):
            if queue.qsize() >= MOST_UNREAD:
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def watch(self) -> asyncio.Queue[SessionEvent | None]:
        """A queue of what happens from now on; None ends it."""
        queue: asyncio.Queue[SessionEvent | None] = asyncio.Queue()
        self._watchers.add(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[SessionEvent | None]) -> None:
        """This one does not look any more."""
        self._watchers.discard(queue)

    def end_watching(self) -> None:
        """Nothing will happen any more."""
        for queue in self._watchers:
            queue.put_nowait(None)
        self._watchers.clear()

    def catch_up(self, *, but: Sequence[str] = ()) -> None:
        """Have listeners take in what they heard; who speaks soonest goes first."""
        if self.listens and self.closed is None and self.journal.failed is None:
            names = list(self.machine.participants)
            soonest = self.machine.expected()
            first = names.index(soonest[0]) if soonest else 0
            self.listening.catch_up([*soonest, *names[first:], *names[:first]], but=but)

    def fall_behind(self) -> None:
        """Nobody has taken in what it heard."""
        self._fall_behind(self.machine.participants)

    def _fall_behind(self, names: Iterable[str]) -> None:
        context = self.machine.context
        self.listening.heard([name for name in names if context(name)[-1].kind != "said"])

    def standing(self) -> dict[str, Standing]:
        """The agents, by name."""
        listening = self.listening
        return {
            name: Standing(
                name,
                self.agent(name),
                each.agent is not None,
                listening.num_tokens.get(name),
                listening.computed_ever[name],
            )
            for name, each in self.participants().items()
        }

    def check(self) -> None:
        """Assert what must hold of the machine and the listeners."""
        self.machine.check()
        self.listening.check()


def _folded(kept: SavedSession) -> Coordination:
    machine = Coordination(kept.plan, kept.preludes)
    for number, event in enumerate(kept.events):
        try:
            machine.apply(event)
        except RekindleError as error:
            raise StoreError(f"event {number} of session {kept.id} does not fit those before it: {error}") from error
    return machine
