"""What turns have reused and how long they took, for who asks later than they were spoken.

StoredResponse in memory, of the last turns since the server started; a transcript is complete without.
"""

from __future__ import annotations

from typing import Any

from rekindle.agents.sessions.events import SessionEvent

MOST_TURNS = 4_096
FIELDS = ("rekindle", "gap_ms", "first_token_ms", "taken_in_tokens")  # of turn_complete
UNKNOWN: dict[str, Any] = dict.fromkeys(FIELDS)


class Figures:
    """The figures of turns, by session and number; for one event loop."""

    def __init__(self, most: int = MOST_TURNS) -> None:
        self._most = most
        self._turns: dict[tuple[str, str, int], dict[str, Any]] = {}

    def note(self, namespace: str, session: str, complete: SessionEvent) -> None:
        """Keep those of a turn that is complete; the oldest ones give way."""
        self._turns[namespace, session, complete.data["turn"]] = {name: complete.data[name] for name in FIELDS}
        if len(self._turns) > self._most:
            del self._turns[next(iter(self._turns))]

    def of(self, namespace: str, session: str, turn: int | None) -> dict[str, Any]:
        """Those of a turn; all of them None where they are not known, or nothing was spoken in a turn."""
        return UNKNOWN if turn is None else self._turns.get((namespace, session, turn), UNKNOWN)

    def forget(self, namespace: str, session: str) -> None:
        """The session is gone."""
        for key in [key for key in self._turns if key[:2] == (namespace, session)]:
            del self._turns[key]
