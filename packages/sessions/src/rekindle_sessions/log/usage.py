"""Usage of the session file per namespace, and quotas.

Counts the text of plans, preludes and events, plus a fixed overhead per row. Held in memory: built by `inventory` when
the file is opened, kept in sync by `records`, the only writer. Rows that do not verify are not counted. Any thread may
read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import QuotaExceeded

SESSION_BYTES = 256  # overhead of a row in addition to its text: keys and index entry
EVENT_BYTES = 64
MOST_SESSIONS = 10_000  # per namespace


@dataclass(frozen=True, slots=True)
class Used:
    """Sessions and bytes of a namespace, including its agents' memories of deleted sessions."""

    num_sessions: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one namespace; `num_bytes` None: unlimited."""

    num_sessions: int = MOST_SESSIONS
    num_bytes: int | None = None

    def check(self, namespace: str, used: Used, *, sessions: int = 0, num_bytes: int = 0) -> None:
        """Raise QuotaExceeded if `used` plus this many sessions and bytes exceeds the quota."""
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
        """Return the usage of a namespace."""
        return Used(self._num_sessions[namespace], self._num_bytes[namespace])

    def size(self, number: int) -> int:
        """Return the bytes of one session; 0 if there is none."""
        return self._sessions.get(number, ("", 0))[1]

    def set_session(self, number: int, namespace: str, num_bytes: int) -> None:
        """Set the size of a session, new or known."""
        self.drop_session(number)
        self._sessions[number] = namespace, num_bytes
        self._num_sessions[namespace] += 1
        self._num_bytes[namespace] += num_bytes

    def grow(self, number: int, num_bytes: int) -> None:
        """Add `num_bytes` to a session."""
        namespace, before = self._sessions[number]
        self._sessions[number] = namespace, before + num_bytes
        self._num_bytes[namespace] += num_bytes

    def drop_session(self, number: int) -> None:
        """Remove a session; safe if there is none."""
        namespace, num_bytes = self._sessions.pop(number, (None, 0))
        if namespace is not None:
            self._num_sessions[namespace] -= 1
            self._num_bytes[namespace] -= num_bytes

    def set_memory(self, namespace: str, agent: str, num_bytes: int) -> None:
        """Set the size of an agent's memory of deleted sessions."""
        self._num_bytes[namespace] += num_bytes - self._memories.pop((namespace, agent), 0)
        if num_bytes:
            self._memories[namespace, agent] = num_bytes

    def check(self, other: Usage) -> None:
        """Assert that this equals `other`, freshly counted."""
        assert self._sessions == other._sessions and self._memories == other._memories
        assert +self._num_bytes == +other._num_bytes and +self._num_sessions == +other._num_sessions


def bytes_of(plan: str, preludes: str, events: Sequence[tuple[str, str]] = ()) -> int:
    """Return what a session counts with this text; an event is its kind and its body."""
    text = len(plan.encode()) + len(preludes.encode()) + sum(len(body.encode()) for _, body in events)
    return SESSION_BYTES + text + EVENT_BYTES * len(events)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"
