"""Idle work: requests that run while no other request runs, waits or loads, and are not turns of their agents.

Owns their queue. One runs at a time, the latest first; a step takes a part of `max_stall_s`, so a new request waits
less than it would for other requests. Idle work then yields: its blocks stay cached, and it resumes from them later.

    waiting ──▶ current ──▶ ended            takes at most half of the free and cached blocks; its blocks are
       ▲           │                         written to disk only when a turn depends on them
       └───yield───┘

Called by the core, on its thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.orphan_blocks import OrphanBlocks
from rekindle.engine.core.scheduler import Chunk, Scheduler
from rekindle.engine.request import Request, State
from rekindle.engine.sequence import Sequence

MOST_WAITING = 32


@dataclass(slots=True, eq=False)
class _Job:
    """A request, how many more blocks it may take, and how many of its tokens were stored before it began."""

    request: Request
    blocks_left: int
    first: int | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.request.namespace, self.request.agent


class Background:
    """The idle work of one core: `num_begun` requests had something to compute, `num_tokens` were computed."""

    def __init__(self, *, cache: PrefixCache, scheduler: Scheduler, orphans: OrphanBlocks, min_tokens: int) -> None:
        self.num_begun = 0
        self.num_tokens = 0
        self._cache = cache
        self._scheduler = scheduler
        self._min_tokens = min_tokens
        self._waiting: list[_Job] = []
        self._current: _Job | None = None
        self._orphans = orphans

    def __len__(self) -> int:
        return len(self._waiting) + (self._current is not None)

    @property
    def wants_step(self) -> bool:
        """Whether idle work could run now, if no request needs the engine."""
        if self._current is not None:
            return self._current.request.state is not State.LOADING
        return bool(self._waiting)

    def holders(self) -> Iterable[Request]:
        """The request that holds blocks, if one does."""
        return [self._current.request] if self._current is not None else []

    def add(self, request: Request) -> None:
        """Queue a request in place of an earlier one of its agent; drop the oldest if there are too many."""
        self.cancel(request.namespace, request.agent)
        self._waiting.append(_Job(request, self._cache.pool.num_blocks))
        for job in self._waiting[:-MOST_WAITING]:
            self._end(job)

    def cancel(self, namespace: str, agent: str) -> None:
        """End the work for an agent; computed blocks stay cached."""
        for job in [*self._waiting, *([self._current] if self._current else [])]:
            if job.key == (namespace, agent):
                self._end(job)

    def cancel_all(self) -> None:
        """End all idle work; computed blocks stay cached."""
        for job in [*self._waiting, *([self._current] if self._current else [])]:
            self._end(job)

    def forget(self, namespace: str, agent: str) -> set[BlockHash]:
        """End the work for an agent; return the hashes of its orphan blocks in memory."""
        self.cancel(namespace, agent)
        return self._orphans.take((namespace, agent))

    def yield_to_requests(self) -> None:
        """Release all blocks to a request that has arrived; the work resumes later."""
        job = self._current
        if job is not None and job.request.state is State.RUNNING:
            self._detach(job)
            job.request.sequence.num_computed = 0
            job.request.state = State.WAITING
            self._current = None
            self._waiting.append(job)

    def load_ended(self, sequence: Sequence) -> None:
        """Requeue the current request if the load was for its sequence; it attaches again."""
        job = self._current
        if job is not None and job.request.sequence is sequence:
            job.request.state = State.WAITING
            self._current = None
            self._waiting.append(job)

    def plan(self) -> list[Chunk]:
        """Plan the next step; empty when nothing is left to do. Called only while there are no other requests."""
        while self._current is not None or self._waiting:
            job = self._current or self._begin(self._waiting.pop())
            if job is None:
                continue
            if job.request.state is State.LOADING:
                return []
            if job.request.state is State.RUNNING and job.request.sequence.num_left:
                chunk = self._with_room(job, self._scheduler.chunk_alone(job.request))
                if chunk is not None:
                    self.num_tokens += chunk.num_rows
                    return [chunk]
            self._done(job)
        return []

    def _begin(self, job: _Job) -> _Job | None:
        """Attach a job and make it current; None when too little is left to compute or it has to end."""
        request, sequence, pool = job.request, job.request.sequence, self._cache.pool
        answer = self._cache.attach(sequence, (), alone=False)
        if answer == "loading":
            request.state, self._current = State.LOADING, job
            return job
        if answer != "ready" or sequence.num_left < self._min_tokens:
            self._done(job)
            return None
        if job.first is None:
            job.first = sequence.num_computed
            self.num_begun += 1
        job.first = min(job.first, sequence.num_computed)  # its ancestors may have been evicted since
        num_loaded = len(sequence.loaded)
        half = (pool.num_free + pool.num_cached + num_loaded) // 2
        job.blocks_left = min(job.blocks_left, max(0, half - num_loaded))
        request.state, self._current = State.RUNNING, job
        return job

    def _with_room(self, job: _Job, chunk: Chunk) -> Chunk | None:
        """Reserve the blocks of a chunk, shortened to the blocks left to its job; None when no row fits."""
        table, size = job.request.sequence.table, job.request.sequence.block_tokens
        copied = table.num_tokens % size > 0 and not self._cache.pool.is_private(table.blocks[-1])
        most = (len(table.blocks) + job.blocks_left - copied) * size
        end = min(chunk.start + chunk.num_rows, most)
        if end <= chunk.start or job.blocks_left < copied or not self._cache.prepare(job.request.sequence, end):
            return None
        job.blocks_left = most // size - len(table.blocks)
        return Chunk(job.request, chunk.start, end - chunk.start)

    def _detach(self, job: _Job) -> None:
        """Release the blocks and note which of them were computed here."""
        sequence = job.request.sequence
        hashes = sequence.table.names[(job.first or 0) // sequence.block_tokens :]
        head = self._cache.detach(sequence)
        if job.first is not None:
            self._orphans.note(job.key, {*hashes, head.hash})

    def _done(self, job: _Job) -> None:
        """End a job that is complete or cannot run; queue its follower."""
        self._end(job)
        if job.request.followed_by is not None:
            self._waiting.append(_Job(job.request.followed_by, self._cache.pool.num_blocks))

    def _end(self, job: _Job) -> None:
        if job is self._current:
            self._current = None
        elif job in self._waiting:
            self._waiting.remove(job)
        if job.request.state is not State.FINISHED:
            self._detach(job)
            job.request.state = State.FINISHED

    def check(self) -> None:
        """Assert that each request is in the place of its state, and that only the current one holds blocks."""
        for job in self._waiting:
            assert job.request.state is State.WAITING, f"request {job.request.id} waits and is {job.request.state}"
            assert not job.request.sequence.table.blocks, f"request {job.request.id} waits and holds blocks"
        if self._current is not None:
            assert self._current not in self._waiting, "the current request waits, too"
            assert self._current.request.state is not State.WAITING, "the current request waits"
            assert self._current.blocks_left >= 0, "it took more than its share"
        assert len({job.key for job in self._waiting}) == len(self._waiting), "an agent's work is queued twice"
        assert len(self._waiting) <= MOST_WAITING + 1, "too much idle work is queued"
