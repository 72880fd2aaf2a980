"""Which rows run in the next step: every decode, and new tokens up to a bound in time.

Owns the waiting and running queues and the step-time model; knows no tensors and no blocks. A plan moves each
picked request's `num_computed` towards its `num_tokens`:

    decodes         one row each, always
    everyone else   as many rows as fit into what is left of the bound, in the order of `picks`

The bound is `max_stall_s` while another request runs, loads or waits, else `max_step_s`; where even `MIN_CHUNK` rows
take longer, they are run all the same and the miss is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.config import EngineSettings
from rekindle.engine.costs import StepCosts
from rekindle.engine.request import Request, State

MIN_CHUNK = 16
LONGEST_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + num_rows) of a request; the last one's logits are wanted when it reaches the end."""

    request: Request
    start: int
    num_rows: int

    @property
    def finishes(self) -> bool:
        """Whether the next token can be sampled after it."""
        return self.start + self.num_rows == self.request.num_tokens


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
        elif state is State.LOADING:
            self.loading.append(request)
        elif state is State.WAITING:
            self.add(request)

    def picks(self, requests: Iterable[Request], now: float) -> list[Request]:
        """Fair order: who waited too long first; then namespaces in turn by their oldest request, and inside one
        the longest reuse first, every fourth pick the oldest."""
        left = sorted(requests, key=lambda request: request.marks.submitted)
        order = [request for request in left if now - request.marks.submitted > LONGEST_WAIT_S]
        by_namespace: dict[str, list[Request]] = {}
        for request in left[len(order) :]:
            by_namespace.setdefault(request.namespace, []).append(request)
        while by_namespace:
            for namespace in list(by_namespace):
                mine = by_namespace[namespace]
                self._num_picks += 1
                oldest = self._num_picks % 4 == 0
                pick = mine[0] if oldest else min(mine, key=lambda request: request.num_tokens - self._reuse(request))
                mine.remove(pick)
                order.append(pick)
                if not mine:
                    del by_namespace[namespace]
        return order

    @staticmethod
    def _reuse(request: Request) -> int:
        """Tokens that need no computing: known once it runs, expected from the match before."""
        return request.num_computed if request.state is State.RUNNING else request.facts.num_tokens

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
