"""The observer interface: events in the life of a request, and how several observers receive them.

Owns the events: a request began, a delta arrived, a choice finished, the request failed. Observers turn them into log
lines, metrics, the history of an agent or a recording. All are called on the event loop and return at once; none may
fail a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.server.gate.caller import Caller
from rekindle.text.messages import Message


class ReplyId(NamedTuple):
    """Where a reply is in its answer: `answer` is the id that the client got, None in a dialect without ids."""

    answer: str | None
    choice: int

    def receipt(self, request_id: str | None) -> str | None:
        """Return under which id its receipt is kept: without one of the answer under the request's."""
        return self.answer or request_id


class RequestWatch(Protocol):
    """Follows one request. Ends with one `finished` per choice, or with `failed`; ignores what it does not override."""

    def delta(self, choice: int, delta: Delta) -> None:
        """Handle a delta, as the engine emitted it."""
        return

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Handle the end of a choice; `number`: its generation's id, `reply`: as a client would send it back; `id`:
        None for a turn that is no answer of its own."""

    def failed(self, number: int | None, error: Exception) -> None:
        """Handle a failure; `number` None: the request never reached the engine."""
        return


class Observer(Protocol):
    """Follows requests."""

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RequestWatch:
        """Follow a new request; `body`: its JSON, empty if unreadable; `num_bytes`: the size of the raw body."""


class ObserverGroup:
    """Passes each event to several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RequestWatch:
        """Follow a request with every observer."""
        return _Watches([observer.began(caller, endpoint, body, num_bytes=num_bytes) for observer in self._observers])


class _Watches(RequestWatch):
    def __init__(self, watches: Sequence[RequestWatch]) -> None:
        self._watches = watches

    def delta(self, choice: int, delta: Delta) -> None:
        for watch in self._watches:
            watch.delta(choice, delta)

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        for watch in self._watches:
            watch.finished(number, report, reason, reply=reply, id=id)

    def failed(self, number: int | None, error: Exception) -> None:
        for watch in self._watches:
            watch.failed(number, error)
