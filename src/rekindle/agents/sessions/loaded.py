"""Which sessions there are, and which of them are in memory: those in use, and the ones used last.

    cards     every session: its rows' number, its permanent agents. A few hundred bytes each
    held      sessions that stay in memory: MOST_HELD and MOST_HELD_BYTES of text, and whichever are busy
    live      sessions that somebody has, held or not: nobody ever gets a second one of the same rows

A session that is not in memory is read from the file when it is asked for. One that cannot be had again stays in the
file, is logged, and is asked for in vain. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection
from weakref import WeakValueDictionary

from rekindle.agents.log.inventory import Card
from rekindle.agents.sessions.session import Session, SessionContext
from rekindle.errors import NotFound, RekindleError
from rekindle.worker import contained

logger = logging.getLogger(__name__)
MOST_HELD = 64
MOST_HELD_BYTES = 64 << 20  # as they are in the file; in memory they take a few times as much
Key = tuple[str, str]  # namespace, id


class LoadedSessions:
    """The sessions of one coordinator."""

    def __init__(
        self, desk: SessionContext, *, most_held: int = MOST_HELD, most_held_bytes: int = MOST_HELD_BYTES
    ) -> None:
        self._desk = desk
        self.most_held = most_held
        self._most_held_bytes = most_held_bytes
        self._cards: dict[Key, Card] = {}
        self._held: OrderedDict[Key, Session] = OrderedDict()
        self._live: WeakValueDictionary[Key, Session] = WeakValueDictionary()

    def know(self, card: Card) -> None:
        """There is a session of this card in the file."""
        self._cards[card.namespace, card.id] = card

    def add(self, card: Card, session: Session) -> None:
        """A new session has begun."""
        self.know(card)
        self._hold(session)

    def cards(self, namespace: str) -> list[Card]:
        """Every session of a namespace, the oldest first."""
        return [card for (space, _), card in self._cards.items() if space == namespace]

    def live(self) -> list[Session]:
        """Every session that is in memory."""
        return list(self._live.values())

    def num_held(self) -> int:
        """How many sessions stay in memory."""
        return len(self._held)

    def get(self, namespace: str, id: str) -> Session:
        """A session, read from the file at once where it is not in memory; NotFound, StoreError."""
        card = self._card(namespace, id)
        session = self._live.get((namespace, id))
        if session is None:
            try:
                session = self._loaded(card)
            except NotFound:
                self._forget(card)
                raise
        self._hold(session)
        return session

    async def fetch(self, namespace: str, id: str) -> Session:
        """The same, without keeping the event loop waiting for the file; at once where it is in memory."""
        card = self._card(namespace, id)
        if (namespace, id) not in self._live:
            try:
                read = await asyncio.to_thread(contained(self._loaded), card)
            except NotFound:
                self._forget(card)
                raise
            if self._card(namespace, id) is not card:
                raise no_session(id)
            self._live.setdefault((namespace, id), read)
        return self.get(namespace, id)

    async def with_agents(self, namespace: str, agents: Collection[str]) -> list[Session]:
        """The sessions in which some of these permanent agents take part; those that cannot be had are left out."""
        found = []
        for card in self.cards(namespace):
            if not card.agents.isdisjoint(agents):
                try:
                    found.append(await self.fetch(namespace, card.id))
                except NotFound:
                    continue
        return found

    def remove(self, session: Session) -> None:
        """The session is gone, unless its id is another's by now."""
        key = session.namespace, session.id
        card = self._cards.get(key)
        if card is not None and card.number == session.number:
            del self._cards[key]
            self._held.pop(key, None)
            self._live.pop(key, None)

    def _card(self, namespace: str, id: str) -> Card:
        card = self._cards.get((namespace, id))
        if card is None:
            raise no_session(id)
        return card

    def _loaded(self, card: Card) -> Session:
        """Read a session, on any thread; NotFound for one that cannot be had again."""
        try:
            kept = self._desk.records.session(card.number)
        except ValueError as error:
            logger.error("session %s of %s cannot be read, it stays in the file: %s", card.id, card.namespace, error)
            raise no_session(card.id) from error
        try:
            return Session(self._desk, kept)
        except RekindleError as error:
            logger.error("session %s of %s cannot be resumed: %s", card.id, card.namespace, error)
            raise no_session(card.id) from error

    def _forget(self, card: Card) -> None:
        key = card.namespace, card.id
        if self._cards.get(key) is card:
            del self._cards[key]

    def _hold(self, session: Session) -> None:
        """It was used last; let go of what was used longest ago and is not busy, while too much is held."""
        key = session.namespace, session.id
        self._live[key] = self._held[key] = session
        self._held.move_to_end(key)
        size = self._desk.records.usage.size
        num_bytes = sum(size(each.number) for each in self._held.values())
        for other, each in list(self._held.items())[:-1]:
            if len(self._held) <= self.most_held and num_bytes <= self._most_held_bytes:
                return
            if each.is_idle:
                del self._held[other]
                num_bytes -= size(each.number)

    def check(self) -> None:
        """Assert that what is held is live, known and sound, and that only what is busy is held beyond the bounds."""
        for key, session in self._held.items():
            assert self._live.get(key) is session
            assert self._cards[key].number == session.number, key
        for session in self.live():
            session.check()


def no_session(id: str) -> NotFound:
    """Nobody has such a session here."""
    return NotFound(f"no session {id!r}", param="id")
