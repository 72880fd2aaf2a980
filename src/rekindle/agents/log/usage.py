"""How much each namespace has in the file of sessions, and how much it may have.

Counts what is said and set up: the text of plans, preludes and events, and for each row what it costs besides. Kept in
memory, made from the file at open by `inventory`, in step with it by `records`, which alone writes it. Rows that do not
verify are nobody's. Any thread may ask.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rekindle.errors import QuotaExceeded

SESSION_BYTES = 256  # of a row, its keys and its place in the index, besides its text
EVENT_BYTES = 64
MOST_SESSIONS = 10_000  # of a namespace


@dataclass(frozen=True, slots=True)
class Used:
    """Sessions of a namespace, and bytes with what its agents remember of deleted ones."""

    num_sessions: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """What one namespace may have; `num_bytes` None: any number."""

    num_sessions: int = MOST_SESSIONS
    num_bytes: int | None = None

    def check(self, namespace: str, used: Used, *, sessions: int = 0, num_bytes: int = 0) -> None:
        """Raise QuotaExceeded where so many sessions and bytes more are too much."""
        what = f"namespace {namespace!r} has {used.num_sessions} sessions of {_size(used.num_bytes)}"
        advice = "delete some, or agents that remember deleted ones"
        if used.num_sessions + sessions > self.num_sessions:
            raise QuotaExceeded(f"{what}; it may have {self.num_sessions} sessions: {advice}")
        if self.num_bytes is not None and used.num_bytes + num_bytes > self.num_bytes:
            raise QuotaExceeded(
                f"{what}, {_size(num_bytes)} more are too much; it may have {_size(self.num_bytes)}: {advice}"
            )


class Usage:
    """The counts of an open file."""

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[str, int]] = {}
        self._memories: dict[tuple[str, str], int] = {}
        self._num_sessions: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()

    def of(self, namespace: str) -> Used:
        """What a namespace has."""
        return Used(self._num_sessions[namespace], self._num_bytes[namespace])

    def size(self, number: int) -> int:
        """Bytes of one session; 0 where there is none."""
        return self._sessions.get(number, ("", 0))[1]

    def set_session(self, number: int, namespace: str, num_bytes: int) -> None:
        """A session has so many bytes from now on."""
        self.drop_session(number)
        self._sessions[number] = namespace, num_bytes
        self._num_sessions[namespace] += 1
        self._num_bytes[namespace] += num_bytes

    def grow(self, number: int, num_bytes: int) -> None:
        """A session has so many bytes more."""
        namespace, before = self._sessions[number]
        self._sessions[number] = namespace, before + num_bytes
        self._num_bytes[namespace] += num_bytes

    def drop_session(self, number: int) -> None:
        """A session is gone; safe where there is none."""
        namespace, num_bytes = self._sessions.pop(number, (None, 0))
        if namespace is not None:
            self._num_sessions[namespace] -= 1
            self._num_bytes[namespace] -= num_bytes

    def set_memory(self, namespace: str, agent: str, num_bytes: int) -> None:
        """What an agent remembers of deleted sessions has so many bytes from now on."""
        self._num_bytes[namespace] += num_bytes - self._memories.pop((namespace, agent), 0)
        if num_bytes:
            self._memories[namespace, agent] = num_bytes

    def check(self, other: Usage) -> None:
        """Assert that both are equal, `other` being counted afresh."""
        assert self._sessions == other._sessions and self._memories == other._memories
        assert +self._num_bytes == +other._num_bytes and +self._num_sessions == +other._num_sessions


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"
