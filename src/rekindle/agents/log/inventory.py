"""Which sessions the file has, as far as their rows verify, and how much of it each namespace has.

Made by reading every row of `session` and `memory` when the file is opened, in step with it by `records`. A row that
does not verify stays in the file, is nobody's, and takes no name: it is logged, once for all of them. Events are held
against their MACs where they are read.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

from rekindle.agents.log.codec import unpacked
from rekindle.agents.log.macs import MEMORY, SESSION, SessionMacs
from rekindle.agents.log.usage import EVENT_BYTES, SESSION_BYTES, Usage
from rekindle.agents.machine.types import Plan

logger = logging.getLogger(__name__)
_EVENTS = "SELECT session, sum(length(CAST(body AS BLOB)) + ?) FROM event GROUP BY session"


@dataclass(frozen=True, slots=True)
class Card:
    """A session in the file: `number` names its rows, `agents` are those of its agents that outlive it."""

    number: int
    namespace: str
    id: str
    agents: frozenset[str]

    @classmethod
    def of(cls, number: int, namespace: str, id: str, plan: Plan) -> Card:
        """The card of a session with this plan: one that joins it later is forked, and ends with it."""
        permanent = (each.agent for each in plan.participants if each.agent is not None)
        return cls(number, namespace, id, frozenset(permanent))


class Inventory:
    """What an open file has. `damaged_memories`: (namespace, agent) of rows that do not verify, as far as they say."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.damaged_memories: set[tuple[object, object]] = set()
        self._cards: dict[int, Card] = {}
        self._unreadable: set[int] = set()  # sessions that take a name, whose plan no version of today reads
        self._numbers: dict[tuple[str, str], int] = {}

    @classmethod
    def of_file(cls, connection: sqlite3.Connection, macs: SessionMacs) -> Inventory:
        """Read all that is in a file but what was said; logs what is damaged. O(its size), 1 s a GB."""
        found = cls()
        events = dict(connection.execute(_EVENTS, (EVENT_BYTES,)).fetchall())
        damaged = []
        for row in connection.execute(f"SELECT {SESSION} FROM session ORDER BY number"):
            number, namespace, name, _, plan, preludes, _ = row
            if not macs.session.holds(row) or (namespace, name) in found._numbers:
                damaged.append(f"session {number}")
                continue
            size = SESSION_BYTES + len(plan.encode()) + len(preludes.encode()) + events.get(number, 0)
            try:
                found.add(Card.of(number, namespace, name, unpacked(Plan, plan)), size)
            except ValueError as error:
                logger.error("session %s of %s cannot be read, it stays in the file: %s", name, namespace, error)
                found.add(Card(number, namespace, name, frozenset()), size)
                found._unreadable.add(number)
        for row in connection.execute(f"SELECT {MEMORY} FROM memory"):
            if macs.memory.holds(row):
                found.usage.set_memory(row[0], row[1], 0 if row[3] is None else len(row[3].encode()))
            else:
                damaged.append(f"what {row[1]!r} of {row[0]!r} remembers")
                found.damaged_memories.add((row[0], row[1]))
        if damaged:
            logger.error(
                "%d rows of the file of sessions are damaged, they stay in it and count as not there; the first: %s. "
                "Check the disk, and that the file lies with the `secret` that it was written with.",
                len(damaged),
                damaged[0],
            )
        return found

    def cards(self) -> list[Card]:
        """Every session that can be read, the oldest first."""
        return [card for number, card in list(self._cards.items()) if number not in self._unreadable]

    def number(self, namespace: str, id: str) -> int | None:
        """The session of this name, one that cannot be read included; None: the name is free."""
        return self._numbers.get((namespace, id))

    def last(self, namespace: str, agent: str) -> int:
        """The newest session in which a permanent agent takes part, as far as is known; 0: there is none."""
        cards = [card for card in list(self._cards.values()) if card.namespace == namespace]
        return max(
            (each.number for each in cards if agent in each.agents or each.number in self._unreadable), default=0
        )

    def add(self, card: Card, num_bytes: int) -> None:
        """There is a new session, of so many bytes."""
        self._cards[card.number] = card
        self._numbers[card.namespace, card.id] = card.number
        self.usage.set_session(card.number, card.namespace, num_bytes)

    def drop(self, number: int) -> None:
        """A session is gone; safe where there is none."""
        card = self._cards.pop(number, None)
        if card is not None:
            del self._numbers[card.namespace, card.id]
        self._unreadable.discard(number)
        self.usage.drop_session(number)

    def check(self, other: Inventory) -> None:
        """Assert that both are equal, `other` being read afresh."""
        assert self._cards == other._cards and self._numbers == other._numbers
        self.usage.check(other.usage)
