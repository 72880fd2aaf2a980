"""The order in which blocks leave the disk when it is full: which go first, and which may not go.

Owns that order, in memory, made from the rows the first time room is short and kept in step by the ledger, which alone
changes rows. A block leaves only after all its children. Of those that may go:

    1. blocks no sequence ends in: what is left of cancelled prompts, but not what was written a moment ago,
       for a request that is still running
    2. heads of anonymous agents
    3. heads of named ones                               in each class the one used longest ago first

A namespace that has more than its share of the blocks there are when room is short gives way before others.

Never: the heads of pinned agents, so with them their chains, and what is held for the batch that needs the room.
A last use in the future (the clock went back since) counts as now.
"""

from __future__ import annotations

import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter

from rekindle.agent_ids import kind_of
from rekindle.cache.eviction import KeyedOrder

# How long blocks without a sequence count as those of a running request, and not of a cancelled one.
RUNNING_S = 300.0
# A clock that goes back by more has the order made anew, else all that was used before it would stay in front.
CLOCK_SLACK_S = 1.0
# By how much the number of blocks may drift, as a share of it, before the namespaces' quotas follow.
QUOTA_DRIFT = 1 / 64
_ORPHANED, _TEMPORARY, _NAMED = range(3)  # ranks: the lower leave first
_STANDING = "SELECT id, CAST(pinned_until AS REAL), CAST(last_use AS REAL) FROM sequence JOIN agent USING(agent)"

Standing = tuple[str, float, float]  # of a sequence that ends in a block: its agent's id, pinned until, last use


class StoreEvictionOrder:
    """Names of the blocks on disk by when they leave. `db` is the ledger's connection."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._share = 1.0  # of all blocks; a namespace with more gives way first
        self._groups: dict[bytes, int] = {}  # by root, from 1 up; of the order at hand
        self._most: int | None = None  # blocks of a group before it gives way first
        self._shared = 0  # blocks of which `_most` is the share
        self._order: KeyedOrder[bytes] | None = None
        self._now = 0.0
        self._restated: set[bytes] = set()
        self._held: frozenset[bytes] = frozenset()
        self._due: dict[bytes, float] = {}  # when a block's place changes by time alone

    def limit_namespaces(self, share: float) -> None:
        """Let blocks of namespaces that have more than this share of all blocks leave before others'."""
        self._share = share
        self.forget()

    def add(self, name: bytes, parent: bytes, root: bytes) -> None:
        """Take in a block that was written (`parent` the root: the first of its chain)."""
        if self._order is not None:
            self._enter(self._order, name, parent, root)
            self._restated.add(name)

    def _enter(self, order: KeyedOrder[bytes], name: bytes, parent: bytes, root: bytes) -> None:
        if self._share < 1 and root not in self._groups:
            self._groups[root] = len(self._groups) + 1
            order.set_quota(self._groups[root], self._most)
        order.add(name, None if parent == root else parent, group=self._groups.get(root, 0))

    def remove(self, name: bytes, parent: bytes) -> None:
        """Forget a block that was freed; its parent may be next."""
        if self._order is None:
            return
        if name in self._order:
            self._order.remove(name)
        self._due.pop(name, None)
        self._restated.discard(name)
        self._restated.add(parent)

    def restate(self, names: Iterable[bytes]) -> None:
        """Look at these again: other sequences end in them, or their agents were used or pinned."""
        if self._order is not None:
            self._restated.update(names)

    def forget(self) -> None:
        """Make the order anew when it is next needed: what it followed did not happen."""
        self._order = None
        self._groups.clear()
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
        return self._order is None or now < self._now - CLOCK_SLACK_S

    def next(self, now: float) -> bytes | None:
        """The block to evict now; None when all that is left is pinned or held."""
        if self._order is None or self.is_outdated(now):
            self._fill(now)
        assert self._order is not None
        self._weigh(self._order)
        self._now = max(now, self._now)
        self._restated.update([name for name, when in self._due.items() if when < now])
        restated = [(self._own_use(name), name) for name in self._restated if name in self._order]
        for own_use, name in sorted(restated):
            self._place(self._order, name, self._standing(name), own_use, now)
        self._restated.clear()
        leaving = self._order.pop(now)
        if leaving is not None:
            self._due.pop(leaving, None)
        return leaving

    def check(self) -> None:
        """Assert that the order holds exactly the blocks of the index, each with its parent."""
        if self._order is None:
            return
        self._order.check()
        names = {row[0] for row in self._db.execute("SELECT name FROM block WHERE part = 0")}
        missing = [name for name in names if name not in self._order]
        assert not missing and len(names) == len(self._order), f"{len(names)} blocks, {len(self._order)} in the order"
        assert not self._held, "a batch that has ended holds blocks"
        assert set(self._due) <= names, "a block that is gone is still waited for"

    def _fill(self, now: float) -> None:
        self.forget()
        self._now = now
        order = KeyedOrder[bytes]()
        standing: dict[bytes, list[Standing]] = defaultdict(list)
        for head, *row in self._db.execute(_STANDING.replace("SELECT", "SELECT head,", 1)):
            standing[head].append((row[0], row[1], row[2]))
        uses: dict[bytes, float] = {}
        (num_blocks,) = self._db.execute("SELECT COUNT(*) FROM block WHERE part = 0").fetchone()
        self._share_out(num_blocks)
        query = "SELECT name, parent, root, CAST(last_use AS REAL) FROM block WHERE part = 0"
        for name, parent, root, last_use in self._db.execute(query):
            self._enter(order, name, parent, root)
            uses[name] = last_use
        for name, last_use in sorted(uses.items(), key=itemgetter(1)):
            self._place(order, name, standing.get(name, ()), last_use, now)
        self._order = order

    def _weigh(self, order: KeyedOrder[bytes]) -> None:
        """Let the quotas follow the number of blocks: the room may have become less, or more, since they were set."""
        if self._share < 1 and abs(len(order) - self._shared) > QUOTA_DRIFT * self._shared:
            self._share_out(len(order))
            for group in self._groups.values():
                order.set_quota(group, self._most)

    def _share_out(self, num_blocks: int) -> None:
        self._shared = num_blocks
        self._most = max(1, int(self._share * num_blocks)) if self._share < 1 else None

    def _standing(self, name: bytes) -> list[Standing]:
        return self._db.execute(f"{_STANDING} WHERE head = ?", (name,)).fetchall()

    def _own_use(self, name: bytes) -> float:
        query = "SELECT CAST(last_use AS REAL) FROM block WHERE name = ? AND part = 0"
        return float(self._db.execute(query, (name,)).fetchone()[0])

    def _place(
        self, order: KeyedOrder[bytes], name: bytes, standing: Sequence[Standing], own_use: float, now: float
    ) -> None:
        """Give a block the place that its sequences, or its own last use, give it."""
        self._due.pop(name, None)
        pinned_until = max((until for _, until, _ in standing if until > 0), default=-math.inf)
        if pinned_until >= now:
            order.hold(name)
            if pinned_until < math.inf:
                self._due[name] = pinned_until
        elif name in self._held:
            order.hold(name)
        elif standing:
            ranked = ((_TEMPORARY if kind_of(agent).is_temporary else _NAMED, use) for agent, _, use in standing)
            _let_go(order, name, *max((rank, _past(use, now)) for rank, use in ranked))
        elif 0 <= now - own_use <= RUNNING_S:
            _let_go(order, name, _NAMED, own_use)
            self._due[name] = own_use + RUNNING_S
        else:
            _let_go(order, name, _ORPHANED, _past(own_use, now))


def _let_go(order: KeyedOrder[bytes], name: bytes, rank: int, use: float) -> None:
    """Let a block leave when its turn comes; a use that the order knows is told no second time."""
    if order.last_use(name) == use:
        order.settle(name, rank=rank)
    else:
        order.release(name, use, rank=rank)


def _past(use: float, now: float) -> float:
    return min(max(0.0, use), now)
