"""All sessions, and which of them are in memory: those in use and the most recently used.

    cards     every session: its number in the file, its permanent agents. A few hundred bytes each
    held      sessions kept in memory: up to MOST_HELD and MOST_HELD_BYTES of text, plus any that are busy
    live      sessions referenced anywhere, held or not: there are never two objects for the same rows

A session that is not in memory is read from the file on request. One that cannot be restored stays in the file, is
logged, and is reported as not found. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection
from weakref import WeakValueDictionary

from rekindle.errors import NotFound, RekindleError
from rekindle.worker import contained
from rekindle_sessions.log.inventory import Card
from rekindle_sessions.service.session import Session, SessionContext

logger = logging.getLogger(__name__)
MOST_HELD = 64
MOST_HELD_BYTES = 64 << 20  # size in the file; in memory they take a few times as much
Key = tuple[str, str]  # namespace, id


class LoadedSessions:
    """The sessions of one coordinator."""

    def __init__(
        self, shared: SessionContext, *, most_held: int = MOST_HELD, most_held_bytes: int = MOST_HELD_BYTES
    ) -> None:
        self._shared = shared
        self.most_held = most_held
        self._most_held_bytes = most_held_bytes
        self._cards: dict[Key, Card] = {}
        self._held: OrderedDict[Key, Session] = OrderedDict()
        self._live: WeakValueDictionary[Key, Session] = WeakValueDictionary()

    def know(self, card: Card) -> None:
        """Add the card of a session in the file."""
        self._cards[card.namespace, card.id] = card

    def add(self, card: Card, session: Session) -> None:
        """Add a new session."""
        self.know(card)
        self._hold(session)

    def has(self, namespace: str, id: str) -> bool:
        """Return whether there is such a session, in memory or in the file."""
        return (namespace, id) in self._cards

    def cards(self, namespace: str) -> list[Card]:
        """Return the cards of a namespace, oldest first."""
        return [card for (space, _), card in self._cards.items() if space == namespace]

    def live(self) -> list[Session]:
        """Return every session in memory."""
        return list(self._live.values())

    def num_held(self) -> int:
        """Return the number of held sessions."""
        return len(self._held)

    def get(self, namespace: str, id: str) -> Session:
        """Return a session, read synchronously if it is not in memory; NotFound, StoreError."""
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
        """Return a session without blocking the event loop on the file; immediately if it is in memory."""
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
        """Return the sessions in which any of these permanent agents takes part; skip those that cannot be restored."""
        found = []
        for card in self.cards(namespace):
            if not card.agents.isdisjoint(agents):
                try:
                    found.append(await self.fetch(namespace, card.id))
                except NotFound:
                    continue
        return found

    def remove(self, session: Session) -> None:
        """Remove a session, unless its id belongs to another one by now."""
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
        """Read a session, on any thread; NotFound if it cannot be restored."""
        try:
            saved = self._shared.records.session(card.number)
        except ValueError as error:
            logger.error("session %s of %s cannot be read, it stays in the file: %s", card.id, card.namespace, error)
            raise no_session(card.id) from error
        try:
            return Session(self._shared, saved)
        except RekindleError as error:
            logger.error("session %s of %s cannot be resumed: %s", card.id, card.namespace, error)
            raise no_session(card.id) from error

    def _forget(self, card: Card) -> None:
        key = card.namespace, card.id
        if self._cards.get(key) is card:
            del self._cards[key]

    def _hold(self, session: Session) -> None:
        """Mark a session as most recently used; release the least recently used idle ones while over the bounds."""
        key = session.namespace, session.id
        self._live[key] = self._held[key] = session
        self._held.move_to_end(key)
        size = self._shared.records.usage.size
        num_bytes = sum(size(each.number) for each in self._held.values())
        for other, each in list(self._held.items())[:-1]:
            if len(self._held) <= self.most_held and num_bytes <= self._most_held_bytes:
                return
            if each.is_idle:
                del self._held[other]
                num_bytes -= size(each.number)

    def check(self) -> None:
        """Assert that held sessions are live and have cards, and that every live session is valid."""
        for key, session in self._held.items():
            assert self._live.get(key) is session
            assert self._cards[key].number == session.number, key
        for session in self.live():
            session.check()


def no_session(id: str) -> NotFound:
    """Return the error for an unknown session."""
    return NotFound(f"no session {id!r}", param="id")
