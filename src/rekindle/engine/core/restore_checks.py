"""Checks of restored blocks in idle time: is what came back from disk what computing gives?

Owns which restored blocks wait for that, how many were checked and differed, and which. One of `one_in` full blocks
that a load has restored is computed again on the blocks before it, and its bytes are compared. By induction over a
chain that is a check of the whole; only where every path to the same ids gives the same bits (the promise `bitwise`),
and only of what was saved by what computes now (`WarmStore.is_own`). Blocks with rows of pictures are not: their
pictures are gone.

    waiting ──step──▶ some rows are as computed ──step──▶ ... ──▶ checked
                          └──▶ differed: it, and all that was computed after it, leave memory and store

A step is one forward pass of as many rows as idle work may have, and nothing is held between two: a request waits for
one at most, as for idle work. A block that has left memory is not checked. On the engine's thread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.purge import evict_hashes, with_descendants
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.core.verdicts import Verdicts
from rekindle.engine.sequence import Sequence
from rekindle.model.batch import SequenceStep
from rekindle.model.loaded import Runner
from rekindle.store.warm import WarmStore

logger = logging.getLogger(__name__)
MOST_WAITING = 64


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A restored block: the ids of its chain up to its end (uint32), and how many of its own rows were compared."""

    root: BlockHash
    hash: BlockHash
    ids: np.ndarray
    num_compared: int = 0


class RestoreChecks:
    """The checks of one core, of blocks of a `store`. `one_in` 0: none, as where bits depend on the path."""

    def __init__(
        self, *, cache: PrefixCache, scheduler: Scheduler, runner: Runner, store: WarmStore | None, one_in: int
    ) -> None:
        self.num_checked = 0
        self.num_differed = 0
        self.verdicts = Verdicts()
        self.one_in = one_in
        self._cache = cache
        self._scheduler = scheduler
        self._runner = runner
        self._store = store
        self._num_restored = 0
        self._waiting: deque[Restored] = deque(maxlen=MOST_WAITING)  # a new one takes the place of the oldest

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_step(self) -> bool:
        """Whether a block could be checked now: nothing is read or waits to be saved, so that all can be dropped."""
        return bool(self._waiting) and not len(self._cache.loads) and not len(self._cache.saving)

    def yield_to_requests(self) -> None:
        """Nothing is held between two steps."""

    def clear(self) -> None:
        """Forget what waits, with its token ids."""
        self._waiting.clear()

    def note(self, load: Load, num_good: int) -> None:
        """Choose which blocks of a load that has ended are to be checked."""
        sequence, store = load.sequence, self._store
        if store is None or not self.one_in:
            return
        for stored in load.blocks[:num_good]:
            own = stored.identity
            if 0 not in stored.parts or own.num_tokens < sequence.block_tokens:
                continue
            self._num_restored += 1
            if self._num_restored % self.one_in == 0 and own.hash in sequence.hashes and store.is_own(own.hash):
                end = (sequence.hashes.index(own.hash) + 1) * sequence.block_tokens
                if not sequence.picture_rows(end - sequence.block_tokens, end):
                    self._waiting.append(Restored(own.root, own.hash, sequence.ids[:end]))

    def step(self) -> None:
        """Compute some rows of a block again and compare them; what is not in memory any more is left out."""
        block, pool = self._waiting.popleft(), self._cache.pool
        held = pool.try_reuse_prefix(block.root, block.ids)
        if len(held) * pool.block_tokens < len(block.ids):
            pool.release_all(held)
            return
        target = held[-1]
        if block.num_compared:
            pool.share(target)  # its first rows are copied
        else:
            held.pop()
        sequence = Sequence(block.root, block.ids, self._cache.new_table(), reuse="off", task="idle")
        try:
            num_compared = self._compared(block, sequence, held, target)
        finally:
            sequence.table.release()
            pool.release(target)
        if num_compared is not None:
            self._judge(block, num_compared)

    def _compared(self, block: Restored, sequence: Sequence, held: list[int], target: int) -> int | None:
        """Compute the next rows of a block on the blocks before it; return how many of its rows are as computed, 0 if
        one is not, None if there is no room."""
        cache, size = self._cache, sequence.block_tokens
        first = len(block.ids) - size
        sequence.table.append_shared(held, first + block.num_compared)
        sequence.num_computed = first + block.num_compared
        chunk = self._scheduler.chunk_alone(sequence)
        if not cache.prepare(sequence, chunk.end):
            return None
        ids, blocks = block.ids[chunk.start : chunk.end], sequence.table.blocks
        self._runner.launch([SequenceStep(ids, chunk.start, blocks, sequence.num_computed, "none")]).wait()
        there, again = np.empty((2, cache.arena.layout.parts[0].payload_bytes), dtype=np.uint8)
        cache.arena.read(target, 0, chunk.end - first, there)
        cache.arena.read(blocks[-1], 0, chunk.end - first, again)
        return chunk.end - first if np.array_equal(there, again) else 0

    def _judge(self, block: Restored, num_compared: int) -> None:
        """Continue a block whose rows are as computed so far; drop one that differs."""
        if num_compared == self._cache.pool.block_tokens:
            self.num_checked += 1
            self.verdicts.note([block.hash], differed=False)
        elif num_compared:
            self._waiting.appendleft(replace(block, num_compared=num_compared))
        else:
            self.num_checked += 1
            self.num_differed += 1
            self._drop(block.hash)

    def _drop(self, block_hash: BlockHash) -> None:
        """Remove a block, and all that was computed after it, from memory and from the store."""
        pool = self._cache.pool
        gone = with_descendants(pool, block_hash)
        self.verdicts.note(gone, differed=True)
        evict_hashes(pool, gone)
        assert pool.block_of(block_hash) is None, "a block that differs is held"
        self._cache.scores.clear()
        if self._store is not None:
            self._store.drop(block_hash, "it has other bits than computing it again gives")
