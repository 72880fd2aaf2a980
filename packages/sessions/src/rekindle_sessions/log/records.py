"""The session file: the setup and events of each session, and the memories of permanent agents.

A session is the fold of its events, so nothing else of it is stored. When a call returns, its changes are durable: each
is a synced transaction. One process at a time has the file open. One lock guards one connection; every method may be
called from any thread and raises StoreError if the disk fails. `database` defines the rows; one that does not verify is
never shown.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from rekindle.errors import Conflict, NotFound, StoreError
from rekindle.store.files.keys import NOTHING_GIVEN, Given
from rekindle.store.files.sqlite_file import SqliteFile, erase_traces, note_traces, truncate_log
from rekindle_sessions.log.codec import packed, packed_event, unpacked, unpacked_event
from rekindle_sessions.log.database import MEMORY, EventRow, MemoryRow, ProgressRow, SessionRow, SessionTables, opened
from rekindle_sessions.log.inventory import Card, Inventory
from rekindle_sessions.log.usage import EVENT_BYTES, bytes_of
from rekindle_sessions.machine.types import Event, Plan, Prelude

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session as read from the file: `number` identifies its rows; its state follows from plan, preludes and events.

    The first `num_imported` events came with the session from another server.
    """

    number: int
    namespace: str
    id: str
    created: float
    last_use: float
    plan: Plan
    preludes: Mapping[str, Prelude]
    events: tuple[Event, ...]
    num_imported: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """What a permanent agent remembers of its sessions until `at`; `prelude` None: nothing.

    `forgotten`: it was made to forget sessions up to this number.
    """

    agent: str
    at: float
    prelude: Prelude | None
    forgotten: int = 0


class SessionRecords(SqliteFile):
    """The open file. `usage`: sessions and bytes per namespace."""

    def __init__(self, connection: sqlite3.Connection, tables: SessionTables) -> None:
        """Raises sqlite3.DatabaseError if the file is damaged."""
        super().__init__(connection, "the session file")
        self._tables = tables
        self._creating = threading.Lock()  # from checking that an id is free until it is taken
        self._inventory = Inventory.of_file(connection, tables)
        self.usage = self._inventory.usage

    @classmethod
    def open(cls, path: Path | None, *, given: Given = NOTHING_GIVEN) -> Self:
        """Open the file at `path`, creating it if missing; None: in memory. Raises StoreLocked, StoreError.

        `given`: what the keys of its directory are made from or opened with.
        """
        return opened(path, cls, given=given)

    def create(
        self,
        namespace: str,
        id: str,
        plan: Plan,
        preludes: Mapping[str, Prelude],
        now: float,
        events: Sequence[Event] = (),
    ) -> int:
        """Write a new session with the events that it has already, atomically; return its number.

        Conflict if the id is taken.
        """
        set_up, brought, past = packed(plan), packed(dict(preludes)), [packed_event(event) for event in events]
        with self._creating:
            self._check_free(namespace, id)
            number = self._insert(SessionRow(0, namespace, id, now, now, 0, b"", set_up, brought), past)
            self._inventory.add(Card.of(number, namespace, id, plan), bytes_of(set_up, brought, past))
        return number

    def _insert(self, row: SessionRow, events: Sequence[tuple[str, str]]) -> int:
        with self.writing() as connection:
            row = self._tables.session.add(connection, row)
            self._put_progress(connection, ProgressRow(row.number, row.last_use, len(events)))
            connection.execute("DELETE FROM event WHERE session = ?", (row.number,))  # stray rows of a damaged session
            rows = [EventRow(row.number, at, row.last_use, *event) for at, event in enumerate(events)]
            self._tables.event.insert(connection, *rows)
        return row.number

    def _put_progress(self, connection: sqlite3.Connection, row: ProgressRow) -> None:
        change = "UPDATE session SET last_use = ?, num_events = ?, progress = ? WHERE number = ?"
        connection.execute(change, (row.last_use, row.num_events, self._tables.progress.mac(row), row.number))

    def _check_free(self, namespace: str, id: str) -> None:
        number = self._inventory.number(namespace, id)
        if number is None:
            return
        try:
            self.session(number)
        except ValueError as error:
            message = f"the session {id!r} is in the file, but cannot be read ({error}): choose another id"
            raise Conflict(message, param="id") from error
        raise Conflict(f"there is a session {id!r} already: choose another id", param="id")

    def append(self, number: int, first: int, events: Sequence[Event], now: float) -> None:
        """Append events atomically, `first` being the number of the first one.

        NotFound if the session has been deleted.
        """
        rows = [EventRow(number, at, now, *packed_event(event)) for at, event in enumerate(events, first)]
        with self.writing() as connection:
            try:
                before = self._progress(connection, number)
            except ValueError as error:
                raise StoreError(f"an event of session {number} cannot be written: {error}") from error
            if before is None:
                raise NotFound("this session has been deleted", param="id")
            if before.num_events != first:
                raise StoreError(
                    f"event {first} of session {number} cannot be written: the file has {before.num_events}"
                )
            self._put_progress(connection, ProgressRow(number, max(before.last_use, now), first + len(rows)))
            self._tables.event.insert(connection, *rows)
        self.usage.grow(number, sum(EVENT_BYTES + len(row.body.encode()) for row in rows))

    def _progress(self, connection: sqlite3.Connection, number: int) -> ProgressRow | None:
        """Return a session's last use and its number of events; None if it is deleted. ValueError if damaged."""
        row = next(self._tables.progress.rows(connection, "WHERE number = ?", number), None)
        if row is not None and not self._tables.progress.holds(row):
            raise ValueError("its row is damaged: check the disk")
        return row

    def cards(self) -> list[Card]:
        """Return every readable session, oldest first; unreadable ones stay in the file."""
        return self._inventory.cards()

    def session(self, number: int) -> SavedSession:
        """Read one session; ValueError if a row of it cannot be read or it does not exist."""
        with self.reading() as connection:
            row = next(self._tables.session.rows(connection, "WHERE number = ?", number), None)
            progress = self._progress(connection, number)
        if row is None or progress is None:
            raise ValueError("it has been deleted")
        if not self._tables.session.holds(row):
            raise ValueError("its row is damaged: check the disk")
        brought, plan = unpacked(dict[str, Prelude], row.preludes), unpacked(Plan, row.plan)
        owner = number, row.namespace, row.id, row.created, progress.last_use
        rows = self._events(number)
        num_imported = sum(event.at == row.created for event in rows)  # written with it
        return SavedSession(*owner, plan, brought, _unpacked(rows), num_imported)

    def events(self, number: int) -> tuple[Event, ...]:
        """Return the events of one session in order; ValueError if a row is damaged, missing or no event."""
        return _unpacked(self._events(number))

    def _events(self, number: int) -> list[EventRow]:
        with self.reading() as connection:
            progress = self._progress(connection, number)
            rows = list(self._tables.event.rows(connection, "WHERE session = ? ORDER BY number", number))
        if progress is None:
            return []
        if not all(map(self._tables.event.holds, rows)):
            raise ValueError("events are damaged: check the disk")
        if [row.number for row in rows] != list(range(progress.num_events)):
            raise ValueError("events are missing: check the disk")
        return rows

    def delete(self, number: int, namespace: str, memories: Sequence[Memory]) -> None:
        """Delete a session; store its agents' memories if they are their latest and not forgotten."""
        with self.writing() as connection:
            connection.execute("DELETE FROM event WHERE session = ?", (number,))
            connection.execute("DELETE FROM session WHERE number = ?", (number,))
            for memory in memories:
                before = self._memory(connection, namespace, memory.agent)
                if before is None:
                    self._put(connection, namespace, memory)
                elif before.at <= memory.at and before.forgotten < number:
                    self._put(connection, namespace, replace(memory, forgotten=before.forgotten))
        self._inventory.drop(number)
        for memory in memories:
            self._count_memory(namespace, memory.agent)
        self._shorten()

    def _put(self, connection: sqlite3.Connection, namespace: str, memory: Memory) -> None:
        prelude = None if memory.prelude is None else packed(memory.prelude)
        row = MemoryRow(namespace, memory.agent, memory.at, prelude, memory.forgotten)
        self._tables.memory.replace(connection, row)

    def _row(self, connection: sqlite3.Connection, namespace: str, agent: str) -> MemoryRow | None:
        """Return the row of an agent's memory; None if there is none or it is damaged, which is logged."""
        which = "WHERE namespace = ? AND agent = ?"
        row = next(self._tables.memory.rows(connection, which, *self._key(namespace, agent)), None)
        if row is None or self._tables.memory.holds(row):
            return row
        if (namespace, agent) not in self._inventory.damaged_memories:
            self._inventory.damaged_memories.add((namespace, agent))
            logger.error("what %s of %s remembers is damaged and is ignored: check the disk", agent, namespace)
        return None

    def _key(self, namespace: str, agent: str) -> tuple[object, object]:
        """What the row of an agent's memory has where it is found by them."""
        match = self._tables.memory.match
        return match(namespace), match(agent)

    def _memory(self, connection: sqlite3.Connection, namespace: str, agent: str) -> Memory | None:
        """Return an agent's memory without its prelude."""
        row = self._row(connection, namespace, agent)
        return None if row is None else Memory(agent, row.at, None, row.forgotten)

    def _count_memory(self, namespace: str, agent: str) -> None:
        with self.reading() as connection:
            row = self._row(connection, namespace, agent)
        self.usage.set_memory(namespace, agent, 0 if row is None or row.prelude is None else len(row.prelude.encode()))

    def remembered(self, namespace: str, agent: str) -> Memory | None:
        """Return an agent's memory of deleted sessions; StoreError if it cannot be decoded, None if it is damaged."""
        with self.reading() as connection:
            row = self._row(connection, namespace, agent)
        if row is None:
            return None
        try:
            prelude = None if row.prelude is None else unpacked(Prelude, row.prelude)
            return Memory(agent, row.at, prelude, row.forgotten)
        except ValueError as error:
            raise StoreError(f"what {agent!r} remembers of earlier sessions cannot be read: {error}") from error

    def forget(self, namespace: str, agent: str) -> bool:
        """Make an agent bring nothing of existing sessions into later ones; False if there was nothing to forget.

        If it had a memory of deleted sessions, the file is rewritten to erase it; if that fails, or the process is
        killed meanwhile, the next call or the next open does it. Damaged memories might be the agent's too, so they are
        deleted.
        """
        last = self._inventory.last(namespace, agent)
        with self.writing() as connection:
            num_forgotten = (
                self._drop_damaged(connection)
                + connection.execute(
                    "DELETE FROM memory WHERE namespace = ? AND agent = ? AND prelude IS NOT NULL",
                    self._key(namespace, agent),
                ).rowcount
            )
            if last:
                self._put(connection, namespace, Memory(agent, 0.0, None, last))
            if num_forgotten:
                note_traces(connection)
        self._inventory.damaged_memories.clear()
        self._count_memory(namespace, agent)
        with self.reading() as connection:
            erase_traces(connection)
        return num_forgotten > 0 or last > 0

    def _drop_damaged(self, connection: sqlite3.Connection) -> int:
        """Delete the memories found damaged; return how many."""
        if not self._inventory.damaged_memories:
            return 0
        query = f"SELECT CAST(namespace AS BLOB), CAST(agent AS BLOB), {MEMORY.columns} FROM memory"
        holds = self._tables.memory.holds
        opened = self._tables.memory.opened
        gone = [row[:2] for row in connection.execute(query) if not holds(opened(row[2:]))]
        change = "DELETE FROM memory WHERE CAST(namespace AS BLOB) = ? AND CAST(agent AS BLOB) = ?"
        connection.executemany(change, gone)
        return len(gone)

    def _shorten(self) -> None:
        """Truncate the write-ahead log, so that it holds nothing deleted."""
        with self.reading() as connection:
            truncate_log(connection)

    def check(self) -> None:
        """Assert that the file is intact, that the inventory matches it, and that no event lacks a session."""
        with self.reading() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            self._inventory.check(Inventory.of_file(connection, self._tables))
            rows = connection.execute("SELECT number, num_events FROM session WHERE num_events > 0").fetchall()
            events = connection.execute("SELECT session, count(*), max(number) + 1 FROM event GROUP BY session")
            found = {session: counts for session, *counts in events}
        assert found == {number: [count, count] for number, count in rows}


def _unpacked(rows: Sequence[EventRow]) -> tuple[Event, ...]:
    return tuple(unpacked_event(row.kind, row.body) for row in rows)
