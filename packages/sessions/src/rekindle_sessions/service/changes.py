"""Changes to a session from outside: post messages, drop rounds, fork agents.

A change must run to completion even if the caller is cancelled: callers run it as a separate task.
"""

from __future__ import annotations

import asyncio
import contextlib

from rekindle.errors import NotFound
from rekindle.worker import contained
from rekindle_sessions.log.journal import written
from rekindle_sessions.machine.participants import check_look
from rekindle_sessions.machine.types import Event, Forked, Hear, MessagePosted, RoundDropped, Utterance
from rekindle_sessions.service.events import of_utterance
from rekindle_sessions.service.interruptions import Answer
from rekindle_sessions.service.session import ActiveRun, Session, agent_of


async def apply_event(session: Session, event: Event) -> list[Utterance]:
    """Apply an event that starts no turn; return its utterances once they are durable."""
    await session.reload()
    directives, durable = session.commit(event)
    heard = [each.utterance for each in directives if isinstance(each, Hear)]
    run = session.run
    unannounced = [each for each in heard if run is None or not run.announce(of_utterance(each), durable)]
    await written(durable)
    if session.run is None:
        session.catch_up()
    for each in unannounced:
        session.publish(of_utterance(each))
    return heard


async def post(session: Session, message: MessagePosted, pending: Answer | None) -> Utterance:
    """Post a message; `pending`: after the turns interrupted for it, if the run is still active when they end."""
    if pending is not None and (done := await pending) is not None:
        await written(done.durable)
        return done.utterance
    (said,) = await apply_event(session, message)
    return said


async def drop_round(session: Session, run: ActiveRun | None, message: MessagePosted) -> Utterance:
    """Drop the round that `run` plays, or an unfinished one, then post `message`; a run begun since continues."""
    if run is not None:
        await run.drop()
    await session.reload()
    if session.run is None and session.machine.is_unfinished:
        await apply_event(session, RoundDropped())
    (said,) = await apply_event(session, message)
    return said


async def fork(session: Session, event: Forked) -> None:
    """Add a participant with the KV of another; on failure everything is undone."""
    async with session.changing:
        await session.reload()
        session.machine.check_fork(event)
        check_look(event.target, session.machine.names, param="name")
        target = agent_of(session.id, event.target, None)
        await asyncio.to_thread(contained(_fork_kv), session, session.agent(event.source), target)
        try:
            await apply_event(session, event)
        except BaseException:
            await session.listening.stop()  # it may have begun to prefill what it heard
            await asyncio.to_thread(contained(_forget_kv), session, target)
            session.mark_pending()
            if session.run is None:
                session.catch_up()
            raise


def _fork_kv(session: Session, source: str, target: str) -> None:
    _forget_kv(session, target)  # leftovers of a process that died during a fork
    with contextlib.suppress(NotFound):  # nothing was ever computed for it
        session.shared.engine.agent(source, namespace=session.namespace).fork(target)


def _forget_kv(session: Session, agent: str) -> None:
    with contextlib.suppress(NotFound):
        session.shared.engine.agent(agent, namespace=session.namespace).delete()
