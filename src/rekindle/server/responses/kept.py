"""Responses that are kept, so that callers can go on from them: in a file beside the store, or in memory without one.

Owns the file `responses.db` and its thread. A response is kept with the items that were new in its request, and names
the one it went on from: a conversation is a chain. It is known as soon as `keep` returns and on disk a moment later; a
disk that refuses costs no answer, only, in the end, what could not be written. Gone on from, the whole chain counts as
used: whoever goes on from a response finds all before it, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import StoreError
from rekindle.server.errors import invalid
from rekindle.server.responses.items import Item
from rekindle.server.responses.records import Entry, Records, open_records

logger = logging.getLogger("rekindle.server")
FILE_NAME = "responses.db"
KEPT_S = 30 * 86400.0
MAX_KEPT = 10_000
MAX_BYTES = 1 << 30  # packed, on disk
MAX_MEMORY_BYTES = 128 << 20  # packed, where there is no disk
MAX_UNSAVED = 256  # responses that wait for a disk that refuses
MAX_FORGOTTEN = 4096  # agents whose running requests are known to be of a forgotten one
RETRY_S = 30.0
JOIN_S = 10.0
Key = tuple[str, str]  # namespace, id


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it was answered, whose it is, and the items that came with its request."""

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
        """The response it went on from."""
        previous: str | None = self.response["previous_response_id"]
        return previous

    @property
    def all_items(self) -> list[Item]:
        """What this response adds to the conversation: what was asked, and what was said."""
        return [*self.items, *self.response["output"]]


class KeptResponses:
    """Every kept response of all namespaces. Start it, close it; `path` None: in memory. Any thread may use it."""

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.time,
        max_kept: int = MAX_KEPT,
        max_bytes: int | None = None,
        kept_s: float = KEPT_S,
    ) -> None:
        self.path = path
        self._clock = clock
        self._bounds = (max_kept, max_bytes or (MAX_BYTES if path else MAX_MEMORY_BYTES), kept_s)
        self._records: Records | None = None
        self._disk = threading.Lock()  # held by whoever writes: taken before the condition, never by `keep`
        self._changed = threading.Condition()  # over what follows
        self._unsaved: OrderedDict[Key, Kept] = OrderedDict()
        self._forgotten: dict[Key, int] = {}  # namespace, agent -> number of its last forgetting
        self._num_forgotten = 0
        self._is_closing = False
        self._problem: str | None = None
        self._num_lost = 0
        self._thread = threading.Thread(target=self._run, name="rekindle-responses", daemon=True)

    def start(self) -> None:
        """Open the file; a StoreError says why it cannot be."""
        max_kept, max_bytes, kept_s = self._bounds
        self._records = open_records(self.path, max_kept=max_kept, max_bytes=max_bytes, kept_s=kept_s)
        self._thread.start()

    def close(self) -> None:
        """Write what waits and close the file; again, or without a start, is safe."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        if self._thread.is_alive():
            return  # the disk hangs: so would closing
        records, self._records = self._records, None
        if records is not None:
            records.close()

    @property
    def _open(self) -> Records:
        if self._records is None:
            raise StoreError("kept responses are not open")
        return self._records

    def problems(self) -> tuple[str, ...]:
        """What keeps responses from being kept right now."""
        with self._changed:
            problem, num_lost = self._problem, self._num_lost
        return () if problem is None else (f"responses cannot be kept in {self.path}: {problem}; {num_lost} are lost",)

    def ticket(self) -> int:
        """Taken when a request comes: it tells whether its agent has been forgotten by the time it is answered."""
        with self._changed:
            return self._num_forgotten

    def keep(self, kept: Kept, *, ticket: int | None = None) -> None:
        """Take a response in, unless its agent was forgotten since the ticket was taken; returns at once."""
        with self._changed:
            forgotten = self._forgotten.get((kept.namespace, kept.agent or ""), 0)
            if ticket is not None and forgotten > ticket:
                return
            self._unsaved[kept.namespace, kept.id] = kept
            if len(self._unsaved) > MAX_UNSAVED:
                self._unsaved.popitem(last=False)
                self._num_lost += 1
            self._changed.notify_all()

    def find(self, namespace: str, id: str) -> Kept | None:
        """A kept response of this namespace, None where there is none. StoreError if the disk refuses."""
        if not id.isascii():  # none has such an id, and half a surrogate pair cannot be looked up
            return None
        with self._changed:
            waiting = self._unsaved.get((namespace, id))
        if waiting is not None:
            return waiting
        found = self._open.find(namespace, id, now=self._clock())
        return None if found is None else Kept(namespace, *found)

    def chain(self, namespace: str, id: str) -> list[Kept]:
        """The conversation up to and with a response, its first one first; a 400 where one of them is not kept."""
        chain: list[Kept] = []
        wanted: str | None = id
        while wanted is not None:
            found = self.find(namespace, wanted)
            if found is None:
                which = "it" if not chain else f"{wanted[:100]!r}, which it goes on from,"
                message = (
                    f"previous response {id[:100]!r} not found: {which} is not kept here (never was, deleted, or too "
                    "old): send the whole conversation as input"
                )
                raise invalid(400, message, param="previous_response_id", code="previous_response_not_found")
            chain.append(found)
            wanted = found.previous
        return chain[::-1]

    def item(self, namespace: str, id: str) -> Item | None:
        """The kept item of an id, None where there is none. StoreError if the disk refuses."""
        if not id.isascii():
            return None
        with self._changed:
            waiting = [kept for (space, _), kept in self._unsaved.items() if space == namespace]
        for kept in waiting:
            for item in reversed(kept.all_items):
                if item["id"] == id:
                    return item
        holder = self._open.holder(namespace, id)
        kept_by = None if holder is None else self.find(namespace, holder)
        items = [] if kept_by is None else [item for item in kept_by.all_items if item["id"] == id]
        return items[-1] if items else None

    def delete(self, namespace: str, id: str) -> bool:
        """Keep a response no longer; whether there was one. StoreError if the disk refuses."""
        with self._disk:
            try:
                was_there = self._open.delete(namespace, id)
            except StoreError as error:
                message = f"response {id[:100]!r} is not deleted: {error}; make room on the disk and delete it again"
                raise StoreError(message) from error
            with self._changed:
                return self._unsaved.pop((namespace, id), None) is not None or was_there

    def forget(self, namespace: str, agent: str) -> int:
        """Keep none of an agent's responses any longer, and leave no trace in the file; how many there were.

        One that is still being generated will not be kept either. A disk that refuses (StoreError) forgets nothing.
        """
        with self._disk:
            num_written = self._open.forget(namespace, agent)
            with self._changed:
                theirs = [key for key, kept in self._unsaved.items() if (key[0], kept.agent) == (namespace, agent)]
                for key in theirs:
                    del self._unsaved[key]
                self._num_forgotten += 1
                self._forgotten[namespace, agent] = self._num_forgotten
                while len(self._forgotten) > MAX_FORGOTTEN:
                    del self._forgotten[next(iter(self._forgotten))]
            return num_written + len(theirs)

    def flush(self, timeout_s: float = JOIN_S) -> bool:
        """Wait until every response is on disk; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unsaved, timeout_s)

    def check(self) -> None:
        """Assert that the file holds what it should, no more than it may."""
        self._open.check()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._unsaved or self._is_closing):
                    self._changed.wait()
                elif self._problem is not None and not self._is_closing:
                    self._changed.wait(RETRY_S)
                is_last = self._is_closing
            try:
                self._save()
            except Exception as error:
                # Border: a worker. What it stumbles over costs that response, in the end, and no other.
                logger.exception("a response could not be kept")
                self._failed(str(error))
            if is_last:
                return

    def _save(self) -> None:
        """Write what waits. It waits until it is written: a reader finds it in one of the two places, or in both."""
        with self._disk:
            with self._changed:
                batch = list(self._unsaved.items())
            try:
                entries = [entry for _, kept in batch if (entry := _packed(kept)) is not None]
                self._open.save(entries, self._clock())
            except StoreError as error:
                self._failed(str(error))
                return
            with self._changed:
                for key, _ in batch:
                    self._unsaved.pop(key, None)
                problem, self._problem = self._problem, None
                self._changed.notify_all()
        if problem is not None:
            logger.warning("responses are kept in %s again; %d are lost", self.path, self._num_lost)

    def _failed(self, why: str) -> None:
        with self._changed:
            is_new, self._problem = self._problem is None, why
        if is_new:
            logger.warning("responses cannot be kept in %s: %s; the last ones wait in memory", self.path, why)


def _packed(kept: Kept) -> Entry | None:
    """A response as it is written; None for one that is nested too deeply to be."""
    try:
        return Entry.packed(kept.namespace, kept.agent, kept.response, kept.items)
    except (ValueError, RecursionError) as error:
        logger.warning("response %s cannot be kept: %s", kept.id, error)
        return None
