"""Admission: attach waiting requests to their stored blocks, and start those that fit next to the running ones.

Owns no queue (the scheduler does) and no block (the tables do): it decides, and counts reused prompt tokens and
preemptions. Without room, namespaces above their share give some back (see `shares`). Requests that wait for blocks
another one is computing or loading are skipped; this is derived anew every step. Called by the core, on its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.prefix_cache import Attached, PrefixCache
from rekindle.engine.core.reporting import report_progress
from rekindle.engine.core.sampling import Replies
from rekindle.engine.core.scheduler import LONGEST_WAIT_S, Scheduler
from rekindle.engine.core.shares import Shares, freed_by
from rekindle.engine.request import Request, State
from rekindle.engine.sequence import Sequence
from rekindle.errors import Overloaded

_Key = tuple[int, BlockHash, str]


def _key(request: Request) -> _Key:
    """Identify requests that were prepared together: they share the same array of ids."""
    sequence = request.sequence
    return id(sequence.prompt_ids), sequence.root, sequence.reuse


def has_prompt(request: Request) -> bool:
    """Whether the KV of a request's whole prompt is in its blocks."""
    sequence = request.sequence
    return request.state is State.RUNNING and sequence.table.num_tokens >= sequence.num_prompt


class DuplicatePrompts:
    """Running and loading requests by prompt: duplicates wait while one computes it, then share its blocks, tail
    included.

    Derived anew every step, so no leader can fail: the first to start computes, and if it ends early, the next one
    does.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_prompt: dict[_Key, Request] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Note a request, if it has started."""
        known = self._by_prompt.get(_key(request))
        if request.state in (State.RUNNING, State.LOADING) and (known is None or not has_prompt(known)):
            self._by_prompt[_key(request)] = request

    def of(self, request: Request) -> Request | None:
        """Return a request prepared with this one; None once this one has generated tokens (it has its own blocks)."""
        duplicate = self._by_prompt.get(_key(request))
        return None if request.sequence.num_generated else duplicate


class Admission:
    """Admits the requests of one core. `num_prompt_tokens` and `num_reused_tokens` count those of admitted requests."""

    def __init__(
        self, *, cache: PrefixCache, scheduler: Scheduler, replies: Replies, clock: Callable[[], float]
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_reused_tokens = 0
        self.num_preemptions = 0
        self._cache = cache
        self._scheduler = scheduler
        self._replies = replies
        self._clock = clock

    def _computing(self) -> set[BlockHash]:
        """Return the hashes of prompt blocks that running requests are about to fill; derived anew every step."""
        hashes: set[BlockHash] = set()
        for request in self._scheduler.running:
            hashes |= _to_compute(request.sequence)
        return hashes

    def admit(self, now: float) -> None:
        """Start waiting requests while there is room; skip those that wait for another's blocks.

        A request that has waited too long for memory blocks later ones of its namespace, and keeps other namespaces
        from exceeding their share; if its own namespace runs nothing, it blocks all others.
        """
        queues = self._scheduler
        if not queues.waiting:
            return
        shares = Shares(queues, self._cache)
        if not queues.has_room() and not shares.are_claimed():
            return
        computing, late = self._computing(), set[str]()
        duplicates = DuplicatePrompts([*queues.running, *queues.loading])
        for request in queues.picks(queues.waiting, now):
            giver = None if queues.has_room() else shares.place_from(request)
            if not queues.has_room() and giver is None:
                continue
            if request.namespace in late or (late and not shares.allow(request)):
                continue
            answer = self._enter(request, computing, duplicates, giver)
            if answer == "short" and (givers := shares.blocks_from(request, now)):
                for each in givers:
                    self.preempt(each)
                shares = Shares(queues, self._cache)
                answer = self._enter(request, computing, duplicates, None)
            if answer == "short" and now - request.times.submitted > LONGEST_WAIT_S:
                late.add(request.namespace)
                if shares.is_starved(request, now):
                    return
            if request.state is not State.WAITING:
                shares = Shares(queues, self._cache)

    def _enter(
        self, request: Request, computing: set[BlockHash], duplicates: DuplicatePrompts, giver: Request | None
    ) -> Attached:
        """Attach a request and run or load it, in the place of `giver` if there is one."""
        answer = self._attach(request, computing, duplicates)
        if answer == "loading":
            if giver is not None:
                self.preempt(giver)
            request.times.load_started = self._clock()
            self._scheduler.move(request, State.LOADING)
        elif answer == "ready":
            answer = self._start(request, computing, giver)
            duplicates.add(request)
        return answer

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; they stay cached, and it restarts from them."""
        sequence = request.sequence
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        sequence.num_before = max(sequence.num_before, sequence.num_computed)
        request.times.preempted = self._clock()
        self._cache.suspend(sequence)
        sequence.num_computed = 0
        self._scheduler.move(request, State.WAITING)

    def _attach(self, request: Request, computing: set[BlockHash], duplicates: DuplicatePrompts) -> Attached:
        """Attach the stored blocks of a request, or the whole prompt of a running duplicate."""
        duplicate = duplicates.of(request)
        if duplicate is None:
            alone = not (self._scheduler.running or self._scheduler.loading or len(self._cache.loads))
            return self._cache.attach(request.sequence, computing, alone=alone)
        if not has_prompt(duplicate):
            return "wait"
        self._cache.share_prompt(request.sequence, duplicate.sequence)
        return "ready"

    def _start(self, request: Request, computing: set[BlockHash], giver: Request | None) -> Attached:
        """Run an attached request, if there is room for it and for the next block of every running request.

        A request with nothing left to compute ends at once.
        """
        sequence = request.sequence
        if sequence.task == "load" or not sequence.num_left:
            self._begin(request)
            self._replies.finish(request, "stop")
            return "ready"
        pool, size = self._cache.pool, sequence.block_tokens
        needed = -(-(sequence.num_tokens + 1) // size)
        if needed > pool.num_blocks:
            self._replies.fail(request, Overloaded("the hot memory is too small for this request", retry_after_s=60.0))
            return "ready"
        # A shared tail is copied before it is written: the copy needs one more block.
        copied = 1 if sequence.table.num_tokens % size else 0
        running = [each for each in self._scheduler.running if each is not giver]
        wanted = copied + sum(each.sequence.num_blocks_ahead for each in [request, *running])
        freed = 0 if giver is None else freed_by([giver], pool)
        short = wanted > pool.num_free + pool.num_cached + freed
        short = short or self._lacks_slots([request, *running], giver)
        if short and (self._scheduler.running or self._scheduler.loading):
            sequence.table.release()
            sequence.num_computed = 0
            return "short"
        if giver is not None:
            self.preempt(giver)
        self._begin(request)
        sequence.num_before = max(sequence.num_before, sequence.num_computed)
        self._scheduler.move(request, State.RUNNING)
        computing |= _to_compute(sequence)
        return "ready"

    def _lacks_slots(self, requests: list[Request], giver: Request | None) -> bool:
        """Whether these requests cannot all get slots for their parts that end: of a long prompt, for a chunk at
        once."""
        pool = self._cache.pool
        chunk = -(-self._scheduler.max_chunk_tokens // pool.block_tokens) + 1
        given = [0] * len(pool.windows) if giver is None else giver.sequence.table.num_parts_held
        for slots, more in zip(pool.windows, given, strict=True):
            most = slots.kind.slots_ahead(chunk)
            wanted = sum(min(each.sequence.num_blocks_ahead, most) for each in requests) + 1
            if wanted > slots.num_available + more:
                return True
        return False

    def _begin(self, request: Request) -> None:
        """Record the first start of a request, and report its progress."""
        if request.times.admitted is None:
            request.times.admitted = self._clock()
            request.reply.generation.begin()
            request.resumes = self._replies.resumes(request)
            if request.sequence.task != "load":
                self.num_prompt_tokens += request.sequence.num_prompt
                self.num_reused_tokens += request.sequence.reused_tokens
        report_progress(request, now=self._clock(), min_reuse_tokens=self._replies.min_reuse_tokens)


def _to_compute(sequence: Sequence) -> set[BlockHash]:
    """Return the hashes of the full prompt blocks that a sequence will compute and publish."""
    if sequence.reuse == "off":
        return set()
    size = sequence.block_tokens
    return {sequence.hash_at(index) for index in range(sequence.num_computed // size, sequence.num_prompt // size)}
