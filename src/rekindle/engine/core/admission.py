"""Who may begin: waiting requests get what is stored of them, and run if there is room for them and those that run.

Owns no queue (the scheduler does) and no block (their tables do): it decides, and counts what prompts reused and how
many requests were preempted. Where there is no room, namespaces above their share give some back (see `shares`). Who
waits for blocks that another is computing or loading is passed over, derived anew every step. Called by the core, on
its thread.
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
from rekindle.errors import Overloaded

_Key = tuple[int, BlockHash, str]


def _key(request: Request) -> _Key:
    """What requests share that were prepared together: the very same array of ids."""
    return id(request.prompt_ids), request.root, request.reuse


def has_prompt(request: Request) -> bool:
    """Whether the KV of a request's whole prompt is in its blocks."""
    return request.state is State.RUNNING and request.table.num_tokens >= request.num_prompt


class DuplicatePrompts:
    """Who runs or loads, by prompt: the others that have it wait while one computes it, then take its blocks, the tail
    included.

    Derived anew every step, so there is no leader that could fail: whoever starts first computes, and when it is gone
    before it is done, the next one does.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._by_prompt: dict[_Key, Request] = {}
        for request in requests:
            self.add(request)

    def add(self, request: Request) -> None:
        """Note who has just started, if it did."""
        known = self._by_prompt.get(_key(request))
        if request.state in (State.RUNNING, State.LOADING) and (known is None or not has_prompt(known)):
            self._by_prompt[_key(request)] = request

    def of(self, request: Request) -> Request | None:
        """One that was prepared with this request, which has said nothing yet (else it has blocks of its own)."""
        duplicate = self._by_prompt.get(_key(request))
        return None if request.num_generated else duplicate


class Admission:
    """Lets the requests of one core begin. `num_prompt_tokens` and `num_reused_tokens` count those that did."""

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
        """Names of the prompt blocks that running requests are about to fill; derived anew every step."""
        hashes: set[BlockHash] = set()
        for request in self._scheduler.running:
            hashes |= _to_compute(request)
        return hashes

    def admit(self, now: float) -> None:
        """Start waiting requests while there is room for them; who waits for another's blocks is passed over.

        One that has waited too long for memory keeps its namespace's others from passing it by, and other namespaces
        from going above their share; where its own runs nothing, everybody.
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
        """Attach a request and let it run or load, in the place of `giver` if there is one."""
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
        """Take a running request's blocks; what it computed stays cached, and it starts over from that."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        request.num_before = max(request.num_before, request.num_computed)
        request.times.preempted = self._clock()
        self._cache.suspend(request)
        request.num_computed = 0
        self._scheduler.move(request, State.WAITING)

    def _attach(self, request: Request, computing: set[BlockHash], duplicates: DuplicatePrompts) -> Attached:
        """What is stored of the request, or all of its prompt from a running one that has the same."""
        duplicate = duplicates.of(request)
        if duplicate is None:
            alone = not (self._scheduler.running or self._scheduler.loading or len(self._cache.loads))
            return self._cache.attach(request, computing, alone=alone)
        if not has_prompt(duplicate):
            return "wait"
        self._cache.share_prompt(request, duplicate)
        return "ready"

    def _start(self, request: Request, computing: set[BlockHash], giver: Request | None) -> Attached:
        """Let an attached request run, if there is room for it and the next block of everybody who runs on.

        One with nothing left to do ends at once.
        """
        if request.task == "load" or not request.num_left:
            self._begin(request)
            self._replies.finish(request, "stop")
            return "ready"
        pool, size = self._cache.pool, request.block_tokens
        needed = -(-(request.num_tokens + 1) // size)
        if needed > pool.num_blocks:
            self._replies.fail(request, Overloaded("the hot memory is too small for this request", retry_after_s=60.0))
            return "ready"
        # A shared tail is copied before it is written: its copy needs a block beside it.
        copied = 1 if request.table.num_tokens % size else 0
        running = [each for each in self._scheduler.running if each is not giver]
        wanted = copied + sum(each.num_blocks_ahead for each in [request, *running])
        freed = 0 if giver is None else freed_by([giver], pool)
        short = wanted > pool.num_free + pool.num_cached + freed
        if short and (self._scheduler.running or self._scheduler.loading):
            request.table.release()
            request.num_computed = 0
            return "short"
        if giver is not None:
            self.preempt(giver)
        self._begin(request)
        request.num_before = max(request.num_before, request.num_computed)
        self._scheduler.move(request, State.RUNNING)
        computing |= _to_compute(request)
        return "ready"

    def _begin(self, request: Request) -> None:
        """Note that the work on a request begins, the first time it does."""
        if request.times.admitted is None:
            request.times.admitted = self._clock()
            request.generation.begin()
            request.resumes = self._replies.resumes(request)
            if request.task != "load":
                self.num_prompt_tokens += request.num_prompt
                self.num_reused_tokens += request.hot_tokens + request.warm_tokens
        report_progress(request, now=self._clock(), min_reuse_tokens=self._replies.min_reuse_tokens)


def _to_compute(request: Request) -> set[BlockHash]:
    """Names of the full blocks of a prompt that are to be computed and found by others."""
    if request.reuse == "off":
        return set()
    size = request.block_tokens
    return {request.hash_at(index) for index in range(request.num_computed // size, request.num_prompt // size)}
