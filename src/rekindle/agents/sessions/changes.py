"""What somebody does to a session from outside: puts words in, gives up a round, has agents forked.

What was asked for is done to its end, whether or not whoever asked still waits: callers run it as a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib

from rekindle.agents.log.journal import written
from rekindle.agents.machine.participants import check_look
from rekindle.agents.machine.types import Event, Forked, Hear, MessagePosted, RoundDropped, Utterance
from rekindle.agents.sessions.events import of_utterance
from rekindle.agents.sessions.interruptions import Answer
from rekindle.agents.sessions.session import ActiveRun, Session, agent_of
from rekindle.errors import NotFound
from rekindle.worker import contained


async def happen(session: Session, event: Event) -> list[Utterance]:
    """Let something happen that has nobody speak; what was said with it, once it is durable."""
    await session.reload()
    directives, durable = session.commit(event)
    heard = [each.utterance for each in directives if isinstance(each, Hear)]
    run = session.run
    left = [each for each in heard if run is None or not run.announce(of_utterance(each), durable)]
    await written(durable)
    if session.run is None:
        session.catch_up()
    for each in left:
        session.tell(of_utterance(each))
    return heard


async def put_in(session: Session, told: MessagePosted, pending: Answer | None) -> Utterance:
    """Say something; `pending`: behind the turns that were cut for it, if one of them ends while it is played."""
    if pending is not None and (done := await pending) is not None:
        await written(done.durable)
        return done.utterance
    (said,) = await happen(session, told)
    return said


async def give_up(session: Session, run: ActiveRun | None, told: MessagePosted) -> Utterance:
    """Have nobody speak any more of what `run` plays, or was left unfinished, and say why; a later run goes on."""
    if run is not None:
        await run.drop()
    await session.reload()
    if session.run is None and session.machine.is_unfinished:
        await happen(session, RoundDropped())
    (said,) = await happen(session, told)
    return said


async def fork(session: Session, event: Forked) -> None:
    """Have somebody join with the KV of another; where it cannot be, nothing of it stays."""
    async with session.changing:
        await session.reload()
        session.machine.check_fork(event)
        check_look(event.target, session.machine.names, param="name")
        target = agent_of(session.id, event.target, None)
        await asyncio.to_thread(contained(_fork_kv), session, session.agent(event.source), target)
        try:
            await happen(session, event)
        except BaseException:
            await session.listening.stop()  # it may have begun to take in what it heard
            await asyncio.to_thread(contained(_forget_kv), session, target)
            session.fall_behind()
            if session.run is None:
                session.catch_up()
            raise


def _fork_kv(session: Session, source: str, target: str) -> None:
    _forget_kv(session, target)  # what a process may have left that ended in the middle of this
    with contextlib.suppress(NotFound):  # it never came to computing anything
        session.desk.engine.fork(source, target, namespace=session.namespace)


def _forget_kv(session: Session, agent: str) -> None:
    with contextlib.suppress(NotFound):
        session.desk.engine.delete(agent, namespace=session.namespace)
