"""Fair shares of the running places and of hot memory, and which requests give back the excess.

With N namespaces that run, load or wait, a namespace's share is

    places   max_running // N, at least one: of requests that run or load
    memory   num_blocks // N, of blocks that its running and loading requests hold

A single namespace may have everything, and any namespace may use what the others do not. But if a request does not fit
and its namespace has less than its share, requests of namespaces above theirs are preempted for it, at the next step,
the youngest first. Namespaces that outnumber the places, or whose requests are larger than a share, take turns: a
namespace that runs nothing gets room from any request that has had its turn, a block of tokens; for memory it waits
`LONGEST_WAIT_S` first, because preempting for memory can cost more recomputation.

A preempted request keeps its KV cached by hash, tail included, so it resumes where it was: giving a place back costs no
rows unless others need the memory meanwhile. It is not preempted again before it has computed one token more than ever
before, or one block more with `reuse` off, when nothing is cached: every request makes progress.

Owns nothing: all of it is derived from the queues and tables. Decides; the caller preempts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rekindle.cache.blocks.pool import BlockPool
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.scheduler import LONGEST_WAIT_S, Scheduler
from rekindle.engine.request import Request


class Shares:
    """Which namespaces exceed their share, at one moment: made anew after every start and preemption."""

    def __init__(self, scheduler: Scheduler, cache: PrefixCache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._num_namespaces = len({request.namespace for request in scheduler.everybody()})
        self._taken = Counter(request.namespace for request in (*scheduler.running, *scheduler.loading))
        self._blocks: dict[str, frozenset[int]] = {}

    @property
    def num_places(self) -> int:
        """A namespace's share of the running places."""
        return max(1, self._scheduler.max_running // max(1, self._num_namespaces))

    @property
    def num_blocks(self) -> int:
        """A namespace's share of hot memory."""
        return self._cache.pool.num_blocks // max(1, self._num_namespaces)

    def are_claimed(self) -> bool:
        """Whether a request waits whose namespace has less than its share of the places."""
        if self._num_namespaces < 2:
            return False
        share = self.num_places
        return any(self._taken[request.namespace] < share for request in self._scheduler.waiting)

    def place_from(self, request: Request) -> Request | None:
        """Return the request that gives its place to a waiting one when all are taken; None if none has to."""
        taken, share = self._taken, self.num_places
        if taken[request.namespace] >= share:
            return None
        above = [each for each in self._scheduler.running if taken[each.namespace] > share]
        above.sort(key=lambda each: (-taken[each.namespace], each.sequence.reuse == "off", -each.times.submitted))
        giver = next((each for each in above if _may_yield(each)), None)
        if above or taken[request.namespace]:
            return giver
        done = [each for each in self._scheduler.running if _had_turn(each)]
        return min(done, key=lambda each: self._scheduler.last_start(each.namespace), default=None)

    def blocks_from(self, request: Request, now: float) -> list[Request]:
        """Return the requests that give a waiting one the memory it needs, in order; empty if that is not enough."""
        if self._num_namespaces < 2:
            return []
        chosen = self._enough(request, self._above_share()) if self.allow(request) else []
        if not chosen and self.is_starved(request, now):
            return self._enough(request, self._after_turns())
        return chosen

    def allow(self, request: Request) -> bool:
        """Whether a waiting request stays within its namespace's share of memory once it runs."""
        return len(self._held(request.namespace)) + _needed(request) <= self.num_blocks

    def is_starved(self, request: Request, now: float) -> bool:
        """Whether a waiting request's namespace runs and loads nothing, and it has waited too long."""
        waited = now - request.times.waiting_since
        return waited > LONGEST_WAIT_S and not self._taken[request.namespace]

    def pick_victim(self) -> Request:
        """Return the request to preempt when a running one finds no block: the youngest of the namespaces above their
        share that run more than one request, or of all if there are none."""
        running = self._scheduler.running
        if self._num_namespaces > 1:
            several = Counter(request.namespace for request in running)
            above = {name for name in several if several[name] > 1 and len(self._held(name)) > self.num_blocks}
            running = [request for request in running if request.namespace in above] or running
        return self._scheduler.youngest(running)

    def _held(self, namespace: str) -> frozenset[int]:
        """Return the blocks that a namespace's requests hold; a shared prefix counts once."""
        if namespace not in self._blocks:
            root = self._cache.root(namespace)
            running = (each for each in self._scheduler.running if each.namespace == namespace)
            loads = (load for load in self._cache.loads.under_way() if load.sequence.root == root)
            held = frozenset(block for request in running for block in request.sequence.table.blocks)
            self._blocks[namespace] = held.union(*(load.targets for load in loads))
        return self._blocks[namespace]

    def _above_share(self) -> Iterator[Request]:
        """Yield running requests of the namespaces above their share of memory, until they are down to it. The only
        request of a namespace has its turn first."""
        running = sorted(
            self._scheduler.running, key=lambda each: (each.sequence.reuse == "off", -each.times.submitted)
        )
        for namespace in dict.fromkeys(request.namespace for request in running):
            mine = [request for request in running if request.namespace == namespace]
            left = list(mine)
            for request in mine:
                held = {block for each in left for block in each.sequence.table.blocks}
                if len(held) <= self.num_blocks:
                    break
                if _had_turn(request) or (len(left) > 1 and _may_yield(request)):
                    left.remove(request)
                    yield request

    def _after_turns(self) -> Iterator[Request]:
        """Yield the requests above their share, then all others that had a turn."""
        seen: set[int] = set()
        for request in self._above_share():
            seen.add(id(request))
            yield request
        for request in sorted(self._scheduler.running, key=lambda each: -each.times.submitted):
            if id(request) not in seen and _had_turn(request):
                yield request

    def _enough(self, request: Request, givers: Iterator[Request]) -> list[Request]:
        """Return the first givers that make room for the request; empty if all of them together do not."""
        pool, chosen = self._cache.pool, list[Request]()
        ahead = sum(each.sequence.num_blocks_ahead for each in self._scheduler.running)
        for giver in givers:
            chosen.append(giver)
            ahead -= giver.sequence.num_blocks_ahead
            if _needed(request) + ahead <= pool.num_free + pool.num_cached + freed_by(chosen, pool):
                return chosen
        return []


def freed_by(requests: Sequence[Request], pool: BlockPool) -> int:
    """Count the blocks that no request holds once all of these are preempted."""
    held = Counter(block for request in requests for block in request.sequence.table.blocks)
    return sum(count == pool.refs(block) for block, count in held.items())


def _needed(request: Request) -> int:
    """Return the blocks a waiting request needs for a block of tokens, plus one for the copy of a shared tail."""
    return request.sequence.num_blocks_ahead + 1


def _had_turn(request: Request) -> bool:
    """Whether a running request has computed a block of tokens since it started, beyond all it had before."""
    return request.sequence.num_gained >= request.sequence.block_tokens


def _may_yield(request: Request) -> bool:
    """Whether a running request may be preempted: never before, or it has made progress since."""
    sequence = request.sequence
    least = sequence.block_tokens if sequence.reuse == "off" else 1
    return not sequence.num_preemptions or sequence.num_gained >= least
