"""The file of sessions: how each was set up, what happened in it, and what agents that outlive one remember.

A session is the fold of its events, so nothing else is kept of it. What returned is durable: each call is a transaction
that is synced. One process at a time has the file. One lock over one connection; every method may be called from any
thread and raises StoreError if the disk refuses. `database` says how the rows look.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.agents.database import opened
from rekindle.agents.packing import packed, packed_event, unpacked, unpacked_event
from rekindle.agents.types import Event, Plan, Prelude
from rekindle.agents.usage import EVENT_BYTES, SESSION_BYTES, Usage
from rekindle.errors import Conflict, NotFound, StoreError
from rekindle.store.transactions import Transactions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """A session as it was kept: `number` names its rows, `plan`, `preludes` and `events` make it what it is."""

    number: int
    namespace: str
    id: str
    created: float
    last_use: float
    plan: Plan
    preludes: Mapping[str, Prelude]
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A session in the file: `number` names its rows, `agents` are those of its agents that outlive it."""

    number: int
    namespace: str
    id: str
    agents: frozenset[str]

    @classmethod
    def of(cls, number: int, namespace: str, id: str, plan: Plan) -> Card:
        """The card of a session with this plan: whoever joins it later is forked, and ends with it."""
        permanent = (each.agent for each in plan.participants if each.agent is not None)
        return cls(number, namespace, id, frozenset(permanent))


@dataclass(frozen=True, slots=True)
class Memory:
    """What an agent has of its sessions until `at`; `prelude` None: nothing.

    `forgotten`: sessions up to this number bring nothing, it was made to forget them.
    """

    agent: str
    at: float
    prelude: Prelude | None
    forgotten: int = 0


class SessionRecords(Transactions):
    """The open file."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection, "the file of sessions")
        self._has_traces = False  # of what was to be forgotten
        with self._reading():
            self.usage = Usage.of_file(connection)

    @classmethod
    def open(cls, path: Path | None) -> SessionRecords:
        """The file at `path`, made where there is none; None: in memory. Raises StoreLocked, StoreError."""
        connection = opened(path)
        try:
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    def create(self, namespace: str, id: str, plan: Plan, preludes: Mapping[str, Prelude], now: float) -> int:
        """Write a new session; return the number of its rows. Conflict where there is one of this id."""
        set_up, brought = packed(plan), packed(dict(preludes))
        row = (namespace, id, now, now, set_up, brought)
        with self._writing() as connection:
            try:
                number = connection.execute(
                    "INSERT INTO session(namespace, id, created, last_use, plan, preludes) VALUES(?,?,?,?,?,?)", row
                ).lastrowid
            except sqlite3.IntegrityError as error:
                raise Conflict(f"there is a session {id!r} already: choose another id", param="id") from error
        assert number is not None
        self.usage.set_session(number, namespace, SESSION_BYTES + len(set_up.encode()) + len(brought.encode()))
        return number

    def append(self, number: int, first: int, events: Sequence[Event], now: float) -> None:
        """Write what happened next, `first` being the number of the first of these events; all of it or nothing.

        NotFound where the session has been deleted.
        """
        rows = [(number, at, now, *packed_event(event)) for at, event in enumerate(events, first)]
        with self._writing() as connection:
            used = "UPDATE session SET last_use = max(last_use, ?) WHERE number = ?"
            if connection.execute(used, (now, number)).rowcount == 0:
                raise NotFound("this session has been deleted", param="id")
            connection.executemany("INSERT INTO event VALUES(?, ?, ?, ?, ?)", rows)
        self.usage.grow(number, sum(EVENT_BYTES + len(body.encode()) for *_, body in rows))

    def cards(self) -> list[Card]:
        """Every session, the oldest first. One whose plan cannot be read stays in the file, and is logged."""
        with self._reading() as connection:
            rows: list[tuple[int, bytes, bytes]] = connection.execute(
                "SELECT number, CAST(namespace AS BLOB), CAST(id AS BLOB) FROM session ORDER BY number"
            ).fetchall()
        found: list[Card] = []
        for number, namespace, name in rows:
            try:
                found.append(self._card(number))
            except ValueError as error:
                names = (name.decode(errors="replace"), namespace.decode(errors="replace"))
                logger.error("session %s of %s cannot be read, it stays in the file: %s", *names, error)
        return found

    def _card(self, number: int) -> Card:
        with self._reading() as connection:
            namespace, name, plan = connection.execute(
                "SELECT namespace, id, plan FROM session WHERE number = ?", (number,)
            ).fetchone()
        return Card.of(number, namespace, name, unpacked(Plan, plan))

    def kept(self, number: int) -> Kept:
        """All of one session; ValueError where a row of it cannot be read, or it is not there."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT namespace, id, created, last_use, plan, preludes FROM session WHERE number = ?", (number,)
            ).fetchone()
        if row is None:
            raise ValueError("it has been deleted")
        namespace, name, created, last_use, plan, preludes = row
        brought = unpacked(dict[str, Prelude], preludes)
        times = (float(created), float(last_use))
        return Kept(number, namespace, name, *times, unpacked(Plan, plan), brought, self.events(number))

    def events(self, number: int) -> tuple[Event, ...]:
        """What happened in one session, in order; ValueError where a row is no event."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT number, kind, body FROM event WHERE session = ? ORDER BY number", (number,)
            ).fetchall()
        if [row[0] for row in rows] != list(range(len(rows))):
            raise ValueError("events are missing")
        return tuple(unpacked_event(kind, body) for _, kind, body in rows)

    def delete(self, number: int, namespace: str, memories: Sequence[Memory]) -> None:
        """Delete a session; what its agents remember stays, where it is the latest they have and not forgotten."""
        with self._writing() as connection:
            connection.execute("DELETE FROM event WHERE session = ?", (number,))
            connection.execute("DELETE FROM session WHERE number = ?", (number,))
            for memory in memories:
                kept = None if memory.prelude is None else packed(memory.prelude)
                connection.execute(
                    "INSERT INTO memory VALUES(?, ?, ?, ?, 0) ON CONFLICT DO UPDATE SET at = excluded.at, "
                    "prelude = excluded.prelude WHERE excluded.at >= memory.at AND memory.forgotten < ?",
                    (namespace, memory.agent, memory.at, kept, number),
                )
        self.usage.drop_session(number)
        for memory in memories:
            self._count_memory(namespace, memory.agent)
        self._shorten()

    def _count_memory(self, namespace: str, agent: str) -> None:
        query = "SELECT length(CAST(prelude AS BLOB)) FROM memory WHERE namespace = ? AND agent = ?"
        with self._reading() as connection:
            row = connection.execute(query, (namespace, agent)).fetchone()
        self.usage.set_memory(namespace, agent, 0 if row is None else row[0] or 0)

    def remembered(self, namespace: str, agent: str) -> Memory | None:
        """What an agent kept of deleted sessions; StoreError where that cannot be read."""
        with self._reading() as connection:
            row = connection.execute(
                "SELECT at, CAST(prelude AS BLOB), forgotten FROM memory WHERE namespace = ? AND agent = ?",
                (namespace, agent),
            ).fetchone()
        if row is None:
            return None
        try:
            return Memory(agent, row[0], None if row[1] is None else unpacked(Prelude, row[1]), row[2])
        except ValueError as error:
            raise StoreError(f"what {agent!r} remembers of earlier sessions cannot be read: {error}") from error

    def forget(self, namespace: str, agent: str) -> bool:
        """Have an agent bring nothing of the sessions there are into later ones; False: there was nothing to forget.

        Where it had kept something of deleted ones, the file is rewritten without; asked again, until that was done.
        """
        identity = f'"agent":{json.dumps(agent, ensure_ascii=False)}'  # as it stands in a plan
        with self._writing() as connection:
            kept = connection.execute(
                "DELETE FROM memory WHERE namespace = ? AND agent = ? AND prelude IS NOT NULL", (namespace, agent)
            ).rowcount
            in_session = connection.execute(
                "INSERT INTO memory SELECT ?, ?, 0, NULL, seq FROM sqlite_sequence WHERE name = 'session' AND EXISTS("
                "SELECT 1 FROM session WHERE namespace = ? AND instr(CAST(plan AS BLOB), CAST(? AS BLOB))) "
                "ON CONFLICT DO UPDATE SET forgotten = excluded.forgotten",
                (namespace, agent, namespace, identity),
            ).rowcount
            self._has_traces = self._has_traces or kept > 0
        self._count_memory(namespace, agent)
        if self._has_traces:
            with self._reading() as connection:
                connection.execute("VACUUM")
            self._shorten()
            self._has_traces = False
        return kept + in_session > 0

    def _shorten(self) -> None:
        """Leave nothing of what was deleted in the log."""
        with self._reading() as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def check(self) -> None:
        """Assert that the file is whole, that each session's events have no gap, and that none is nobody's."""
        with self._reading() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            numbers = {number for (number,) in connection.execute("SELECT number FROM session")}
            events = connection.execute("SELECT session, count(*), max(number) FROM event GROUP BY session").fetchall()
            self.usage.check(Usage.of_file(connection))
        for number, count, last in events:
            assert number in numbers, f"events of session {number}, which is not there"
            assert count == last + 1, f"session {number} has {count} events, the last is {last}"
