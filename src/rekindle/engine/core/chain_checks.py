"""Checks of whole chains of restored blocks, for models with windows, which are kept at few places.

Where a layer has a window, a block cannot be computed on the blocks before it, which have lost what that layer sees. So
the whole chain is computed again, from its first token, on blocks of its own, and each full block that is done is
compared with the restored one; at its end the windows that were restored, too. As many blocks are computed as
elsewhere: one for `one_in` that were restored, so a chain waits until that many were.

    waiting ──begun──▶ some blocks are as computed ──step──▶ ... ──▶ all are; or one is not, and is dropped
       ▲────a request has come, at most `MOST_TRIES` times───┘

Its own blocks are held between two steps, and given up at once to a request; they take at most one in `SHARE` of those
that nobody holds, and longer chains are not checked. A chain of which a block was saved by what computed before is not
either: all after that one may differ. On the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, chain_hashes
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.restore_checks import RestoreChecks, Restored
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.sequence import Sequence
from rekindle.model.batch import SequenceStep
from rekindle.model.loaded import Runner
from rekindle.store.warm import WarmStore

SHARE = 8
MOST_TRIES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Chain(Restored):
    """A chain up to a restored block; `parts` has block index and part of each window that was restored with it."""

    parts: tuple[tuple[int, int], ...] = ()
    num_tries: int = 0


@dataclass(slots=True, eq=False)
class _Running:
    """A chain that is computed again: the sequence that does, and the hashes of its blocks."""

    chain: _Chain
    sequence: Sequence
    hashes: list[BlockHash]
    equal: set[BlockHash]


def checks_of(
    *, cache: PrefixCache, scheduler: Scheduler, runner: Runner, store: WarmStore | None, one_in: int
) -> RestoreChecks:
    """Return the checks that suit the parts of a cache's blocks."""
    kind = ChainChecks if cache.ending else RestoreChecks
    return kind(cache=cache, scheduler=scheduler, runner=runner, store=store, one_in=one_in)


class ChainChecks(RestoreChecks):
    """As `RestoreChecks`, chain by chain."""

    _num_due = 0  # restored blocks that no check was made for yet
    _running: _Running | None = None

    @property
    def wants_step(self) -> bool:
        """As `RestoreChecks.wants_step`; also while a chain is under way."""
        is_quiet = not len(self._cache.loads) and not len(self._cache.saving)
        return is_quiet and (self._running is not None or bool(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def clear(self) -> None:
        """Forget what waits and what is under way, with its token ids."""
        self._stop()
        super().clear()

    def yield_to_requests(self) -> None:
        """Give up the blocks of a chain that is under way: it begins again later."""
        running = self._running
        self._stop()
        if running is not None and running.chain.num_tries < MOST_TRIES:
            self._waiting.appendleft(replace(running.chain, num_tries=running.chain.num_tries + 1))

    def note(self, load: Load, num_good: int) -> None:
        """Count the restored blocks of a load that has ended; once they are due, their chain is to be checked."""
        sequence, size = load.sequence, load.sequence.block_tokens
        if self._store is None or not self.one_in:
            return
        at = {name: index for index, name in enumerate(sequence.hashes)}
        full = [(at[each.identity.hash], each) for each in load.blocks[:num_good] if each.identity.hash in at]
        self._num_due += sum(0 in each.parts for _, each in full)
        self._num_due = min(self._num_due, self.one_in * self._cache.pool.num_blocks)
        num_blocks = 1 + max((index for index, _ in full), default=-1)
        end = num_blocks * size
        if not num_blocks or self._num_due < self.one_in * num_blocks or sequence.picture_rows(0, end):
            return
        self._num_due -= self.one_in * num_blocks
        parts = tuple((index, part) for index, each in full for part in sorted(each.parts) if part)
        self._waiting.append(
            _Chain(sequence.root, sequence.hashes[num_blocks - 1], sequence.ids[:end].copy(), parts=parts)
        )

    def step(self) -> None:
        """Compute the next rows of a chain, and compare the blocks that they complete."""
        running = self._running or self._begun()
        if running is None:
            return
        sequence, size = running.sequence, running.sequence.block_tokens
        chunk = self._scheduler.chunk_alone(sequence)
        if not self._cache.prepare(sequence, chunk.end):
            self._stop()
            return
        blocks, num_stored = sequence.table.blocks, sequence.table.num_tokens
        step = SequenceStep(sequence.ids[chunk.start : chunk.end], chunk.start, blocks, num_stored, "none")
        try:
            self._runner.launch([step]).wait()
        except BaseException:
            self._stop()
            raise
        sequence.num_computed = chunk.end
        self._cache.publish(sequence)
        places = [(index, 0) for index in range(chunk.start // size, chunk.end // size)]
        is_last = chunk.end == len(sequence.ids)
        self._compare(running, [*places, *(running.chain.parts if is_last else ())])
        if is_last and self._running is not None:
            self._end(running)

    def _begun(self) -> _Running | None:
        """Begin the next chain; None if it has no room, or a block of it was saved by what computed before."""
        chain, pool, store = self._waiting.popleft(), self._cache.pool, self._store
        assert isinstance(chain, _Chain) and store is not None, "chains alone wait here"
        hashes = chain_hashes(chain.root, chain.ids, pool.block_tokens)
        if SHARE * len(hashes) > pool.num_free + pool.num_cached or not all(map(store.is_own, hashes)):
            return None
        sequence = Sequence(chain.root, chain.ids, self._cache.new_table(), reuse="off", task="idle")
        self._running = _Running(chain, sequence, hashes, set())
        return self._running

    def _compare(self, running: _Running, places: list[tuple[int, int]]) -> None:
        """Compare these parts of blocks with the restored ones, as far as both are in memory; the first block that
        differs is dropped, and ends its chain."""
        for index, part in places:
            name, pair = running.hashes[index], self._payloads(running, index, part)
            if pair is None:
                continue
            if not np.array_equal(*pair):
                running.equal.discard(name)
                self._end(running)
                self.num_checked += 1
                self.num_differed += 1
                self._drop(name)
                return
            running.equal.add(name)

    def _payloads(self, running: _Running, index: int, part: int) -> np.ndarray | None:
        """Return a part of a block as restored and as computed again, uint8 [2, payload bytes]; None unless both are in
        memory."""
        arena, own = self._cache.arena, running.sequence.table.blocks[index]
        there = self._cache.pool.block_of(running.hashes[index])
        if there is None or not (arena.has(part, there) and arena.has(part, own)):
            return None
        pair = np.empty((2, arena.layout.parts[part].payload_bytes), dtype=np.uint8)
        for block, out in zip((there, own), pair, strict=True):
            arena.read(block, part, running.sequence.block_tokens, out)
        return pair

    def _end(self, running: _Running) -> None:
        """Count the blocks of a chain that were as computed, and give up its own."""
        self.num_checked += len(running.equal)
        self.verdicts.note(running.equal, differed=False)
        self._stop()

    def _stop(self) -> None:
        """Give up the blocks of the chain that is under way."""
        running, self._running = self._running, None
        if running is not None:
            running.sequence.table.release()
