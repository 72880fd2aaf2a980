"""The order in which blocks leave the disk when it is full: which go first, and which may not go.

Owns that order, in memory, made from the rows the first time room is short and kept in step by the ledger, which alone
changes rows. A block leaves only after all its children. Of those that may go:

    1. blocks no sequence ends in: what is left of cancelled prompts, but not what was written a moment ago,
       for a request that is still running
    2. heads of anonymous agents
    3. heads of named ones                               in each class the one used longest ago first

Never: the heads of pinned agents, so with them their chains, and what is held for the batch that needs the room.
A last use in the future (the clock went back since) counts as now.
"""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rekindle.cache.eviction import LeafLRU
from rekindle.store.values import is_anonymous

# How long blocks without a sequence count as those of a running request, and not of a cancelled one.
RUNNING_S = 300.0
# A clock that goes back by more has the order made anew, else all that was used before it would stay in front.
CLOCK_SLACK_S = 1.0
# Wall time in seconds is below 2^41 for 69,000 years and keeps half a millisecond when this is taken off.
_ANONYMOUS, _ORPHANED = -(2.0**41), -(2.0**42)
_STANDING = "SELECT id, CAST(pinned_until AS REAL), CAST(last_use AS REAL) FROM sequence JOIN agent USING(agent)"

Standing = tuple[str, float, float]  # of a sequence that ends in a block: its agent's id, pinned until, last use


class LeavingOrder:
    """Names of the blocks on disk by when they leave. `db` is the ledger's connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lru: LeafLRU[bytes] | None = None
        self._now = 0.0
        self._restated: set[bytes] = set()
        self._held: frozenset[bytes] = frozenset()
        self._due: dict[bytes, float] = {}  # when a block's place changes by time alone

    def add(self, name: bytes, parent: bytes | None) -> None:
        """Take in a block that was written (`parent` None: the first of its chain)."""
        if self._lru is not None:
            self._lru.add(name, parent)
            self._restated.add(name)

    def remove(self, name: bytes, parent: bytes) -> None:
        """Forget a block that was freed; its parent may be next."""
        if self._lru is None:
            return
        if name in self._lru:
            self._lru.remove(name)
        self._due.pop(name, None)
        self._restated.discard(name)
        self._restated.add(parent)

    def restate(self, names: Iterable[bytes]) -> None:
        """Look at these again: other sequences end in them, or their agents were used or pinned."""
        if self._lru is not None:
            self._restated.update(names)

    def forget(self) -> None:
        """Make the order anew when it is next needed: what it followed did not happen."""
        self._lru = None
        self._restated.clear()
        self._due.clear()

    @contextmanager
    def holding(self, names: Iterable[bytes]) -> Iterator[None]:
        """Keep these from leaving meanwhile."""
        self._held = frozenset(names)
        self.restate(self._held)
        try:
            yield
        finally:
            self.restate(self._held)
            self._held = frozenset()

    def is_outdated(self, now: float) -> bool:
        """Whether the next question makes the order anew: it was not made yet, or the clock went back."""
        return self._lru is None or now < self._now - CLOCK_SLACK_S

    def next(self, now: float) -> bytes | None:
        """The block to evict now; None when all that is left is pinned or held."""
        if self._lru is None or self.is_outdated(now):
            self._fill(now)
        assert self._lru is not None
        self._now = max(now, self._now)
        self._restated.update([name for name, when in self._due.items() if when < now])
        for name in self._restated:
            if name in self._lru:
                self._place(self._lru, name, self._standing(name), self._own_use(name), now)
        self._restated.clear()
        leaving = self._lru.pop()
        if leaving is not None:
            self._due.pop(leaving, None)
        return leaving

    def check(self) -> None:
        """Assert that the order holds exactly the blocks of the index, each with its parent."""
        if self._lru is None:
            return
        self._lru.check()
        names = {row[0] for row in self._db.execute("SELECT name FROM block WHERE part = 0")}
        missing = [name for name in names if name not in self._lru]
        assert not missing and len(names) == len(self._lru), f"{len(names)} blocks, {len(self._lru)} in the order"
        assert not self._held, "a batch that has ended holds blocks"
        assert set(self._due) <= names, "a block that is gone is still waited for"

    def _fill(self, now: float) -> None:
        self.forget()
        self._now = now
        lru = LeafLRU[bytes]()
        standing: dict[bytes, list[Standing]] = defaultdict(list)
        for head, *row in self._db.execute(_STANDING.replace("SELECT", "SELECT head,", 1)):
            standing[head].append((row[0], row[1], row[2]))
        uses: dict[bytes, float] = {}
        query = "SELECT name, parent, root, CAST(last_use AS REAL) FROM block WHERE part = 0"
        for name, parent, root, last_use in self._db.execute(query):
            lru.add(name, None if parent == root else parent)
            uses[name] = last_use
        for name, last_use in uses.items():
            self._place(lru, name, standing.get(name, ()), last_use, now)
        self._lru = lru

    def _standing(self, name: bytes) -> list[Standing]:
        return self._db.execute(f"{_STANDING} WHERE head = ?", (name,)).fetchall()

    def _own_use(self, name: bytes) -> float:
        query = "SELECT CAST(last_use AS REAL) FROM block WHERE name = ? AND part = 0"
        return float(self._db.execute(query, (name,)).fetchone()[0])

    def _place(
        self, lru: LeafLRU[bytes], name: bytes, standing: Sequence[Standing], own_use: float, now: float
    ) -> None:
        """Give a block the place that its sequences, or its own last use, give it."""
        self._due.pop(name, None)
        pinned_until = max((until for _, until, _ in standing if until > 0), default=-math.inf)
        if pinned_until >= now:
            lru.hold(name)
            if pinned_until < math.inf:
                self._due[name] = pinned_until
        elif name in self._held:
            lru.hold(name)
        elif standing:
            lru.release(name, max(_rank(is_anonymous(agent), use, now) for agent, _, use in standing))
        elif 0 <= now - own_use <= RUNNING_S:
            lru.release(name, own_use)
            self._due[name] = own_use + RUNNING_S
        else:
            lru.release(name, _ORPHANED + min(max(0.0, own_use), now))


def _rank(anonymous: bool, last_use: float, now: float) -> float:
    return (_ANONYMOUS if anonymous else 0.0) + min(max(0.0, last_use), now)
