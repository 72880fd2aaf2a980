"""How sessions come and go, and that one thing at a time is played in each.

Which there are and which are in memory `loaded` knows. What is said in them is others' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict
from typing import Any, TypeVar

from rekindle.agents.log.codec import check_readable, packed
from rekindle.agents.log.inventory import Card
from rekindle.agents.log.records import Memory, SavedSession
from rekindle.agents.log.usage import SESSION_BYTES
from rekindle.agents.machine.participants import check_new_plan
from rekindle.agents.machine.types import Plan, Prelude
from rekindle.agents.sessions.comparison import measured_extension
from rekindle.agents.sessions.events import Extension, SessionInfo
from rekindle.agents.sessions.loaded import LoadedSessions, no_session
from rekindle.agents.sessions.permanent_agents import brought, check_apart, forget_kv, held_by, kept_of
from rekindle.agents.sessions.session import Session, SessionContext, check_agents
from rekindle.agents.sessions.turn import sampling_of
from rekindle.errors import BadRequest, Cancelled, Conflict, NotFound, StoreError
from rekindle.text.messages import check_json
from rekindle.worker import contained

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Registry:
    """The sessions of one coordinator. `creating` is held while one is made."""

    def __init__(self, desk: SessionContext) -> None:
        self._desk = desk
        self.sessions = LoadedSessions(desk)
        self._extension: Extension | None = None
        self.creating = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def load(self) -> None:
        """Learn which sessions there are; each is read when it is first asked for."""
        for card in await self._in_writer(self._desk.records.cards):
            self.sessions.know(card)
        self._extension = await asyncio.to_thread(contained(measured_extension), self._desk.engine)

    async def close(self) -> None:
        """Stop whoever speaks or listens, let what was asked for come to its end, and the writing thread finish."""
        self._is_closed = True
        sessions = self.sessions.live()
        for session in sessions:
            session.close(Cancelled("the service of sessions is closed"))
        await asyncio.gather(*(session.stop() for session in sessions))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for session in self.sessions.live():
            session.end_watching()
        await asyncio.to_thread(self._desk.writer.shutdown)

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; it goes on to its end where the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_log_failure)
            raise

    async def _in_writer(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._desk.writer, contained(work), *args)

    async def create(self, namespace: str, plan: Plan, id: str) -> Session:
        """Begin a session, durably; BadRequest, Conflict where the id is taken, StoreError."""
        async with self.creating:  # so that each is checked against those before it
            self._check_new(namespace, plan, id)
            permanent = [each.agent for each in plan.participants if each.agent is not None]
            sessions = await self.sessions.with_agents(namespace, permanent)
            now, held = self._desk.clock(), held_by(plan, sessions)
            number, preludes = await self._in_writer(self._write_new, namespace, id, plan, held, now)
            session = Session(self._desk, SavedSession(number, namespace, id, now, now, plan, preludes, ()))
            self.sessions.add(Card.of(number, namespace, id, plan), session)
        if self._is_closed:
            session.close(Cancelled("the service of sessions is closed"))
        session.fall_behind()
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
        """Raise QuotaExceeded where a namespace may not have so much more."""
        used = self._desk.records.usage.of(namespace)
        self._desk.quota.check(namespace, used, sessions=sessions, num_bytes=num_bytes)

    def _write_new(
        self, namespace: str, id: str, plan: Plan, held: list[tuple[int, Memory]], now: float
    ) -> tuple[int, dict[str, Prelude]]:
        """On the writing thread, as forgetting is: what is forgotten meanwhile is forgotten of this session, too."""
        preludes = brought(plan, held, self._desk.records, namespace)
        num_bytes = SESSION_BYTES + len(packed(plan).encode()) + len(packed(preludes).encode())
        self.check_room(namespace, sessions=1, num_bytes=num_bytes)
        return self._desk.records.create(namespace, id, plan, preludes, now), preludes

    async def forget(self, namespace: str, agent: str) -> None:
        """Have a permanent agent bring nothing of what was until now into later sessions; StoreError."""
        await self._in_writer(self._desk.records.forget, namespace, agent)

    async def delete(self, namespace: str, id: str) -> None:
        """Forget a session, KV first; from now on nobody finds it, unless the disk refuses (StoreError)."""
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
        """On the writing thread. What agents would remember beyond their namespace's bound is lost, which is logged."""
        records, most = self._desk.records, self._desk.quota.num_bytes
        fit, used = [], records.usage.of(session.namespace).num_bytes - records.usage.size(session.number)
        for memory in kept_of(session):
            used += 0 if memory.prelude is None else len(packed(memory.prelude).encode())
            if most is None or used <= most:
                fit.append(memory)
            else:
                logger.warning("%s does not remember session %s: its namespace is full", memory.agent, session.id)
        records.delete(session.number, session.namespace, fit)

    async def _reload(self, session: Session) -> None:
        """Before it is deleted, so that nobody remembers what was not durable; one that cannot be read goes, too."""
        try:
            await session.reload()
        except StoreError as error:
            logger.warning("session %s of %s is deleted as it was last known: %s", session.id, session.namespace, error)

    def of(self, namespace: str) -> Iterator[Session]:
        """The sessions of a namespace, the oldest first, each read when it is its turn."""
        for card in self.sessions.cards(namespace):
            with contextlib.suppress(NotFound, Cancelled):  # it is being deleted
                yield self.found(namespace, card.id)

    async def fetched(self, namespace: str) -> AsyncIterator[Session]:
        """The same, without keeping the event loop waiting for the file."""
        for card in self.sessions.cards(namespace):
            try:
                yield await self.fetch(namespace, card.id)
            except (NotFound, Cancelled):
                continue

    def found(self, namespace: str, id: str) -> Session:
        """One session, read at once where it is not in memory; NotFound, StoreError."""
        return _open(self.sessions.get(namespace, id))

    async def fetch(self, namespace: str, id: str) -> Session:
        """The same, without keeping the event loop waiting for the file."""
        return _open(await self.sessions.fetch(namespace, id))

    async def ready(self, namespace: str, id: str) -> Session:
        """One session in which nothing is being played, as it is in the file; NotFound, Conflict, StoreError."""
        session = await self.fetch(namespace, id)
        await session.reload()
        _open(session)
        if session.run is not None:
            raise Conflict("somebody is speaking in this session: wait for the end, or interrupt it")
        return session

    def info(self, session: Session) -> SessionInfo:
        """How a session stands: what was said and done as far as it is durable, who speaks as it is now."""
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
        """Assert what must hold of every session and of the file."""
        self.sessions.check()
        self._desk.records.check()


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Of what nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("what was asked for of a session failed when nobody waited for it any more: %s", error)


def _open(session: Session) -> Session:
    if session.closed is not None:
        raise session.closed
    return session
