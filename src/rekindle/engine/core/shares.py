"""Fair shares of the running places and of hot memory, and whose requests give back what is more than that.

With N namespaces that run, load or wait, a namespace's share is

    places   max_running // N, at least one: of requests that run or load
    memory   num_blocks // N, of blocks that its running and loading requests hold

Who is alone may have everything, and what the others leave anybody may use. But where there is no room for a request
whose namespace has less than its share, requests of namespaces above theirs are preempted for it, at the next step, the
youngest first. Namespaces that outnumber the places, or whose requests are larger than a share, take turns: a namespace
that runs nothing gets room from any request that has had its turn, a block of tokens; for memory it waits
`LONGEST_WAIT_S` first, because larger parts of what was computed are at stake.

A preempted request keeps its KV under its names, the tail's too, so it goes on where it was: giving a place back costs
no rows unless others need the memory meanwhile. It is not preempted a second time before it has computed a token more
than ever before, or a block more with `reuse` off, where nothing is kept: every request gets ahead.

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
    """Who has more than its share of one engine, at one moment: made anew after whatever starts or is preempted."""

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
        """Whether somebody waits whose namespace has less than its share of the places."""
        if self._num_namespaces < 2:
            return False
        share = self.num_places
        return any(self._taken[request.namespace] < share for request in self._scheduler.waiting)

    def place_from(self, request: Request) -> Request | None:
        """Who gives a waiting request its place, where all are taken; None where nobody has to."""
        taken, share = self._taken, self.num_places
        if taken[request.namespace] >= share:
            return None
        above = [each for each in self._scheduler.running if taken[each.namespace] > share]
        above.sort(key=lambda each: (-taken[each.namespace], each.reuse == "off", -each.times.submitted))
        giver = next((each for each in above if _may_yield(each)), None)
        if above or taken[request.namespace]:
            return giver
        done = [each for each in self._scheduler.running if _had_turn(each)]
        return min(done, key=lambda each: self._scheduler.last_start(each.namespace), default=None)

    def blocks_from(self, request: Request, now: float) -> list[Request]:
        """Who gives a waiting request the memory it needs to run, in order; nobody where that would not be enough."""
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
        """Who is preempted when a running request finds no block: the youngest of the namespaces above their share
        that run more than one request, of all where there are none."""
        running = self._scheduler.running
        if self._num_namespaces > 1:
            several = Counter(request.namespace for request in running)
            above = {name for name in several if several[name] > 1 and len(self._held(name)) > self.num_blocks}
            running = [request for request in running if request.namespace in above] or running
        return self._scheduler.youngest(running)

    def _held(self, namespace: str) -> frozenset[int]:
        """Blocks that a namespace's requests hold; a common beginning counts once."""
        if namespace not in self._blocks:
            running = (each for each in self._scheduler.running if each.namespace == namespace)
            loads = (load for load in self._cache.loads.under_way() if load.request.namespace == namespace)
            held = frozenset(block for request in running for block in request.table.blocks)
            self._blocks[namespace] = held.union(*(load.targets for load in loads))
        return self._blocks[namespace]

    def _above_share(self) -> Iterator[Request]:
        """Running requests of the namespaces above their share of memory, until they are down to it. A namespace's only
        one has its turn first."""
        running = sorted(self._scheduler.running, key=lambda each: (each.reuse == "off", -each.times.submitted))
        for namespace in dict.fromkeys(request.namespace for request in running):
            mine = [request for request in running if request.namespace == namespace]
            left = list(mine)
            for request in mine:
                held = {block for each in left for block in each.table.blocks}
                if len(held) <= self.num_blocks:
                    break
                if _had_turn(request) or (len(left) > 1 and _may_yield(request)):
                    left.remove(request)
                    yield request

    def _after_turns(self) -> Iterator[Request]:
        """Those above their share, then everybody else who had a turn."""
        seen: set[int] = set()
        for request in self._above_share():
            seen.add(id(request))
            yield request
        for request in sorted(self._scheduler.running, key=lambda each: -each.times.submitted):
            if id(request) not in seen and _had_turn(request):
                yield request

    def _enough(self, request: Request, givers: Iterator[Request]) -> list[Request]:
        """The first of the givers after whom the request fits; nobody where it does not even after all of them."""
        pool, chosen = self._cache.pool, list[Request]()
        ahead = sum(each.num_blocks_ahead for each in self._scheduler.running)
        for giver in givers:
            chosen.append(giver)
            ahead -= giver.num_blocks_ahead
            if _needed(request) + ahead <= pool.num_free + pool.num_cached + freed_by(chosen, pool):
                return chosen
        return []


def freed_by(requests: Sequence[Request], pool: BlockPool) -> int:
    """Blocks that nobody holds any more once all of these are preempted."""
    held = Counter(block for request in requests for block in request.table.blocks)
    return sum(count == pool.refs(block) for block, count in held.items())


def _needed(request: Request) -> int:
    """Blocks that a waiting request needs to run for a block of tokens, and one for the copy of a shared tail."""
    return request.num_blocks_ahead + 1


def _had_turn(request: Request) -> bool:
    """Whether a running request has computed a block of tokens since it started, beyond all that it had before."""
    return request.num_gained >= request.block_tokens


def _may_yield(request: Request) -> bool:
    """Whether preempting a running request is no setback: it has got ahead since it was preempted, if it ever was."""
    return not request.num_preemptions or request.num_gained >= (request.block_tokens if request.reuse == "off" else 1)
