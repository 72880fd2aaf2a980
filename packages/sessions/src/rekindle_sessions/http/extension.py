"""Sessions as an extension of the server: routes, a view of the page, and how an agent is deleted from a file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rekindle.server.extension import Context, Extension
from rekindle.server.gate.limits import kept_bytes
from rekindle.server.observers.log import TurnLog
from rekindle.server.observers.observer import ObserverGroup
from rekindle.store.files.keys import Given
from rekindle_sessions.http.models import RunEvent
from rekindle_sessions.http.routes import sessions_router
from rekindle_sessions.http.running import Sessions
from rekindle_sessions.http.streaming import StreamSettings
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.log.usage import Quota

PAGE = Path(__file__).absolute().parents[1] / "page"


def extension(context: Context) -> Extension:
    """The sessions of one application. Turns are not recorded: they have no body to replay."""
    quota = Quota(num_bytes=kept_bytes(context.engine, context.settings))
    sessions = Sessions(context.engine, clock=context.clock, quota=quota)
    observer = ObserverGroup([TurnLog(context.log), *context.observers])
    streams = StreamSettings(context.gate, context.settings.ping_s)
    router = sessions_router(sessions, streams, observer, forget_receipts=context.forget_receipts)
    return Extension("sessions", router, sessions, events=(RunEvent,), page=PAGE)


def forget(path: Path, namespace: str, agent: str, given: Given) -> None:
    """Delete what an agent remembers of sessions from a file that no server has open; StoreError."""
    with closing(SessionRecords.open(path, given=given)) as file:
        file.forget(namespace, agent)
