"""Idle work: prompts computed while no request runs, waits or loads, which are not turns of their agents.

Owns their queue. One runs at a time, the latest first; a step takes a part of `max_stall_s`, so a new request waits
less than it would for other requests. Idle work then yields: its blocks stay cached, and it resumes from them later.

    waiting ──▶ current ──▶ ended            takes at most half of the free and cached blocks; its blocks are
       ▲           │                         written to disk only when a turn depends on them
       └───yield───┘

Called by the core, on its thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.scheduler import Chunk, Scheduler
from rekindle.engine.request import State
from rekindle.engine.sequence import Sequence

MOST_WAITING = 32


class OrphanBlocks:
    """Blocks computed for an agent that are not part of a turn: by idle work, or prefilled ahead of a turn.

    Hashes by (namespace, agent), of at most as many agents as there are blocks. No branch leads to these blocks, and
    they keep their ancestors in memory, so forgetting the agent must include them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hashes: dict[tuple[str, str], set[BlockHash]] = {}

    def note(self, key: tuple[str, str], hashes: Collection[BlockHash]) -> None:
        """Add blocks that were computed for an agent."""
        if hashes:
            self._hashes[key] = self._in_memory(self._hashes.get(key, ())) | set(hashes)
        if len(self._hashes) > self._pool.num_blocks:
            left = {key: self._in_memory(mine) for key, mine in self._hashes.items()}
            self._hashes = {key: mine for key, mine in left.items() if mine}

    def take(self, key: tuple[str, str]) -> set[BlockHash]:
        """Remove an agent's entry and return its hashes that are still in memory."""
        return self._in_memory(self._hashes.pop(key, ()))

    def _in_memory(self, hashes: Collection[BlockHash]) -> set[BlockHash]:
        return {block_hash for block_hash in hashes if self._pool.block_of(block_hash) is not None}


@dataclass(slots=True, eq=False)
class IdleWork:
    """A prompt to compute for an agent; `followed_by` is queued once it ends.

    It may take `blocks_left` more blocks; `first`: how many of its tokens were stored before it began.
    """

    namespace: str
    agent: str
    sequence: Sequence
    followed_by: IdleWork | None = None
    state: State = State.WAITING
    first: int | None = None
    blocks_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.blocks_left = self.sequence.table.pool.num_blocks

    @property
    def key(self) -> tuple[str, str]:
        """The agent it is done for."""
        return self.namespace, self.agent


class Background:
    """The idle work of one core: `num_begun` requests had something to compute, `num_tokens` were computed."""

    def __init__(self, *, cache: PrefixCache, scheduler: Scheduler, orphans: OrphanBlocks, min_tokens: int) -> None:
        self.num_begun = 0
        self.num_tokens = 0
        self._cache = cache
        self._scheduler = scheduler
        self._min_tokens = min_tokens
        self._waiting: list[IdleWork] = []
        self._current: IdleWork | None = None
        self._orphans = orphans

    def __len__(self) -> int:
        return len(self._waiting) + (self._current is not None)

    @property
    def wants_step(self) -> bool:
        """Whether idle work could run now, if no request needs the engine."""
        if self._current is not None:
            return self._current.state is not State.LOADING
        return bool(self._waiting)

    def holders(self) -> Iterable[Sequence]:
        """The sequence that holds blocks, if one does."""
        return [self._current.sequence] if self._current is not None else []

    def add(self, work: IdleWork) -> None:
        """Queue work in place of earlier work for its agent; drop the oldest if there is too much."""
        self.cancel(work.namespace, work.agent)
        self._waiting.append(work)
        for oldest in self._waiting[:-MOST_WAITING]:
            self._end(oldest)

    def cancel(self, namespace: str, agent: str) -> None:
        """End the work for an agent; computed blocks stay cached."""
        for work in [*self._waiting, *([self._current] if self._current else [])]:
            if work.key == (namespace, agent):
                self._end(work)

    def cancel_all(self) -> None:
        """End all idle work; computed blocks stay cached."""
        for work in [*self._waiting, *([self._current] if self._current else [])]:
            self._end(work)

    def forget(self, namespace: str, agent: str) -> set[BlockHash]:
        """End the work for an agent; return the hashes of its orphan blocks in memory."""
        self.cancel(namespace, agent)
        return self._orphans.take((namespace, agent))

    def yield_to_requests(self) -> None:
        """Release all blocks to a request that has arrived; the work resumes later."""
        work = self._current
        if work is not None and work.state is State.RUNNING:
            self._detach(work)
            work.sequence.num_computed = 0
            work.state = State.WAITING
            self._current = None
            self._waiting.append(work)

    def load_ended(self, sequence: Sequence) -> None:
        """Requeue the current work if the load was for its sequence; it attaches again."""
        work = self._current
        if work is not None and work.sequence is sequence:
            work.state = State.WAITING
            self._current = None
            self._waiting.append(work)

    def plan(self) -> list[Chunk]:
        """Plan the next step; empty when nothing is left to do. Called only while there are no other requests."""
        while self._current is not None or self._waiting:
            work = self._current or self._begin(self._waiting.pop())
            if work is None:
                continue
            if work.state is State.LOADING:
                return []
            if work.state is State.RUNNING and work.sequence.num_left:
                chunk = self._with_room(work, self._scheduler.chunk_alone(work.sequence))
                if chunk is not None:
                    self.num_tokens += chunk.num_rows
                    return [chunk]
            self._done(work)
        return []

    def fail(self) -> None:
        """End the current work: its forward pass failed."""
        assert self._current is not None, "no idle work runs"
        self._done(self._current)

    def _begin(self, work: IdleWork) -> IdleWork | None:
        """Attach work and make it current; None when too little is left to compute or it has to end."""
        sequence, pool = work.sequence, self._cache.pool
        answer = self._cache.attach(sequence, (), alone=False)
        if answer == "loading":
            work.state, self._current = State.LOADING, work
            return work
        if answer != "ready" or sequence.num_left < self._min_tokens:
            self._done(work)
            return None
        if work.first is None:
            work.first = sequence.num_computed
            self.num_begun += 1
        work.first = min(work.first, sequence.num_computed)  # its ancestors may have been evicted since
        num_loaded = len(sequence.loaded)
        half = (pool.num_free + pool.num_cached + num_loaded) // 2
        work.blocks_left = min(work.blocks_left, max(0, half - num_loaded))
        work.state, self._current = State.RUNNING, work
        return work

    def _with_room(self, work: IdleWork, chunk: Chunk) -> Chunk | None:
        """Reserve the blocks of a chunk, shortened to those left to the work; None when no row fits."""
        table, size = work.sequence.table, work.sequence.block_tokens
        copied = table.num_tokens % size > 0 and not self._cache.pool.is_private(table.blocks[-1])
        most = (len(table.blocks) + work.blocks_left - copied) * size
        end = min(chunk.start + chunk.num_rows, most)
        if end <= chunk.start or work.blocks_left < copied or not self._cache.prepare(work.sequence, end):
            return None
        work.blocks_left = most // size - len(table.blocks)
        return Chunk(work.sequence, chunk.start, end - chunk.start)

    def _detach(self, work: IdleWork) -> None:
        """Release the blocks and note which of them were computed here."""
        sequence = work.sequence
        hashes = sequence.table.names[(work.first or 0) // sequence.block_tokens :]
        head = self._cache.detach(sequence)
        if work.first is not None:
            self._orphans.note(work.key, {*hashes, head.hash})

    def _done(self, work: IdleWork) -> None:
        """End work that is complete or cannot run; queue its follower."""
        self._end(work)
        if work.followed_by is not None:
            self._waiting.append(work.followed_by)

    def _end(self, work: IdleWork) -> None:
        if work is self._current:
            self._current = None
        elif work in self._waiting:
            self._waiting.remove(work)
        if work.state is not State.FINISHED:
            self._detach(work)
            work.state = State.FINISHED

    def check(self) -> None:
        """Assert that all work is in the place of its state, and that only the current one holds blocks."""
        for work in self._waiting:
            assert work.state is State.WAITING, f"work for {work.agent} waits and is {work.state}"
            assert not work.sequence.table.blocks, f"work for {work.agent} waits and holds blocks"
        if self._current is not None:
            assert self._current not in self._waiting, "the current work waits, too"
            assert self._current.state is not State.WAITING, "the current work waits"
            assert self._current.blocks_left >= 0, "it took more than its share"
        assert len({work.key for work in self._waiting}) == len(self._waiting), "an agent's work is queued twice"
        assert len(self._waiting) <= MOST_WAITING + 1, "too much idle work is queued"
