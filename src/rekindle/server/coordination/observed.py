"""Turns of sessions told to those who follow requests: the log, the metrics, each agent's history; figures are kept.

A turn is a request of its speaker's memory, and fails with the status that a request would. Only the run is followed,
not whoever watches it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from rekindle.agents.sessions.events import SessionEvent
from rekindle.errors import Cancelled, RekindleError
from rekindle.server.coordination.figures import Figures
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import Observer, RequestWatch
from rekindle.text.messages import Message

ENDPOINT = "/v1/coordination/sessions"


async def observed(
    events: AsyncGenerator[SessionEvent, None], observer: Observer, figures: Figures, namespace: str, session: str
) -> AsyncGenerator[SessionEvent, None]:
    """The same events; each turn is followed from its start to its end, or to the end of the run and for its reason."""
    watches: dict[int, RequestWatch] = {}
    why: RekindleError = Cancelled("the run ended before the turn did")
    try:
        async with aclosing(events):
            async for event in events:
                _follow(event, watches, observer, namespace)
                if event.kind == "turn_complete":
                    figures.note(namespace, session, event)
                yield event
    except RekindleError as error:
        why = error
        raise
    finally:
        for watch in watches.values():
            watch.failed(None, why)


def _follow(event: SessionEvent, watches: dict[int, RequestWatch], observer: Observer, namespace: str) -> None:
    spoken, turn = event.spoken, event.data.get("turn", 0)
    if event.kind == "turn_start" and spoken is not None:
        watches[turn] = observer.began(Caller(namespace, spoken.agent, False), ENDPOINT, {})
    elif event.kind == "turn_complete" and spoken is not None and turn in watches:
        assert spoken.report is not None and spoken.finish is not None and spoken.request is not None, event
        said = Message("assistant", event.data["text"])
        watches.pop(turn).finished(spoken.request, spoken.report, spoken.finish, reply=said)
    elif event.kind == "turn_failed" and spoken is not None and turn in watches:
        assert spoken.error is not None, event
        watches.pop(turn).failed(spoken.request, spoken.error)
