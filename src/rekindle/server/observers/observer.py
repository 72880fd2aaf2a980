"""What is to be known of a request while it lives: who is told, and when.

Owns the moments: it began, a delta came, a choice finished, it failed. Each observer makes of them what it is for: a
line in the log, figures, the last requests of an agent, a recording. All are told on the event loop and return at
once; none may fail a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.server.gate.caller import Caller
from rekindle.text.messages import Message


class RequestWatch(Protocol):
    """Follows one request. Ends with one `finished` per choice, or with `failed`."""

    def delta(self, choice: int, delta: Delta) -> None:
        """A delta came, as the engine gave it."""

    def finished(self, number: int, report: Report, reason: FinishReason, *, reply: Message) -> None:
        """A choice is whole; `number` is the id of its generation, `said` the reply as a caller would send it back."""

    def failed(self, number: int | None, error: Exception) -> None:
        """It has no result; `number` None: it never got as far as the engine."""


class Observer(Protocol):
    """Whoever wants to follow requests."""

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RequestWatch:
        """A request came; `body` is its JSON, empty where it could not be read, and came as `num_bytes`."""


class ObserverGroup:
    """Tells several observers, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> RequestWatch:
        """Tell all."""
        return _Watches([observer.began(caller, endpoint, body, num_bytes=num_bytes) for observer in self._observers])


class _Watches:
    def __init__(self, watches: Sequence[RequestWatch]) -> None:
        self._watches = watches

    def delta(self, choice: int, delta: Delta) -> None:
        for watch in self._watches:
            watch.delta(choice, delta)

    def finished(self, number: int, report: Report, reason: FinishReason, *, reply: Message) -> None:
        for watch in self._watches:
            watch.finished(number, report, reason, reply=reply)

    def failed(self, number: int | None, error: Exception) -> None:
        for watch in self._watches:
            watch.failed(number, error)
