"""The eviction order of blocks on disk: which are evicted first, and which may not be.

Owns that order in memory. It is built from the rows when room first runs short and kept up to date by the ledger, the
only writer of rows. A block is evicted only after all its children. Of the remaining leaves:

    1. blocks no sequence ends in: left by cancelled prompts; recently written ones are excluded, as their request
       may still be running
    2. heads of anonymous agents
    3. heads of named agents                             in each class least recently used first

A namespace that has more than its share of the blocks when room is short is evicted from before others.

Never evicted: the heads of pinned agents (and so their chains), and blocks held for the batch that needs the room.
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
from rekindle.store.rows.schema import IndexTables

# How long a block without a sequence counts as a running request's, rather than a cancelled one's.
RUNNING_S = 300.0
# If the clock goes back by more than this, the order is rebuilt; otherwise all earlier uses would rank as newer.
CLOCK_SLACK_S = 1.0
# Relative change in the number of blocks after which the namespaces' quotas are recomputed.
QUOTA_DRIFT = 1 / 64
_ORPHANED, _TEMPORARY, _NAMED = range(3)  # ranks: lower ones are evicted first
_ENDINGS = "SELECT id, CAST(pinned_until AS REAL), CAST(last_use AS REAL) FROM sequence JOIN agent USING(agent)"

Ending = tuple[str, float, float]  # of a sequence that ends in a block: its agent's id, pinned until, last use


class StoreEvictionOrder:
    """Block hashes in eviction order. `db` is the ledger's connection, to an index with these tables."""

    def __init__(self, db: sqlite3.Connection, tables: IndexTables) -> None:
        self._db = db
        self._agent = tables.agent
        self._share = 1.0  # of all blocks; a namespace with more is evicted from first
        self._groups: dict[bytes, int] = {}  # by root, from 1 up; of the current order
        self._most: int | None = None  # quota of a group, in blocks
        self._shared = 0  # number of blocks from which `_most` was computed
        self._order: KeyedOrder[bytes] | None = None
        self._now = 0.0
        self._restated: set[bytes] = set()
        self._held: frozenset[bytes] = frozenset()
        self._due: dict[bytes, float] = {}  # when a block's position changes through time alone

    def limit_namespaces(self, share: float) -> None:
        """Evict first from namespaces that have more than this share of all blocks."""
        self._share = share
        self.forget()

    def add(self, block_hash: bytes, parent: bytes, root: bytes) -> None:
        """Add a written block; `parent` is the root for the first of a chain."""
        if self._order is not None:
            self._enter(self._order, block_hash, parent, root)
            self._restated.add(block_hash)

    def _enter(self, order: KeyedOrder[bytes], block_hash: bytes, parent: bytes, root: bytes) -> None:
        if self._share < 1 and root not in self._groups:
            self._groups[root] = len(self._groups) + 1
            order.set_quota(self._groups[root], self._most)
        order.add(block_hash, None if parent == root else parent, group=self._groups.get(root, 0))

    def remove(self, block_hash: bytes, parent: bytes) -> None:
        """Remove a freed block; its parent may now be evictable."""
        if self._order is None:
            return
        if block_hash in self._order:
            self._order.remove(block_hash)
        self._due.pop(block_hash, None)
        self._restated.discard(block_hash)
        self._restated.add(parent)

    def restate(self, hashes: Iterable[bytes]) -> None:
        """Re-evaluate these blocks: other sequences end in them, or their agents were used or pinned."""
        if self._order is not None:
            self._restated.update(hashes)

    def forget(self) -> None:
        """Discard the order, to be rebuilt when next needed: the changes it followed were rolled back."""
        self._order = None
        self._groups.clear()
        self._restated.clear()
        self._due.clear()

    @contextmanager
    def holding(self, hashes: Iterable[bytes]) -> Iterator[None]:
        """Protect these blocks from eviction inside the `with` block."""
        self._held = frozenset(hashes)
        self.restate(self._held)
        try:
            yield
        finally:
            self.restate(self._held)
            self._held = frozenset()

    def is_outdated(self, now: float) -> bool:
        """Whether `next` will rebuild the order: it does not exist yet, or the clock went back."""
        return self._order is None or now < self._now - CLOCK_SLACK_S

    def next(self, now: float) -> bytes | None:
        """Pop the block to evict now; None if all the rest are pinned or held."""
        if self._order is None or self.is_outdated(now):
            self._fill(now)
        assert self._order is not None
        self._weigh(self._order)
        self._now = max(now, self._now)
        self._restated.update([block_hash for block_hash, when in self._due.items() if when < now])
        present = [block_hash for block_hash in self._restated if block_hash in self._order]
        restated = [(self._own_use(block_hash), block_hash) for block_hash in present]
        for own_use, block_hash in sorted(restated):
            self._place(self._order, block_hash, self._endings(block_hash), own_use, now)
        self._restated.clear()
        evicted = self._order.pop(now)
        if evicted is not None:
            self._due.pop(evicted, None)
        return evicted

    def check(self) -> None:
        """Assert that the order contains exactly the blocks of the index."""
        if self._order is None:
            return
        self._order.check()
        hashes = {row[0] for row in self._db.execute("SELECT name FROM block WHERE part = 0")}
        missing = [block_hash for block_hash in hashes if block_hash not in self._order]
        assert not missing and len(hashes) == len(self._order), f"{len(hashes)} blocks, {len(self._order)} in the order"
        assert not self._held, "a finished batch still holds blocks"
        assert set(self._due) <= hashes, "a removed block still has a due time"

    def _fill(self, now: float) -> None:
        self.forget()
        self._now = now
        order = KeyedOrder[bytes]()
        endings: dict[bytes, list[Ending]] = defaultdict(list)
        for head, *row in self._db.execute(_ENDINGS.replace("SELECT", "SELECT head,", 1)):
            endings[head].append((self._agent.says("id", row[0]), row[1], row[2]))
        uses: dict[bytes, float] = {}
        (num_blocks,) = self._db.execute("SELECT COUNT(*) FROM block WHERE part = 0").fetchone()
        self._share_out(num_blocks)
        query = "SELECT name, parent, root, CAST(last_use AS REAL) FROM block WHERE part = 0"
        for block_hash, parent, root, last_use in self._db.execute(query):
            self._enter(order, block_hash, parent, root)
            uses[block_hash] = last_use
        for block_hash, last_use in sorted(uses.items(), key=itemgetter(1)):
            self._place(order, block_hash, endings.get(block_hash, ()), last_use, now)
        self._order = order

    def _weigh(self, order: KeyedOrder[bytes]) -> None:
        """Adjust the quotas if the number of blocks has changed since they were set."""
        if self._share < 1 and abs(len(order) - self._shared) > QUOTA_DRIFT * self._shared:
            self._share_out(len(order))
            for group in self._groups.values():
                order.set_quota(group, self._most)

    def _share_out(self, num_blocks: int) -> None:
        self._shared = num_blocks
        self._most = max(1, int(self._share * num_blocks)) if self._share < 1 else None

    def _endings(self, block_hash: bytes) -> list[Ending]:
        found = self._db.execute(f"{_ENDINGS} WHERE head = ?", (block_hash,))
        return [(self._agent.says("id", agent), until, last_use) for agent, until, last_use in found]

    def _own_use(self, block_hash: bytes) -> float:
        query = "SELECT CAST(last_use AS REAL) FROM block WHERE name = ? AND part = 0"
        return float(self._db.execute(query, (block_hash,)).fetchone()[0])

    def _place(
        self, order: KeyedOrder[bytes], block_hash: bytes, endings: Sequence[Ending], own_use: float, now: float
    ) -> None:
        """Position a block by the sequences that end in it, or else by its own last use."""
        self._due.pop(block_hash, None)
        pinned_until = max((until for _, until, _ in endings if until > 0), default=-math.inf)
        if pinned_until >= now:
            order.hold(block_hash)
            if pinned_until < math.inf:
                self._due[block_hash] = pinned_until
        elif block_hash in self._held:
            order.hold(block_hash)
        elif endings:
            ranked = ((_TEMPORARY if kind_of(agent).is_temporary else _NAMED, use) for agent, _, use in endings)
            _release(order, block_hash, *max((rank, _past(use, now)) for rank, use in ranked))
        elif 0 <= now - own_use <= RUNNING_S:
            _release(order, block_hash, _NAMED, own_use)
            self._due[block_hash] = own_use + RUNNING_S
        else:
            _release(order, block_hash, _ORPHANED, _past(own_use, now))


def _release(order: KeyedOrder[bytes], block_hash: bytes, rank: int, use: float) -> None:
    """Make a block evictable, without repeating a use that the order already has."""
    if order.last_use(block_hash) == use:
        order.settle(block_hash, rank=rank)
    else:
        order.release(block_hash, use, rank=rank)


def _past(use: float, now: float) -> float:
    return min(max(0.0, use), now)
