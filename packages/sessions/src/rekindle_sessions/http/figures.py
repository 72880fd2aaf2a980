"""What recent turns reused and how long they took, for later requests.

Held in memory, for the last turns since the server started; transcripts do not depend on it.
"""

from __future__ import annotations

from typing import Any

from rekindle_sessions.service.events import SessionEvent

MOST_TURNS = 4_096
FIELDS = ("rekindle", "gap_ms", "first_token_ms", "taken_in_tokens")  # of turn_complete
UNKNOWN: dict[str, Any] = dict.fromkeys(FIELDS)


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
