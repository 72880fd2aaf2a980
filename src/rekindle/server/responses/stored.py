"""Stored responses, for callers to continue, and receipts of all answers: in a file next to the store, else in memory.

Owns the file `responses.db` and its thread. A response is stored with the items that were new in its request and the id
of the response it continues: a conversation is a chain. It can be found as soon as `keep` returns and is durable once
the returned future is done; everything pending is written in one transaction. What a disk refuses stays in memory while
there is room, and is written when the disk accepts it; its caller got an error. Continuing a response counts as a use
of its whole chain, so every earlier response stays available. Receipts are written together, once a second, or with
the next response: a kill loses those of its last second.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rekindle.errors import StoreError, StoreRefused
from rekindle.server.border import invalid
from rekindle.server.observers.receipts import Receipt
from rekindle.server.responses.item_fields import Item
from rekindle.server.responses.records import Entry, Records, open_records
from rekindle.server.responses.waiting_receipts import WaitingReceipts
from rekindle.store.files.keys import NOTHING_GIVEN, Given
from rekindle.worker import Death, Worker

logger = logging.getLogger("rekindle.server")
RETENTION_S = 30 * 86400.0
MAX_RESPONSES = 10_000  # of a namespace
MAX_BYTES = 1 << 30  # of a namespace, packed
MAX_UNSAVED = 256  # responses waiting for a disk that refuses
MAX_UNSAVED_BYTES = 32 << 20  # of those, packed
MAX_FORGOTTEN = 4096  # deleted agents remembered, so that their running requests are not stored
GATHER_S = 1.0  # until receipts are written
RETRY_S = 30.0
JOIN_S = 10.0
Key = tuple[str, str]  # namespace, id
_FORGOTTEN = "its agent was deleted meanwhile"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was answered, its owner, and the items that came with its request."""

    namespace: str
    agent: str | None
    response: dict[str, Any]
    items: Sequence[Item]

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.response["id"])

    @property
    def previous(self) -> str | None:
        """The id of the response it continues."""
        previous: str | None = self.response["previous_response_id"]
        return previous

    @property
    def all_items(self) -> list[Item]:
        """The items this response adds to the conversation: those of its request, then its output."""
        return [*self.items, *self.response["output"]]


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """A response that is not in the file yet. `durable` is done once it is, or holds the error that prevented it;
    `entry` is then what was to be written."""

    stored: StoredResponse
    durable: Future[None]
    entry: Entry | None = None


class StoredResponses:
    """Every stored response of all namespaces. Start it, close it; `path` None: in memory. Any thread may use it.

    Each namespace keeps at most `max_responses` of `max_bytes`, packed: the last used ones. `records`: the open file.
    `given`: what the keys of its directory are made from or opened with.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        retention_s: float = RETENTION_S,
        given: Given = NOTHING_GIVEN,
    ) -> None:
        self.path = path
        self._given = given
        self._clock = clock
        self._bounds = (max_responses, max_bytes, retention_s)
        self.records: Records | None = None
        self._disk = threading.Lock()  # held while writing: acquired before the condition, never by `keep`
        self._changed = threading.Condition()  # guards the fields below
        self._unsaved: OrderedDict[Key, _Unsaved] = OrderedDict()
        self._receipts = WaitingReceipts()
        self._forgotten: dict[Key, int] = {}  # namespace, agent -> number of its last deletion
        self._num_forgotten = 0
        self._is_closing = False
        self._problem: str | None = None
        self._num_lost = 0
        self.worker = Worker("responses", self._run, on_death=self._died)

    def start(self) -> None:
        """Open the file; a StoreError says why that is impossible. If its disk refuses, opening is retried later."""
        try:
            self.records = self._opened()
        except StoreRefused as error:
            self._failed(error, {})
        self.worker.start()

    def _opened(self) -> Records:
        max_responses, max_bytes, retention_s = self._bounds
        return open_records(
            self.path, max_responses=max_responses, max_bytes=max_bytes, retention_s=retention_s, given=self._given
        )

    def close(self) -> None:
        """Write what is pending and close the file; safe to repeat, or without a start."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self.worker.join(JOIN_S)
        if self.worker.is_alive:
            return  # the disk hangs: so would closing
        with self._changed:
            self._refuse(self._unsaved.values(), StoreError("the server has stopped"))
        records, self.records = self.records, None
        if records is not None:
            records.close()

    @property
    def _open(self) -> Records:
        if self.records is None:
            raise StoreError(f"stored responses cannot be read: {self._problem or 'they are closed'}")
        return self.records

    def problems(self) -> tuple[str, ...]:
        """Why responses cannot be stored right now; empty if they can."""
        with self._changed:
            problem, num_waiting, num_lost = self._problem, len(self._unsaved), self._num_lost
        if problem is None:
            return ()
        what = f"{num_waiting} wait in memory and end with the server, {num_lost} are lost"
        return (f"responses cannot be stored in {self.path}: {problem}; {what}: check free space and permissions",)

    def ticket(self) -> int:
        """A number to take when a request arrives: `keep` uses it to detect that the agent was deleted meanwhile."""
        with self._changed:
            return self._num_forgotten

    def keep(self, stored: StoredResponse, *, ticket: int | None = None) -> Future[None]:
        """Store a response, unless its agent was deleted since the ticket was taken; returns at once.

        The future is done when the response is durable (without a file: known), or has the StoreError that says why it
        is not. The response can be found meanwhile, and after an error for as long as memory has room for it.
        """
        unsaved = _Unsaved(stored, Future())
        with self._changed:
            forgotten = self._forgotten.get((stored.namespace, stored.agent or ""), 0)
            if ticket is not None and forgotten > ticket:
                unsaved.durable.set_exception(StoreError(_FORGOTTEN))
            elif self._is_closing:
                unsaved.durable.set_exception(StoreError("the server is stopping"))
            elif self.worker.death is not None:
                unsaved.durable.set_exception(StoreError(self.worker.death.summary))
            else:
                self._unsaved[stored.namespace, stored.id] = unsaved
                self._changed.notify_all()
        return unsaved.durable

    def keep_receipt(self, receipt: Receipt, ticket: int) -> None:
        """Keep a receipt, unless its agent was deleted since the ticket was taken; returns at once."""
        with self._changed:
            is_gone = self._forgotten.get((receipt.namespace, receipt.agent or ""), 0) > ticket
            if is_gone or self._is_closing or self.worker.death is not None:
                return
            self._receipts.add(receipt)
            if self._problem is None:
                self._changed.notify_all()

    def receipts(self, namespace: str, id: str) -> list[Receipt]:
        """Return the receipts of an answer of this namespace by choice; empty if there are none. StoreError if the disk
        refuses."""
        if not id.isascii():
            return []
        with self._changed:
            waiting = self._receipts.of(namespace, id)
        written = self._open.receipts(namespace, id) if not waiting or self.records is not None else []
        found = {each.choice: each for each in written} | waiting
        return [found[choice] for choice in sorted(found)]

    def forget_receipts(self, namespace: str, ids: Collection[str]) -> None:
        """Delete the receipts of these answers; those that have none are passed over. StoreError if the disk refuses:
        what is written stays then."""
        with self._disk:
            with self._changed:
                self._receipts.drop(lambda each: each.namespace == namespace and each.id in ids)
            self._open.forget_receipts(namespace, ids)

    def find(self, namespace: str, id: str) -> StoredResponse | None:
        """Return a stored response of this namespace, or None. StoreError if the disk refuses."""
        if not id.isascii():  # no response has such an id, and half a surrogate pair cannot be looked up
            return None
        with self._changed:
            waiting = self._unsaved.get((namespace, id))
        if waiting is not None:
            return waiting.stored
        found = self._open.find(namespace, id, now=self._clock())
        return None if found is None else StoredResponse(namespace, *found)

    def chain(self, namespace: str, id: str) -> list[StoredResponse]:
        """Return the conversation up to and including a response, oldest first; a 400 if one of them is not stored."""
        chain: list[StoredResponse] = []
        wanted: str | None = id
        while wanted is not None:
            found = self.find(namespace, wanted)
            if found is None:
                which = "it" if not chain else f"{wanted[:100]!r}, which it continues,"
                message = (
                    f"previous response {id[:100]!r} not found: {which} is not stored here (never was, deleted, or too "
                    "old): send the whole conversation as input"
                )
                raise invalid(400, message, param="previous_response_id", code="previous_response_not_found")
            chain.append(found)
            wanted = found.previous
        return chain[::-1]

    def item(self, namespace: str, id: str) -> Item | None:
        """Return the stored item of an id, or None. StoreError if the disk refuses."""
        if not id.isascii():
            return None
        with self._changed:
            waiting = [each.stored for (space, _), each in self._unsaved.items() if space == namespace]
        for stored in waiting:
            for item in reversed(stored.all_items):
                if item["id"] == id:
                    return item
        holder = self._open.holder(namespace, id)
        held_by = None if holder is None else self.find(namespace, holder)
        items = [] if held_by is None else [item for item in held_by.all_items if item["id"] == id]
        return items[-1] if items else None

    def delete(self, namespace: str, id: str) -> bool:
        """Delete a response; return whether there was one. StoreError if the disk refuses."""
        with self._disk:
            try:
                was_there = self._open.delete(namespace, id)
            except StoreError as error:
                message = f"response {id[:100]!r} is not deleted: {error}; make room on the disk and delete it again"
                raise StoreError(message) from error
            with self._changed:
                return self._drop([(namespace, id)], StoreError("it was deleted meanwhile")) > 0 or was_there

    def check_open(self) -> None:
        """Raise StoreError if the file could not be opened, so that nothing can be deleted."""
        _ = self._open

    def forget(self, namespace: str, agent: str) -> int:
        """Delete an agent's responses without a trace in the file; return how many there were.

        A response still being generated will not be stored either. On StoreError, nothing was deleted.
        """
        with self._disk:
            num_written = self._open.forget(namespace, agent)
            with self._changed:
                unsaved = self._unsaved.items()
                theirs = [key for key, each in unsaved if (key[0], each.stored.agent) == (namespace, agent)]
                self._drop(theirs, StoreError(_FORGOTTEN))
                self._receipts.drop(lambda each: (each.namespace, each.agent) == (namespace, agent))
                self._num_forgotten += 1
                self._forgotten[namespace, agent] = self._num_forgotten
                while len(self._forgotten) > MAX_FORGOTTEN:
                    del self._forgotten[next(iter(self._forgotten))]
            return num_written + len(theirs)

    def flush(self, timeout_s: float = JOIN_S) -> bool:
        """Wait until every response and receipt is on disk; False if `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._unsaved or self._receipts), timeout_s)

    def check(self) -> None:
        """Assert the invariants of the file."""
        self._open.check()

    def _drop(self, keys: Sequence[Key], why: StoreError) -> int:
        """Drop pending responses; return how many of these were pending. The condition is held."""
        found = [each for key in keys if (each := self._unsaved.pop(key, None)) is not None]
        self._refuse(found, why)
        return len(found)

    @property
    def _is_refused(self) -> bool:
        """Whether the disk refused all that is pending. The condition is held."""
        return self._problem is not None and all(each.durable.done() for each in self._unsaved.values())

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._unsaved or self._receipts or self._is_closing or self._problem is not None):
                    self._changed.wait()
                elif self._is_refused and not self._is_closing:
                    self._changed.wait(RETRY_S)
                if self._receipts and self._problem is None:
                    self._changed.wait_for(lambda: self._unsaved or self._is_closing, GATHER_S)
                is_last = self._is_closing
            try:
                self._save()
            except BaseException as error:
                # Border: a worker. An error fails only the pending responses.
                logger.exception("a response could not be stored")
                self._failed(refusal := StoreError(f"a response could not be stored: {error!r}"), {})
                with self._changed:
                    self._refuse(self._unsaved.values(), refusal)
            if is_last:
                return

    def _died(self, death: Death) -> None:
        """Fail the futures of pending responses, which stay in memory until the server stops."""
        with self._changed:
            self._problem = str(death)
            self._refuse(self._unsaved.values(), StoreError(death.summary))
            self._changed.notify_all()

    def _save(self) -> None:
        """Write the pending responses. They stay pending until written, so a reader always finds them."""
        with self._disk:
            entries = self._entries()
            with self._changed:
                receipts = self._receipts.all()
            try:
                if self.records is None:
                    self.records = self._opened()
                self._open.save(list(entries.values()), receipts, self._clock())
            except StoreError as error:
                self._failed(error, entries)
                return
            with self._changed:
                saved = [each for key in entries if (each := self._unsaved.pop(key, None)) is not None]
                self._receipts.written(receipts)
                problem, self._problem = self._problem, None
                self._changed.notify_all()
        for each in saved:
            if not each.durable.done():
                each.durable.set_result(None)
        if problem is not None:
            logger.warning("responses are stored in %s again; %d are lost", self.path, self._num_lost)

    def _entries(self) -> dict[Key, Entry]:
        """Pack the pending responses; refuse those that cannot be packed."""
        with self._changed:
            waiting = dict(self._unsaved)
        packed = {key: each.entry or _packed(each.stored) for key, each in waiting.items()}
        entries = {key: entry for key, entry in packed.items() if entry is not None}
        with self._changed:
            self._drop([key for key in packed if key not in entries], StoreError("it is nested too deeply"))
            for key in entries.keys() & self._unsaved.keys():
                self._unsaved[key] = replace(waiting[key], entry=entries[key])
        return {key: entries[key] for key in packed if key in entries}

    def _failed(self, error: StoreError, entries: Mapping[Key, Entry]) -> None:
        """Give the callers of these the error: they are not durable. They stay in memory as far as it has room."""
        with self._changed:
            is_new, self._problem = self._problem is None, str(error)
            num_bytes = sum(len(entry.content) for entry in entries.values())
            for key, entry in entries.items():
                if len(self._unsaved) > MAX_UNSAVED or num_bytes > MAX_UNSAVED_BYTES:
                    self._num_lost += self._drop([key], error)
                    num_bytes -= len(entry.content)
            self._refuse([self._unsaved[key] for key in entries.keys() & self._unsaved.keys()], error)
        if is_new:
            logger.warning("responses cannot be stored in %s: %s; the last ones wait in memory", self.path, error)

    @staticmethod
    def _refuse(those: Iterable[_Unsaved], error: StoreError) -> None:
        """Give the callers of these the error: they are not durable. The condition is held."""
        for each in those:
            if not each.durable.done():
                each.durable.set_exception(error)


def _packed(stored: StoredResponse) -> Entry | None:
    """Pack a response for writing; None if it is nested too deeply."""
    try:
        return Entry.packed(stored.namespace, stored.agent, stored.response, stored.items)
    except (ValueError, RecursionError) as error:
        logger.warning("response %s cannot be stored: %s", stored.id, error)
        return None
