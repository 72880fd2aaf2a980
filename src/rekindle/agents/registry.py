"""Which sessions there are, and that one thing at a time is played in each.

Owns the sessions in memory, by namespace and id, and how they come and go. What is said in them is others' business.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from rekindle.agents.comparing import measured_extension
from rekindle.agents.joining import check_plan
from rekindle.agents.records import Kept, Memory
from rekindle.agents.remembering import brought, check_apart, forget_kv, held_by, kept_of
from rekindle.agents.session import Desk, Session, check_agents
from rekindle.agents.speaking import sampling_of
from rekindle.agents.telling import Extension, SessionInfo
from rekindle.agents.types import Plan, Prelude
from rekindle.errors import BadRequest, Cancelled, Conflict, NotFound, RekindleError, StoreError
from rekindle.text.messages import check_json

logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_SESSIONS = 10_000  # all of them are held in memory
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Registry:
    """The sessions of one coordinator."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._sessions: dict[tuple[str, str], Session] = {}
        self._extension: Extension | None = None
        self._creating = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def load(self) -> None:
        """Bring back what is kept; a session that cannot be had again stays in the file, and is said loudly."""
        for kept in await self._in_writer(self._desk.records.sessions):
            try:
                self._sessions[kept.namespace, kept.id] = Session(self._desk, kept)
            except RekindleError as error:
                logger.error("session %s of %s cannot be gone on with: %s", kept.id, kept.namespace, error)
        self._extension = await asyncio.to_thread(measured_extension, self._desk.engine)

    async def close(self) -> None:
        """Stop whoever speaks or listens, let what was asked for come to its end, and the writing thread finish."""
        self._is_closed = True
        for session in self._sessions.values():
            session.close(Cancelled("the service of sessions is closed"))
        await asyncio.gather(*(session.stop() for session in self._sessions.values()))
        while self._tasks:
            await asyncio.wait(self._tasks)
        for session in self._sessions.values():
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
        return await asyncio.get_running_loop().run_in_executor(self._desk.writer, work, *args)

    async def create(self, namespace: str, plan: Plan, id: str) -> Session:
        """Begin a session, durably; BadRequest, Conflict where the id is taken, StoreError."""
        async with self._creating:  # so that each is checked against those before it
            self._check_new(namespace, plan, id)
            now, held = self._desk.clock(), held_by(plan, self._all_of(namespace))
            number, preludes = await self._in_writer(self._write_new, namespace, id, plan, held, now)
            session = Session(self._desk, Kept(number, namespace, id, now, now, plan, preludes, ()))
            self._sessions[namespace, id] = session
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
        if len(self._sessions) >= MOST_SESSIONS:
            raise BadRequest(f"there are {MOST_SESSIONS} sessions: delete some first")
        check_json(asdict(plan), "plan")
        sampling_of(dict(plan.sampling))
        check_plan(plan)
        check_agents(id, ((each.name, each.agent) for each in plan.participants))
        check_apart(id, plan, self._all_of(namespace))

    def _write_new(
        self, namespace: str, id: str, plan: Plan, held: list[tuple[int, Memory]], now: float
    ) -> tuple[int, dict[str, Prelude]]:
        """On the writing thread, as forgetting is: what is forgotten meanwhile is forgotten of this session, too."""
        preludes = brought(plan, held, self._desk.records, namespace)
        return self._desk.records.create(namespace, id, plan, preludes, now), preludes

    async def forget(self, namespace: str, agent: str) -> None:
        """Have a permanent agent bring nothing of what was until now into later sessions; StoreError."""
        await self._in_writer(self._desk.records.forget, namespace, agent)

    async def delete(self, namespace: str, id: str) -> None:
        """Forget a session, KV first; from now on nobody finds it, unless the disk refuses (StoreError)."""
        session = self.found(namespace, id)
        session.close(_no_session(id))
        try:
            async with session.changing:
                await session.stop()
                await self._reload(session)
                await asyncio.to_thread(forget_kv, session)
                await self._in_writer(self._desk.records.delete, session.number, namespace, kept_of(session))
        except BaseException:
            session.reopen()
            raise
        if self._sessions.get((namespace, id)) is session:  # another may have got the id by now
            del self._sessions[namespace, id]
        session.end_watching()

    async def _reload(self, session: Session) -> None:
        """Before it is deleted, so that nobody remembers what was not durable; one that cannot be read goes, too."""
        try:
            await session.reload()
        except StoreError as error:
            logger.warning("session %s of %s is deleted as it was last known: %s", session.id, session.namespace, error)

    def of(self, namespace: str) -> list[Session]:
        """The sessions of a namespace, the oldest first."""
        return [session for session in self._all_of(namespace) if session.closed is None]

    def _all_of(self, namespace: str) -> list[Session]:
        """Those with them that are being deleted: until they are, their agents remember what was said in them."""
        return [session for (space, _), session in self._sessions.items() if space == namespace]

    def found(self, namespace: str, id: str) -> Session:
        """One session; raises NotFound."""
        session = self._sessions.get((namespace, id))
        if session is None:
            raise _no_session(id)
        if session.closed is not None:
            raise session.closed
        return session

    async def ready(self, namespace: str, id: str) -> Session:
        """One session in which nothing is being played, as it is in the file; NotFound, Conflict, StoreError."""
        session = self.found(namespace, id)
        await session.reload()
        self.found(namespace, id)
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
        for session in self._sessions.values():
            session.check()
        self._desk.records.check()


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Of what nobody waits for any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("what was asked for of a session failed when nobody waited for it any more: %s", error)


def _no_session(id: str) -> NotFound:
    return NotFound(f"no session {id!r}", param="id")
