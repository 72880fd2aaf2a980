"""Which rows run in the next step: every decode, and new tokens up to a bound in time.

Owns the waiting and running queues and the step-time model; knows no tensors and no blocks. A plan moves each
picked request's `num_computed` towards its `num_tokens`:

    decodes         one row each, always
    everyone else   as many rows as fit into what is left of the bound, in the order of `picks`

The bound is `max_stall_s` while another request runs, loads or waits, else `max_step_s`; where even `MIN_CHUNK` rows
take longer, they are run all the same and the miss is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.config import EngineSettings
from rekindle.engine.costs import StepCosts
from rekindle.engine.request import Request, State

MIN_CHUNK = 16
LONGEST_WAIT_S = 2.0
IDLE_SHARE = 0.4  # of the longest stall, for a step that nobody is waiting for


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + num_rows) of a request; where it reaches the end of one that is to be replied to, the last
    one's logits are wanted."""

    request: Request
    start: int
    num_rows: int

    @property
    def finishes(self) -> bool:
        """Whether nothing is left to compute after it."""
        return self.start + self.num_rows == self.request.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the next token is sampled after it."""
        return self.finishes and self.request.task == "generate"


class _Line:
    """The requests of one namespace, given oldest first: each is picked once. Sorted once, whatever the picks."""

    def __init__(self, by_age: Sequence[Request], work: Callable[[Request], int]) -> None:
        self.num_left = len(by_age)
        self._by_age = iter(by_age)
        self._by_work = iter(sorted(by_age, key=work))  # equals stay in order of age
        self._picked: set[int] = set()

    def oldest(self) -> Request:
        """The one that has waited longest."""
        return self._next(self._by_age)

    def least(self) -> Request:
        """The one with the least left to compute."""
        return self._next(self._by_work)

    def _next(self, order: Iterator[Request]) -> Request:
        pick = next(request for request in order if id(request) not in self._picked)
        self._picked.add(id(pick))
        self.num_left -= 1
        return pick


class Scheduler:
    """Queues of one engine. Every request is in exactly one of `waiting`, `loading`, `running`."""

    def __init__(self, settings: EngineSettings, costs: StepCosts, *, max_chunk_tokens: int) -> None:
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.costs = costs
        self.num_stall_misses = 0
        self._settings = settings
        self._max_chunk_tokens = max_chunk_tokens
        self._num_picks = 0
        self._num_starts = 0
        self._last_starts: dict[str, int] = {}  # by namespace: the number of its last start

    def everybody(self) -> list[Request]:
        """Every request that has not ended."""
        return [*self.waiting, *self.loading, *self.running]

    def has_room(self) -> bool:
        """Whether one more request may start."""
        return len(self.running) + len(self.loading) < self._settings.max_running

    def add(self, request: Request) -> None:
        """Queue a new request, or a preempted one before all others."""
        request.state = State.WAITING
        if request.num_preemptions:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def move(self, request: Request, state: State) -> None:
        """Put a request into the queue of `state` (none for FINISHED)."""
        for queue in (self.waiting, self.loading, self.running):
            if request in queue:
                queue.remove(request)
        request.state = state
        if state is State.RUNNING:
            self.running.append(request)
            self._num_starts += 1
            self._last_starts[request.namespace] = self._num_starts
        elif state is State.LOADING:
            self.loading.append(request)
        elif state is State.WAITING:
            self.add(request)

    def picks(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Fair order: who waited too long first; then namespaces in turn, and inside one the longest reuse first, every
        fourth pick the oldest. The turn begins with the namespace that started least recently, then by oldest request.
        """
        left = sorted(requests, key=lambda request: request.marks.submitted)
        order = [request for request in left if now - request.marks.submitted > LONGEST_WAIT_S]
        by_namespace: dict[str, list[Request]] = {}
        for request in left[len(order) :]:
            by_namespace.setdefault(request.namespace, []).append(request)
        by_namespace = dict(sorted(by_namespace.items(), key=lambda item: self._last_starts.get(item[0], 0)))
        lines = [_Line(mine, self._work) for mine in by_namespace.values()]
        while lines:
            for line in lines:
                self._num_picks += 1
                order.append(line.least() if self._num_picks % 4 else line.oldest())
            lines = [line for line in lines if line.num_left]
        return order

    @staticmethod
    def _work(request: Request) -> int:
        """Tokens to compute: what is reused is known once it runs, and expected from the match before."""
        reused = request.num_computed if request.state is State.RUNNING else request.facts.num_tokens
        return request.num_tokens - reused

    def plan(self, now: float) -> list[Chunk]:
        """The next step; empty when nothing runs. Decodes come first, in order of arrival."""
        decoding = [request for request in self.running if request.num_left == 1]
        prefilling = [request for request in self.running if request.num_left > 1]
        chunks = [Chunk(request, request.num_computed, 1) for request in decoding]
        alone = len(self.running) + len(self.waiting) + len(self.loading) == 1
        bound = self._settings.max_step_s if alone else self._settings.max_stall_s
        rows, contexts = len(chunks), sum(chunk.start for chunk in chunks)
        for request in self.picks(prefilling, now):
            fit = self.costs.rows_within(seconds=bound, rows=rows, row_contexts=contexts, start=request.num_computed)
            count = self._chunk(request, fit, room=self._max_chunk_tokens - rows, first=len(chunks) == len(decoding))
            if count:
                chunks.append(Chunk(request, request.num_computed, count))
                rows += count
                contexts += count * (request.num_computed + count // 2)
        return chunks

    def chunk_alone(self, request: Request) -> Chunk:
        """The next rows of a request that runs while nobody else is there: whoever arrives meanwhile waits for them, so
        they take `IDLE_SHARE` of `max_stall_s`.

        They end with a block where they do not end the request, so that whoever stops there leaves no tail.
        """
        start, bound = request.num_computed, self._settings.max_stall_s * IDLE_SHARE
        fit = self.costs.rows_within(seconds=bound, rows=0, row_contexts=0, start=start)
        count = self._chunk(request, fit, room=self._max_chunk_tokens, first=True)
        end = (start + count) // request.block_tokens * request.block_tokens
        return Chunk(request, start, end - start if count < request.num_left and end > start else count)

    def _chunk(self, request: Request, fit: int, *, room: int, first: bool) -> int:
        """Rows for a prefilling request: all that is left if it fits, else whole multiples of MIN_CHUNK.

        The first prefill of a step always moves, so that decoding streams cannot starve it.
        """
        if fit < min(MIN_CHUNK, request.num_left) and first:
            self.num_stall_misses += 1
            fit = MIN_CHUNK
        if first:
            room = max(room, MIN_CHUNK)
        count = min(fit, room, request.num_left)
        if count >= request.num_left:
            return request.num_left
        return max(0, count - count % MIN_CHUNK)

    def youngest(self, requests: Sequence[Request]) -> Request:
        """Who gives way when memory is short: the request submitted last."""
        return max(requests, key=lambda request: request.marks.submitted)

    def check(self) -> None:
        """Assert that every request is in the queue of its state, once."""
        for queue, state in (
            (self.waiting, State.WAITING),
            (self.loading, State.LOADING),
            (self.running, State.RUNNING),
        ):
            for request in queue:
                assert request.state is state, f"request {request.id} is {request.state} in the queue of {state}"
            assert len({id(request) for request in queue}) == len(queue), f"a request stands twice in {state}"
