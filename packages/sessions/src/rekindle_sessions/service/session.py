"""One live session: its machine, its journal, its listeners and its watchers.

    event ──▶ machine ──▶ directives, immediately
       └────▶ journal ──▶ a future: the event may be published only when it is done

Owns the order of events: they are written as they were applied. If a write fails, the session reverts to the state in
the file (`reload`). A closed session accepts no more events. For one event loop.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rekindle.agent_ids import check_new_agent_id
from rekindle.engine.api import Engine
from rekindle.engine.types import Reuse
from rekindle.errors import RekindleError, StoreError
from rekindle.text.messages import Message
from rekindle_sessions.log.codec import check_readable
from rekindle_sessions.log.journal import Durable, Journal, failure, written
from rekindle_sessions.log.records import SavedSession, SessionRecords
from rekindle_sessions.log.usage import Quota
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.types import (
    Directive,
    Entry,
    Event,
    Hear,
    Merged,
    MessagePosted,
    Participant,
    Rewound,
    TurnEnded,
    Utterance,
)
from rekindle_sessions.service.events import SessionEvent, Standing
from rekindle_sessions.service.interruptions import Answer
from rekindle_sessions.service.listeners import Listening
from rekindle_sessions.service.turn import Speaker

MOST_UNREAD = 4096  # events that a watcher may have queued


def agent_of(session: str, name: str, identity: str | None) -> str:
    """Return the id of an agent's memory: its identity if permanent, else the session's id and the agent's name."""
    if identity is not None:
        return identity
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return f"{session}/{escaped}"


def check_agents(session: str, named: Iterable[tuple[str, str | None]]) -> None:
    """Raise BadRequest for (name, identity or None) pairs that do not give a valid new agent id."""
    for name, identity in named:
        check_new_agent_id(agent_of(session, name, identity), where="agents")


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
    """How much of a session is durable, and so may be shown."""

    num_utterances: int
    num_decisions: int
    num_participants: int
    num_rounds: int
    num_turns: int

    @classmethod
    def of(cls, machine: Coordination) -> Shown:
        """Return the counts of everything in the machine."""
        said, decided = len(machine.utterances), len(machine.decisions)
        return cls(said, decided, len(machine.participants), machine.num_rounds, machine.num_turns)


class ActiveRun(Protocol):
    """The run in progress, as seen by those who did not start it."""

    def announce(self, event: SessionEvent, durable: Durable) -> bool:
        """Publish an outside event in order among the run's own events; False: the run is over."""
        ...

    def interrupt(self, message: MessagePosted) -> Answer:
        """End all current turns with the text so far, and post `message` after them."""
        ...

    async def drop(self) -> None:
        """End all current turns with the text so far, and start no more."""
        ...

    async def stop(self) -> None:
        """Cancel within a step and wait for the end; turns stay begun."""
        ...


class Session:
    """A session restored from its saved form. `shown`: how much is durable; `closed`: why it accepts no more events.

    `imported`: the numbers of the turns that ended on another server.
    `changing` is locked while participants change; `spoke_last_at` is when the last turn's last delta came; `journal`
    writes its events to the file.
    """

    def __init__(self, shared: SessionContext, saved: SavedSession) -> None:
        """Raises RekindleError if the events are inconsistent."""
        self.namespace = saved.namespace
        self.id = saved.id
        self.created = saved.created
        self.last_use = saved.last_use
        self.number = saved.number
        self.shared = shared
        self.machine = _folded(saved)
        self.shown = Shown.of(self.machine)
        brought = saved.events[: saved.num_imported]
        self.imported = frozenset(event.turn for event in brought if isinstance(event, TurnEnded))
        self.listening = self._listeners()
        self.run: ActiveRun | None = None  # the run in progress
        self.spoke_last_at: float | None = None
        self.closed: RekindleError | None = None
        self.changing = asyncio.Lock()
        self._saved = saved
        self.journal = Journal(shared.records, shared.writer, saved.number, len(saved.events))
        self._reloading = asyncio.Lock()
        self._watchers: set[asyncio.Queue[SessionEvent | None]] = set()

    def _listeners(self) -> Listening:
        me = weakref.ref(self)  # an unreferenced session must be freed immediately

        def held() -> Session:
            session = me()
            assert session is not None, "a session with listeners is held"
            return session

        def prompt(name: str, partial: Entry | None) -> tuple[Message, ...]:
            return held().machine.prompt(name, partial=partial, cue=False)

        def agent(name: str) -> str:
            return held().agent(name)

        return Listening(self.shared.engine, self.namespace, prompt=prompt, agent=agent, owner=held)

    @property
    def is_idle(self) -> bool:
        """Whether it can be dropped from memory without loss: the file has all of its state."""
        is_quiet = self.run is None and not self._watchers and not self.changing.locked()
        return is_quiet and self.listening.is_idle and self.journal.is_settled

    def agent(self, name: str) -> str:
        """Return the id of a participant's memory in the engine."""
        return agent_of(self.id, name, self.machine.participants[name].agent)

    def speaker(self, name: str) -> Speaker:
        """Return a participant as the engine needs it."""
        reuse: Reuse | None = None if self.machine.plan.reuse == "on" else "off"
        return Speaker(self.namespace, self.agent(name), self.machine.stops(name), reuse)

    @property
    def listens(self) -> bool:
        """Whether listeners prefill what is said as it is said."""
        return self.machine.plan.listen == "now" and self.machine.plan.reuse == "on"

    def commit(self, event: Event) -> tuple[list[Directive], Durable]:
        """Apply and write an event; return its directives and a future of its durability (StoreError if it fails).

        Raises what the machine raises, BadRequest for an event that could not be read back; then nothing has changed.
        """
        if (refusal := self.closed or self.journal.failed) is not None:
            raise refusal
        check_readable(event)
        done = self.machine.apply(event)
        for each in done:
            if isinstance(each, Hear):
                self.listening.heard(each.listeners)
        if isinstance(event, Merged):
            self._mark_pending([event.target])
        elif isinstance(event, Rewound):
            self.listening.num_tokens.pop(event.name, None)
            self._mark_pending([event.name])
        self.last_use = self.shared.clock()
        durable = self.journal.write(event, self.last_use)
        durable.add_done_callback(partial(self._show, Shown.of(self.machine)))
        return done, durable

    def _show(self, shown: Shown, durable: Durable) -> None:
        if failure(durable) is None:
            self.shown = shown

    async def reload(self) -> None:
        """After a failed write, revert to the state in the file, ending the run.

        Raises StoreError if the file cannot be read.
        """
        async with self._reloading:
            if self.journal.failed is not None:
                await self.stop()
                events = await self.journal.reread()
                self.machine = _folded(replace(self._saved, events=events))
                self.shown = Shown.of(self.machine)
                self.journal.resume(len(events))
                self.mark_pending()

    async def written(self) -> None:
        """Wait until all events so far are durable; StoreError if a write fails."""
        await written(self.journal.last)

    def said(self, hears: str | None = None) -> list[Utterance]:
        """Return the durable utterances by number; with `hears`, those that reached that participant."""
        said = self.machine.utterances if hears is None else self.machine.heard_by(hears)
        return [each for each in said if each.number < self.shown.num_utterances]

    def participants(self) -> dict[str, Participant]:
        """Return the durable participants, in order."""
        return dict(list(self.machine.participants.items())[: self.shown.num_participants])

    def close(self, why: RekindleError) -> None:
        """Refuse further events with `why`."""
        self.closed = why

    def reopen(self) -> None:
        """Undo `close`: accept events again."""
        self.closed = None
        self.mark_pending()
        self.catch_up()

    async def stop(self) -> None:
        """Stop speakers and listeners; turns stay begun."""
        if self.run is not None:
            await self.run.stop()
        await self.listening.stop()

    def publish(self, event: SessionEvent) -> None:
        """Send an event to all watchers; disconnect those that do not keep up."""
        for queue in list(self._watchers):
            if queue.qsize() >= MOST_UNREAD:
                self._watchers.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def watch(self) -> asyncio.Queue[SessionEvent | None]:
        """Return a queue of all events from now on; None ends it."""
        queue: asyncio.Queue[SessionEvent | None] = asyncio.Queue()
        self._watchers.add(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[SessionEvent | None]) -> None:
        """Remove a watcher's queue."""
        self._watchers.discard(queue)

    def end_watching(self) -> None:
        """End and remove all watchers' queues."""
        for queue in self._watchers:
            queue.put_nowait(None)
        self._watchers.clear()

    def catch_up(self, *, but: Sequence[str] = ()) -> None:
        """Have listeners prefill what they heard; who speaks soonest goes first."""
        if self.listens and self.closed is None and self.journal.failed is None:
            names = list(self.machine.participants)
            soonest = self.machine.expected()
            first = names.index(soonest[0]) if soonest else 0
            self.listening.catch_up([*soonest, *names[first:], *names[:first]], but=but)

    def mark_pending(self) -> None:
        """Mark every participant as having entries to prefill."""
        self._mark_pending(self.machine.participants)

    def _mark_pending(self, names: Iterable[str]) -> None:
        context = self.machine.context
        self.listening.heard([name for name in names if context(name)[-1].kind != "said"])

    def standing(self) -> dict[str, Standing]:
        """Return the agents by name."""
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
        """Assert the invariants of the machine and the listeners."""
        self.machine.check()
        self.listening.check()


def _folded(saved: SavedSession) -> Coordination:
    try:
        return Coordination.fold(saved.plan, saved.preludes, saved.events)
    except RekindleError as error:
        raise StoreError(f"session {saved.id} cannot be restored: {error}") from error
