"""Reports turns of sessions to the observers of requests (log, metrics, each agent's history) and stores their figures.

A turn counts as a request of its speaker and fails with the status that a request would. Only the run is reported, not
its watchers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from rekindle.errors import Cancelled, RekindleError
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import Observer, RequestWatch
from rekindle.text.messages import Message
from rekindle_sessions.http.figures import Figures
from rekindle_sessions.service.events import SessionEvent

ENDPOINT = "/v1/coordination/sessions"


async def observed(
    events: AsyncGenerator[SessionEvent, None], observer: Observer, figures: Figures, namespace: str, session: str
) -> AsyncGenerator[SessionEvent, None]:
    """Pass events on; report each turn from its start to its end, or as failed with the error that ended the run."""
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
        watches[turn] = observer.began(Caller(namespace, spoken.agent), ENDPOINT, {})
    elif event.kind == "turn_complete" and spoken is not None and turn in watches:
        assert spoken.report is not None and spoken.finish is not None and spoken.request is not None, event
        reply = Message("assistant", event.data["text"])
        watches.pop(turn).finished(spoken.request, spoken.report, spoken.finish, reply=reply)
    elif event.kind == "turn_failed" and spoken is not None and turn in watches:
        assert spoken.error is not None, event
        watches.pop(turn).failed(spoken.request, spoken.error)
