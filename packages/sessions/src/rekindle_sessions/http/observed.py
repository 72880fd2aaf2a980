"""Reports turns of sessions to the observers of requests (log, metrics, each agent's history, receipts) and stores
their figures.

A turn counts as a request of its speaker and fails with the status that a request would. Only the run is reported, not
its watchers. The receipt of a turn is under the id of its session and its number: SESSION.NUMBER.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from rekindle.errors import Cancelled, RekindleError
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import Observer, ReplyId, RequestWatch
from rekindle.text.messages import Message
from rekindle_sessions.service.events import SessionEvent

ENDPOINT = "/v1/coordination/sessions"
MOST_TURNS = 4_096
FIELDS = ("rekindle", "gap_ms", "first_token_ms", "taken_in_tokens")  # of turn_complete
UNKNOWN: dict[str, Any] = dict.fromkeys(FIELDS)


# What recent turns reused and how long they took, for later requests.
#
# Held in memory, for the last turns since the server started; transcripts do not depend on it.


class Figures:
    """The figures of turns, by session and number; for one event loop."""

    def __init__(self, most: int = MOST_TURNS) -> None:
        self._most = most
        self._turns: dict[tuple[str, str, int], dict[str, Any]] = {}

    def note(self, namespace: str, session: str, complete: SessionEvent) -> None:
        """Store the figures of a complete turn; beyond the bound the oldest are dropped."""
        self._turns[namespace, session, complete.data["turn"]] = {name: complete.data[name] for name in FIELDS}
        if len(self._turns) > self._most:
            del self._turns[next(iter(self._turns))]

    def of(self, namespace: str, session: str, turn: int | None) -> dict[str, Any]:
        """The figures of a turn; all None if they are unknown, or if the message was not part of a turn."""
        return UNKNOWN if turn is None else self._turns.get((namespace, session, turn), UNKNOWN)

    def forget(self, namespace: str, session: str) -> None:
        """Drop the figures of a deleted session."""
        for key in [key for key in self._turns if key[:2] == (namespace, session)]:
            del self._turns[key]


def receipt_of(session: str, turn: int | None) -> str | None:
    """Return the id of a turn's receipt; None for a message that was not part of a turn."""
    return None if turn is None else f"{session}.{turn}"


def receipts_of(session: str, num_turns: int) -> list[str]:
    """Return the ids of the receipts of a session's first turns."""
    return [f"{session}.{turn}" for turn in range(1, num_turns + 1)]


async def receipted(events: AsyncGenerator[SessionEvent, None], session: str) -> AsyncGenerator[SessionEvent, None]:
    """Pass events on; each end of a turn names its receipt."""
    async with aclosing(events):
        async for event in events:
            if event.kind == "turn_complete":
                event = replace(event, data=event.data | {"receipt": receipt_of(session, event.data["turn"])})
            yield event


async def observed(
    events: AsyncGenerator[SessionEvent, None],
    observer: Observer,
    figures: Figures,
    namespace: str,
    session: str,
    *,
    is_there: Callable[[], bool],
) -> AsyncGenerator[SessionEvent, None]:
    """Pass events on; report each turn from its start to its end, or as failed with the error that ended the run.

    A session that `is_there` no more, as it was deleted while its reader was slow, gets no figures and no receipts.
    """
    watches: dict[int, RequestWatch] = {}
    why: RekindleError = Cancelled("the run ended before the turn did")
    try:
        async with aclosing(events):
            async for event in events:
                is_kept = event.kind == "turn_complete" and is_there()
                receipt = receipt_of(session, event.data["turn"]) if is_kept else None
                _follow(event, watches, observer, namespace, receipt)
                if is_kept:
                    figures.note(namespace, session, event)
                yield event
    except RekindleError as error:
        why = error
        raise
    finally:
        for watch in watches.values():
            watch.failed(None, why)


def _follow(
    event: SessionEvent, watches: dict[int, RequestWatch], observer: Observer, namespace: str, receipt: str | None
) -> None:
    spoken, turn = event.spoken, event.data.get("turn", 0)
    if event.kind == "turn_start" and spoken is not None:
        watches[turn] = observer.began(Caller(namespace, spoken.agent), ENDPOINT, {})
    elif event.kind == "turn_complete" and spoken is not None and turn in watches:
        assert spoken.report is not None and spoken.finish is not None and spoken.request is not None, event
        reply, where = Message("assistant", event.data["text"]), None if receipt is None else ReplyId(receipt, 0)
        watches.pop(turn).finished(spoken.request, spoken.report, spoken.finish, reply=reply, id=where)
    elif event.kind == "turn_failed" and spoken is not None and turn in watches:
        assert spoken.error is not None, event
        watches.pop(turn).failed(spoken.request, spoken.error)
