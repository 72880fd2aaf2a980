"""Select the rows of the next step: every decode, and prefill tokens up to a time bound.

Owns the waiting and running queues and the step-time model; knows no tensors and no blocks. A plan moves each
picked request's `num_computed` towards its `num_tokens`:

    decodes     one row each
    prefills    as many rows as fit into the rest of the bound, namespaces in turn by the rows they had; in a step that
                completes a prompt, other prompts get rows only up to `SPARE_SHARE` of the bound

The bound is `max_stall_s` while another request runs, loads or waits, else `ALONE` times that; if even `MIN_CHUNK` rows
take longer, they run anyway and the miss is counted. Of such late steps only one in `PROBE_EVERY` is that short, to
learn what a row costs; the others get as many rows as lengthen them by `LATE_SHARE`, so that a machine that stalls
however few the rows computes as many as it can.

A namespace does not wait for what others ask. While another one has asked within `RECENT_S`, its request may come at
any moment and waits for the step that runs: prompts get `SPARE_SHARE` of the bound next to the decodes, not all of it.
Then, where others' decodes would double its time, prompts of a namespace that decodes nothing end in a step without
them; it is never the second of two such steps, so decodes go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.config import EngineSettings
from rekindle.engine.core.costs import StepCosts
from rekindle.engine.request import Request, State
from rekindle.engine.sequence import Sequence

MIN_CHUNK = 16
ALONE = 4
LATE_SHARE, PROBE_EVERY = 0.25, 8
LONGEST_WAIT_S = 2.0
RECENT_S = 60.0  # how long after its last request a namespace may be about to ask again
SPARE_SHARE = 0.4  # of `max_stall_s`: what a short step takes, where another request may wait for it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, start + num_rows) of a sequence; at the end of one that gets a reply, the last row gives logits.

    Rows of a `draft` follow the last token of a sequence, and give logits, too. Where a row's logits score the next
    token of the prompt, all rows give logits.
    """

    sequence: Sequence
    start: int
    num_rows: int
    request: Request | None = None  # none: it is idle work
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.start + self.num_rows + len(self.draft)

    @property
    def token_ids(self) -> np.ndarray:
        """The ids of its rows (uint32), those of its draft last."""
        known = self.sequence.model_ids(self.start, self.start + self.num_rows)
        return np.concatenate([known, np.array(self.draft, dtype=np.uint32)]) if self.draft else known

    @property
    def num_logits(self) -> int:
        """How many of its last rows give logits."""
        return self.num_rows if self.num_scored else self.samples * (1 + len(self.draft))

    @property
    def num_scored(self) -> int:
        """How many tokens of the prompt its rows score: row p those of token p + 1, unless it is known."""
        scores, last = self.sequence.scores, min(self.start + self.num_rows, self.sequence.num_prompt - 1)
        return 0 if scores is None else max(0, last - max(self.start, scores.num_known - 1))

    @property
    def finishes(self) -> bool:
        """Whether it completes the computation."""
        return self.start + self.num_rows == self.sequence.num_tokens

    @property
    def ends_prompt(self) -> bool:
        """Whether it completes the computation of a prompt, whose first token is sampled after it."""
        return self.finishes and self.sequence.num_tokens == self.sequence.num_prompt

    @property
    def samples(self) -> bool:
        """Whether the next token is sampled after it."""
        return self.finishes and self.sequence.task == "generate"


class _Line:
    """The requests of one namespace, given oldest first: each is picked once. Sorted once for all picks.

    The first `num_late` of them have waited too long.
    """

    def __init__(self, by_age: list[Request], work: Callable[[Request], int], *, num_late: int) -> None:
        self.num_left = len(by_age)
        self._num_late = num_late
        self._by_age = iter(by_age)
        self._by_work = iter(sorted(by_age, key=work))  # equals stay in order of age
        self._picked: set[int] = set()

    def pick(self, order: Literal["oldest", "least"]) -> Request:
        """Pick the request that has waited longest, or has the least left to compute; late ones come first."""
        if len(self._picked) < self._num_late or order == "oldest":
            return self._next(self._by_age)
        return self._next(self._by_work)

    def _next(self, order: Iterator[Request]) -> Request:
        pick = next(request for request in order if id(request) not in self._picked)
        self._picked.add(id(pick))
        self.num_left -= 1
        return pick


class _RowCounts:
    """Prompt rows run for each namespace that has any to run.

    A namespace that had none for a while resumes from at least one row below the lowest count of the others: it goes
    first, and idle time is no credit (the virtual token counter of Sheng et al., Fairness in Serving Large Language
    Models, OSDI 2024).
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._active: set[str] = set()

    def keep(self, active: set[str]) -> None:
        """Set the namespaces that have rows to run now; if none of them had before, all counts restart."""
        if not active & self._active:
            self._counts.clear()
        least = min((self.of(each) for each in active & self._active), default=0)
        for namespace in active - self._active:
            self._counts[namespace] = max(least - 1, self.of(namespace))
        self._active = active

    def of(self, namespace: str) -> int:
        """Return the rows of a namespace."""
        return self._counts.get(namespace, 0)

    def add(self, namespace: str, count: int) -> None:
        """Count rows that are run for a namespace."""
        self._counts[namespace] = self.of(namespace) + count


class Scheduler:
    """Queues of one engine. Every request is in exactly one of `waiting`, `loading`, `running`.

    Chunks that do not complete a prompt end at multiples of `chunk_multiple` tokens, 1 for any place, and never between
    rows that see each other. At most `max_scored_rows` of a step give logits because their prompts' tokens are scored.
    """

    def __init__(
        self,
        settings: EngineSettings,
        costs: StepCosts,
        *,
        max_chunk_tokens: int,
        chunk_multiple: int = 1,
        max_scored_rows: int | None = None,
    ) -> None:
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.costs = costs
        self.num_stall_misses = 0
        self.max_chunk_tokens = max_chunk_tokens
        self._chunk_multiple = chunk_multiple
        self._max_scored_rows = max_scored_rows or max_chunk_tokens
        self._settings = settings
        self._num_picks = 0
        self._num_starts = 0
        self._last_starts: dict[str, int] = {}  # by namespace: the number of its last start
        self._last_asked: dict[str, float] = {}  # by namespace: when its last request was submitted
        self._made_way = False  # whether the last step was without others' decodes
        self._rows = _RowCounts()

    def everybody(self) -> list[Request]:
        """Return every request that has not ended."""
        return [*self.waiting, *self.loading, *self.running]

    @property
    def max_running(self) -> int:
        """How many requests may run or load."""
        return self._settings.max_running

    def has_room(self) -> bool:
        """Whether one more request may start."""
        return len(self.running) + len(self.loading) < self.max_running

    def last_start(self, namespace: str) -> int:
        """Return the number of the last start of a namespace's requests; 0 if none has started."""
        return self._last_starts.get(namespace, 0)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds until the first request times out; None when no request has a deadline."""
        deadline = min((request.deadline for request in self.everybody()), default=math.inf)
        return max(0.0, deadline - now) if deadline < math.inf else None

    def add(self, request: Request) -> None:
        """Queue a new request, or a preempted one before all others."""
        request.state = State.WAITING
        if request.sequence.num_preemptions:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)
            self._last_asked[request.namespace] = request.times.submitted

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
        """Return requests in fair order: namespaces in turn; within one, late requests, then the least to compute,
        every fourth pick the oldest, where priorities make them older. The turn begins with the namespace that started
        least recently, then by oldest request.
        """
        return self._picks(requests, now, self.last_start)

    def _picks(self, requests: Iterable[Request], now: float, turn: Callable[[str], int]) -> list[Request]:
        """Order requests as `picks` does, each turn beginning with the namespace of the least `turn`."""
        by_namespace: dict[str, list[Request]] = {}
        for request in sorted(requests, key=lambda request: request.times.submitted):
            by_namespace.setdefault(request.namespace, []).append(request)
        lines: list[_Line] = []
        for namespace in sorted(by_namespace, key=turn):
            mine = sorted(by_namespace[namespace], key=lambda request: request.counts_from)
            num_late = sum(now - request.counts_from > LONGEST_WAIT_S for request in mine)
            lines.append(_Line(mine, self._work, num_late=num_late))
        order: list[Request] = []
        while lines:
            for line in lines:
                self._num_picks += 1
                order.append(line.pick("least" if self._num_picks % 4 else "oldest"))
            lines = [line for line in lines if line.num_left]
        return order

    @staticmethod
    def _work(request: Request) -> int:
        """Return the tokens to compute: exact once it runs, before that estimated from the match, or from the computed
        tokens of a preempted request."""
        sequence = request.sequence
        if request.state is State.RUNNING:
            return sequence.num_left
        resumes = sequence.num_preemptions and sequence.reuse != "off"
        return sequence.num_tokens - (sequence.num_before if resumes else request.match.num_tokens)

    def plan(self, now: float) -> list[Chunk]:
        """Plan the next step; empty when nothing runs. Decodes come first, in order of arrival."""
        decoding = [request for request in self.running if request.sequence.num_left == 1]
        prefilling = [request for request in self.running if request.sequence.num_left > 1]
        self._rows.keep({request.namespace for request in prefilling})
        if guests := self._guests(decoding, prefilling):
            decoding = [request for request in decoding if request.namespace in guests]
            prefilling = [request for request in prefilling if request.namespace in guests]
        chunks = [Chunk(request.sequence, request.sequence.num_computed, 1, request) for request in decoding]
        rows, contexts, scored = len(chunks), sum(chunk.start for chunk in chunks), 0
        bound = self._bound(now, self.costs.predict(rows=rows, row_contexts=contexts))
        for request in self._picks(prefilling, now, self._rows.of):
            first = len(chunks) == len(decoding)
            sequence = request.sequence
            room = self.max_chunk_tokens - rows
            if sequence.is_scored:
                room = min(room, self._max_scored_rows - scored)
            fit = self._fit(sequence, bound, rows=rows, contexts=contexts, first=first)
            if min(fit, room) < sequence.num_left and any(chunk.ends_prompt for chunk in chunks):
                start, seconds = sequence.num_computed, self._spare_s
                spare = self.costs.rows_within(seconds=seconds, rows=rows, row_contexts=contexts, start=start)
                fit = min(fit, max(spare, MIN_CHUNK if first else 0))
            count = self._chunk(sequence, fit, room=room, first=first)
            if count:
                chunks.append(Chunk(sequence, sequence.num_computed, count, request))
                rows += count
                scored += count if sequence.is_scored else 0
                contexts += count * (sequence.num_computed + count // 2)
                self._rows.add(request.namespace, count)
        return chunks

    def _guests(self, decoding: list[Request], prefilling: list[Request]) -> set[str]:
        """Return the namespaces that have the step to themselves, none in most steps: they decode nothing, prompts of
        theirs end in it, and others' decodes, which were in the last one, would make it twice as long."""
        hosts = {each.namespace for each in decoding if each.sequence.num_tokens > each.sequence.num_prompt}
        guests, rows, contexts = set[str](), 0, 0
        for namespace, sequence in ((each.namespace, each.sequence) for each in [*decoding, *prefilling]):
            count, start = sequence.num_left, sequence.num_computed
            fit = self.costs.rows_within(seconds=self._spare_s, rows=rows, row_contexts=contexts, start=start)
            if namespace not in hosts and count <= fit:
                guests.add(namespace)
                rows, contexts = rows + count, contexts + count * (start + count // 2)
        theirs = [each.sequence.num_computed for each in decoding if each.namespace not in guests]
        alone = self.costs.predict(rows=rows, row_contexts=contexts)
        doubled = self.costs.predict(rows=rows + len(theirs), row_contexts=contexts + sum(theirs)) > 2 * alone
        self._made_way = bool(guests) and doubled and not self._made_way
        return guests if self._made_way else set()

    def _bound(self, now: float, decodes_s: float) -> float:
        """Return the seconds that a step may take whose decodes take `decodes_s`."""
        stall = self._settings.max_stall_s
        if len(self.running) + len(self.waiting) + len(self.loading) == 1:
            return ALONE * stall
        self._last_asked = {each: at for each, at in self._last_asked.items() if now - at < RECENT_S}
        namespaces = {request.namespace for request in self.running} | self._last_asked.keys()
        return min(stall, decodes_s + self._spare_s) if len(namespaces) > 1 else stall

    @property
    def _spare_s(self) -> float:
        """Seconds of idle work, of prompts while another namespace may ask, or of a step that completes a prompt."""
        return SPARE_SHARE * self._settings.max_stall_s

    def chunk_alone(self, sequence: Sequence) -> Chunk:
        """Plan the next rows of idle work, bounded by `SPARE_SHARE` of `max_stall_s`: a new request waits for them.

        Unless they complete the sequence they end with a block, so that stopping there leaves no tail.
        """
        fit = self._fit(sequence, self._spare_s, rows=0, contexts=0, first=True)
        count = self._chunk(sequence, fit, room=self.max_chunk_tokens, first=True)
        start, size = sequence.num_computed, sequence.block_tokens
        end = (start + count) // size * size
        ends_there = count < sequence.num_left and end > start and sequence.divided(end) is None
        return Chunk(sequence, start, end - start if ends_there else count)

    def _fit(self, sequence: Sequence, bound: float, *, rows: int, contexts: int, first: bool) -> int:
        """Return how many rows of a sequence fit into the bound alongside the given ones.

        The first prefill of a step always moves, so that decoding streams cannot starve it.
        """
        costs, start = self.costs, sequence.num_computed
        fit = costs.rows_within(seconds=bound, rows=rows, row_contexts=contexts, start=start)
        if fit >= min(MIN_CHUNK, sequence.num_left) or not first:
            return fit
        self.num_stall_misses += 1
        late = (1 + LATE_SHARE) * costs.predict(rows=rows, row_contexts=contexts)
        if late <= bound or self.num_stall_misses % PROBE_EVERY == 1:
            return MIN_CHUNK
        return max(MIN_CHUNK, costs.rows_within(seconds=late, rows=rows, row_contexts=contexts, start=start))

    def _chunk(self, sequence: Sequence, fit: int, *, room: int, first: bool) -> int:
        """Return the rows for a prefilling sequence: all that is left if it fits, else whole multiples of MIN_CHUNK, up
        to a multiple of `chunk_multiple` tokens; the first prefill of a step always gets there."""
        if first:
            room = max(room, MIN_CHUNK)
        count = min(fit, room, sequence.num_left)
        if count >= sequence.num_left:
            return count
        count -= count % MIN_CHUNK
        start, multiple = sequence.num_computed, self._chunk_multiple
        end = (start + count) // multiple * multiple
        if end <= start and first:
            end = (start // multiple + 1) * multiple
        return min(max(0, self._undivided(sequence, end, first=first) - start), sequence.num_left)

    @staticmethod
    def _undivided(sequence: Sequence, end: int, *, first: bool) -> int:
        """Return the end of a chunk, before rows that see each other if it lies among them; after them if only that
        moves the first prefill of a step."""
        divided = sequence.divided(end)
        if divided is None:
            return end
        return divided[0] if divided[0] > sequence.num_computed or not first else divided[1]

    def youngest(self, requests: list[Request]) -> Request:
        """Return the request submitted last: it is preempted when memory is short."""
        return max(requests, key=lambda request: request.times.submitted)

    def check(self) -> None:
        """Assert that every request is in the queue of its state, once."""
        for queue, state in (
            (self.waiting, State.WAITING),
            (self.loading, State.LOADING),
            (self.running, State.RUNNING),
        ):
            for request in queue:
                assert request.state is state, f"request {request.id} is {request.state} in the queue of {state}"
            assert len({id(request) for request in queue}) == len(queue), f"a request is twice in {state}"
