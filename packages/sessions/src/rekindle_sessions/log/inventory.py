"""Index of the sessions in the file whose rows verify, and of the bytes each namespace uses.

Built by reading every row of `session` and `memory` when the file is opened, then kept in sync by `records`. A row that
does not verify stays in the file, belongs to no namespace and takes no name; all such rows share one log line. Events
are verified against their MACs when they are read.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

from rekindle_sessions.log.codec import unpacked
from rekindle_sessions.log.database import SessionTables
from rekindle_sessions.log.usage import EVENT_BYTES, SESSION_BYTES, Usage
from rekindle_sessions.machine.types import Plan

logger = logging.getLogger(__name__)
_EVENTS = "SELECT session, sum(length(CAST(body AS BLOB)) + ?) FROM event GROUP BY session"


@dataclass(frozen=True, slots=True)
class Card:
    """A session in the file: `number` identifies its rows, `agents` are its permanent agents."""

    number: int
    namespace: str
    id: str
    agents: frozenset[str]

    @classmethod
    def of(cls, number: int, namespace: str, id: str, plan: Plan) -> Card:
        """Return the card of a session with this plan: agents that join later are forks, and not permanent."""
        permanent = (each.agent for each in plan.participants if each.agent is not None)
        return cls(number, namespace, id, frozenset(permanent))


class Inventory:
    """The contents of an open file. `damaged_memories`: (namespace, agent) as read from rows that do not verify."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.damaged_memories: set[tuple[object, object]] = set()
        self._cards: dict[int, Card] = {}
        self._unreadable: set[int] = set()  # sessions that hold a name but whose plan cannot be decoded
        self._numbers: dict[tuple[str, str], int] = {}

    @classmethod
    def of_file(cls, connection: sqlite3.Connection, tables: SessionTables) -> Inventory:
        """Read everything but event contents from a file; log what is damaged. O(file size), 1 s per GB."""
        found = cls()
        events = dict(connection.execute(_EVENTS, (EVENT_BYTES - tables.event.overhead,)).fetchall())
        damaged = []
        for row in tables.session.rows(connection, "ORDER BY number"):
            number, namespace, name = row[:3]
            if not tables.session.holds(row) or (namespace, name) in found._numbers:
                damaged.append(f"session {number}")
                continue
            size = SESSION_BYTES + len(row.plan.encode()) + len(row.preludes.encode()) + events.get(number, 0)
            try:
                found.add(Card.of(number, namespace, name, unpacked(Plan, row.plan)), size)
            except ValueError as error:
                logger.error("session %s of %s cannot be read, it stays in the file: %s", name, namespace, error)
                found.add(Card(number, namespace, name, frozenset()), size)
                found._unreadable.add(number)
        for memory in tables.memory.rows(connection):
            if tables.memory.holds(memory):
                found.usage.set_memory(memory.namespace, memory.agent, len((memory.prelude or "").encode()))
            else:
                damaged.append(f"what {memory.agent!r} of {memory.namespace!r} remembers")
                found.damaged_memories.add((memory.namespace, memory.agent))
        if damaged:
            logger.error(
                "%d rows of the session file are damaged: they stay in the file but are ignored; the first: %s. "
                "Check the disk, and that the `secret` next to the file is the one it was written with.",
                len(damaged),
                damaged[0],
            )
        return found

    def cards(self) -> list[Card]:
        """Return every readable session, oldest first."""
        return [card for number, card in list(self._cards.items()) if number not in self._unreadable]

    def number(self, namespace: str, id: str) -> int | None:
        """Return the number of the session with this id, readable or not; None if the id is free."""
        return self._numbers.get((namespace, id))

    def last(self, namespace: str, agent: str) -> int:
        """Return the number of the newest session a permanent agent may take part in; 0 if there is none."""
        cards = [card for card in list(self._cards.values()) if card.namespace == namespace]
        return max(
            (each.number for each in cards if agent in each.agents or each.number in self._unreadable), default=0
        )

    def add(self, card: Card, num_bytes: int) -> None:
        """Add a new session of `num_bytes`."""
        self._cards[card.number] = card
        self._numbers[card.namespace, card.id] = card.number
        self.usage.set_session(card.number, card.namespace, num_bytes)

    def drop(self, number: int) -> None:
        """Remove a session; safe if there is none."""
        card = self._cards.pop(number, None)
        if card is not None:
            del self._numbers[card.namespace, card.id]
        self._unreadable.discard(number)
        self.usage.drop_session(number)

    def check(self, other: Inventory) -> None:
        """Assert that this equals `other`, freshly read from the file."""
        assert self._cards == other._cards and self._numbers == other._numbers
        self.usage.check(other.usage)
