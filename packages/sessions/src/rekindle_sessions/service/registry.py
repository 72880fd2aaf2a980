"""Create, find and delete sessions, and allow at most one run at a time in each.

`loaded` knows which sessions exist and which are in memory. Their content is handled elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rekindle.errors import BadRequest, Cancelled, Conflict, NotFound, RekindleError, StoreError
from rekindle.text.messages import check_json
from rekindle.worker import contained
from rekindle_sessions.log.codec import check_readable, packed, packed_event
from rekindle_sessions.log.exported import ExportedSession, refused
from rekindle_sessions.log.inventory import Card
from rekindle_sessions.log.records import Memory, SavedSession, SessionRecords
from rekindle_sessions.log.usage import bytes_of
from rekindle_sessions.machine.coordination import Coordination
from rekindle_sessions.machine.participants import check_new_plan
from rekindle_sessions.machine.types import Plan, Prelude
from rekindle_sessions.service.comparison import measured_extension
from rekindle_sessions.service.events import Extension, SessionInfo
from rekindle_sessions.service.fitting import check_fits
from rekindle_sessions.service.loaded import LoadedSessions, no_session
from rekindle_sessions.service.session import Session, SessionContext, check_agents
from rekindle_sessions.service.turn import sampling_of

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


# Memories of permanent agents, which outlive sessions, and the KV of the others, which does not.
#
# A permanent agent joins a session with its current context in the session it was used in last, or with the memory
# saved when that session was deleted.


def held_by(plan: Plan, sessions: Sequence[Session]) -> list[tuple[int, Memory]]:
    """Return (session number, memory) of a plan's permanent agents in `sessions` of their namespace."""
    identities = [each.agent for each in plan.participants if each.agent is not None]
    found = ((session.number, _memory(session, agent)) for agent in identities for session in sessions)
    return [(number, memory) for number, memory in found if memory is not None]


def brought(
    plan: Plan, held: Sequence[tuple[int, Memory]], records: SessionRecords, namespace: str
) -> dict[str, Prelude]:
    """Return the preludes of a plan's permanent agents by name, from `held` and saved memories. Reads the file.

    An agent brings nothing from sessions it was made to forget, even if they continued afterwards.
    """
    preludes: dict[str, Prelude] = {}
    for each in plan.participants:
        if each.agent is None:
            continue
        saved = records.remembered(namespace, each.agent) or Memory(each.agent, 0.0, None)
        memories = [memory for number, memory in held if memory.agent == each.agent and number > saved.forgotten]
        if saved.prelude is not None:
            memories.append(saved)
        if memories and (prelude := max(memories, key=lambda memory: memory.at).prelude) is not None:
            preludes[each.name] = prelude
    return preludes


def check_apart(id: str, plan: Plan, sessions: Sequence[Card]) -> None:
    """Raise BadRequest if the id of a permanent agent would collide with that of an ephemeral agent of a session.

    The id of an ephemeral agent is the session's id, "/" and a name; `sessions` are the others of the namespace.
    """
    taken = {id, *(session.id for session in sessions)}
    for at, each in enumerate(plan.participants):
        owner, slash, _ = (each.agent or "").partition("/")
        if slash and owner in taken:
            message = f"{each.agent!r} would be an agent of the session {owner!r}: choose another identity"
            raise BadRequest(message, param=f"agents[{at}].agent")
    for session in sessions:
        for agent in session.agents:
            if agent.startswith(f"{id}/"):
                raise BadRequest(f"{agent!r} is a permanent agent: choose another id than {id!r}", param="id")


def memories_of(session: Session) -> list[Memory]:
    """Return the memories that a session's permanent agents keep when it is deleted."""
    identities = [each.agent for each in session.machine.participants.values() if each.agent is not None]
    return [memory for agent in identities if (memory := _memory(session, agent)) is not None]


def _memory(session: Session, agent: str) -> Memory | None:
    machine = session.machine
    for name, each in machine.participants.items():
        if each.agent == agent:
            return Memory(agent, session.last_use, _prelude(machine, name))
    return None


def _prelude(machine: Coordination, name: str) -> Prelude:
    return Prelude(machine.system(name), machine.context(name))


def forget_kv(session: Session) -> None:
    """Delete the KV of a session's ephemeral agents; raises StoreError."""
    for name, each in session.machine.participants.items():
        if each.agent is None:
            with contextlib.suppress(NotFound):  # nothing was ever computed for it
                session.shared.engine.agent(session.agent(name), namespace=session.namespace).delete()


class Registry:
    """The sessions of one coordinator. `creating` is locked while one is created."""

    def __init__(self, shared: SessionContext) -> None:
        self._shared = shared
        self.sessions = LoadedSessions(shared)
        self._extension: Extension | None = None
        self.creating = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def load(self) -> None:
        """Load the index of sessions; each session is read on first use."""
        for card in await self._in_writer(self._shared.records.cards):
            self.sessions.know(card)
        self._extension = await asyncio.to_thread(contained(measured_extension), self._shared.engine)

    async def close(self) -> None:
        """Stop speakers and listeners, wait for pending requests, and shut down the writing thread."""
        self._is_closed = True
        sessions = self.sessions.live()
        for session in sessions:
            session.close(Cancelled("the service of sessions is closed"))
        await asyncio.gather(*(session.stop() for session in sessions))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for session in self.sessions.live():
            session.end_watching()
        await asyncio.to_thread(self._shared.writer.shutdown)

    async def run_to_completion(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` to completion even if the caller is cancelled."""
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _in_writer(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._shared.writer, contained(work), *args)

    async def create(self, namespace: str, plan: Plan, id: str, past: ExportedSession | None = None) -> Session:
        """Begin a session durably, or continue one from elsewhere (`past`).

        BadRequest, Conflict if the id is taken, StoreError.
        """
        if past is not None:  # which may take seconds, in which others begin sessions
            self._check_new(namespace, plan, id)
            await asyncio.to_thread(contained(_check_past), past)
        async with self.creating:  # so that each is checked against earlier ones
            self._check_new(namespace, plan, id)
            personas = [each.persona for each in plan.participants]
            await check_fits(self._shared.engine, (plan.setting, plan.opening, *personas))
            now = self._shared.clock()
            if past is None:
                permanent = [each.agent for each in plan.participants if each.agent is not None]
                held = held_by(plan, await self.sessions.with_agents(namespace, permanent))
                number, preludes = await self._in_writer(self._write_new, namespace, id, plan, held, now)
                past = ExportedSession(plan, preludes, ())
            else:
                number = await self._in_writer(self._write_past, namespace, id, past, now)
            brought = past.preludes, past.events, len(past.events)
            saved = SavedSession(number, namespace, id, now, now, plan, *brought)
            session = await asyncio.to_thread(contained(Session), self._shared, saved)
            self.sessions.add(Card.of(number, namespace, id, plan), session)
        if self._is_closed:
            session.close(Cancelled("the service of sessions is closed"))
        session.mark_pending()
        session.catch_up()
        return session

    def _check_new(self, namespace: str, plan: Plan, id: str) -> None:
        if self._is_closed:
            raise Cancelled("the service of sessions is closed")
        if not _ID.fullmatch(id):
            raise BadRequest(f"{id!r} is no id: 1 to 64 letters, digits, '.', '_', '-'", param="id")
        self.check_room(namespace, sessions=1)
        check_json(asdict(plan), "plan")
        check_readable(plan)
        sampling_of(dict(plan.sampling))
        check_new_plan(plan)
        check_agents(id, ((each.name, each.agent) for each in plan.participants))
        check_apart(id, plan, self.sessions.cards(namespace))

    def check_room(self, namespace: str, *, sessions: int = 0, num_bytes: int = 0) -> None:
        """Raise QuotaExceeded if a namespace may not have this much more."""
        used = self._shared.records.usage.of(namespace)
        self._shared.quota.check(namespace, used, sessions=sessions, num_bytes=num_bytes)

    def _write_new(
        self, namespace: str, id: str, plan: Plan, held: list[tuple[int, Memory]], now: float
    ) -> tuple[int, dict[str, Prelude]]:
        """Runs on the writing thread, as `forget` does, so that a concurrent forget applies to this session too."""
        preludes = brought(plan, held, self._shared.records, namespace)
        return self._write_past(namespace, id, ExportedSession(plan, preludes, ()), now), preludes

    def _write_past(self, namespace: str, id: str, past: ExportedSession, now: float) -> int:
        """Write a session with what has happened in it; runs on the writing thread. BadRequest if that cannot be."""
        events = [packed_event(event) for event in past.events]
        num_bytes = bytes_of(packed(past.plan), packed(dict(past.preludes)), events)
        self.check_room(namespace, sessions=1, num_bytes=num_bytes)
        return self._shared.records.create(namespace, id, past.plan, past.preludes, now, past.events)

    async def exported(self, session: Session) -> ExportedSession:
        """Return what is in the file of a session; StoreError if that cannot be read."""
        try:
            saved = await self._in_writer(self._shared.records.session, session.number)
        except ValueError as error:
            raise StoreError(f"session {session.id} cannot be read: {error}") from error
        return ExportedSession(saved.plan, saved.preludes, saved.events)

    async def forget(self, namespace: str, agent: str) -> None:
        """Make a permanent agent bring nothing from before now into later sessions; StoreError."""
        await self._in_writer(self._shared.records.forget, namespace, agent)

    async def delete(self, namespace: str, id: str) -> None:
        """Delete a session, KV first; it cannot be found from now on, unless the disk fails (StoreError)."""
        session = await self.fetch(namespace, id)
        session.close(no_session(id))
        try:
            async with session.changing:
                await session.stop()
                await self._reload(session)
                await asyncio.to_thread(contained(forget_kv), session)
                await self._in_writer(self._delete, session)
        except BaseException:
            session.reopen()
            raise
        self.sessions.remove(session)
        session.end_watching()

    def _delete(self, session: Session) -> None:
        """Runs on the writing thread. Memories beyond the namespace's quota are dropped and logged."""
        records, most = self._shared.records, self._shared.quota.num_bytes
        fit, used = [], records.usage.of(session.namespace).num_bytes - records.usage.size(session.number)
        for memory in memories_of(session):
            used += 0 if memory.prelude is None else len(packed(memory.prelude).encode())
            if most is None or used <= most:
                fit.append(memory)
            else:
                logger.warning("%s does not remember session %s: its namespace is full", memory.agent, session.id)
        records.delete(session.number, session.namespace, fit)

    async def _reload(self, session: Session) -> None:
        """Reload before deleting, so that memories hold only durable state; an unreadable session is deleted too."""
        try:
            await session.reload()
        except StoreError as error:
            logger.warning("session %s of %s is deleted as it was last known: %s", session.id, session.namespace, error)

    async def fetched(self, namespace: str) -> AsyncIterator[Session]:
        """Yield the sessions of a namespace, oldest first, without blocking the event loop on the file."""
        for card in self.sessions.cards(namespace):
            try:
                yield await self.fetch(namespace, card.id)
            except (NotFound, Cancelled):  # it is being deleted
                continue

    def found(self, namespace: str, id: str) -> Session:
        """Return one session, read synchronously if it is not in memory; NotFound, StoreError."""
        return _open(self.sessions.get(namespace, id))

    async def fetch(self, namespace: str, id: str) -> Session:
        """Return one session without blocking the event loop on the file."""
        return _open(await self.sessions.fetch(namespace, id))

    async def ready(self, namespace: str, id: str) -> Session:
        """Return one session without an active run, as it is in the file; NotFound, Conflict, StoreError."""
        session = await self.fetch(namespace, id)
        await session.reload()
        _open(session)
        if session.run is not None:
            raise Conflict("somebody is speaking in this session: wait for the end, or interrupt it")
        return session

    def info(self, session: Session) -> SessionInfo:
        """Return the state of a session: its durable content, and who is speaking now."""
        machine, shown, extension = session.machine, session.shown, self._extension
        assert extension is not None, "the coordinator has not been started"
        return SessionInfo(
            id=session.id,
            namespace=session.namespace,
            plan=machine.plan,
            participants=tuple(session.participants().values()),
            created=session.created,
            last_use=session.last_use,
            num_messages=shown.num_utterances,
            num_rounds=shown.num_rounds,
            num_turns=shown.num_turns,
            is_unfinished=machine.is_unfinished,
            is_voting=machine.voting is not None,
            running=tuple(machine.begun()) if session.run is not None else (),
            expected=machine.expected(),
            decisions=tuple(machine.decisions[: shown.num_decisions]),
            agents=session.standing(),
            layout=extension,
        )

    def check(self) -> None:
        """Assert the invariants of every session and of the file."""
        self.sessions.check()
        self._shared.records.check()


def _check_past(past: ExportedSession) -> None:
    try:
        Coordination.fold(past.plan, past.preludes, past.events)
    except RekindleError as error:
        raise refused(str(error)) from error


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Log the failure of a task whose caller was cancelled."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("a request to a session failed after its caller was cancelled: %s", error)


def _open(session: Session) -> Session:
    if session.closed is not None:
        raise session.closed
    return session
