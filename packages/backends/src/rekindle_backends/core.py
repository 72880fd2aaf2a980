"""The core of a front: requests go to a backend as token ids, and what comes back is delivered like replies of our own.

Owns which request waits for which answer. A step never blocks: answers arrive on the backend's thread, which queues
them and wakes the engine's. What a request reused is known at the end of its answer, so the last tokens are held back
until then. Where a request is computed and what is stored of it is the memory's.

    waiting ──▶ running: its request is at the backend ──▶ finished
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.background import Background, IdleWork, OrphanBlocks
from rekindle.engine.core.interface import Core, CoreCounts
from rekindle.engine.core.reporting import report_progress
from rekindle.engine.core.sampling import Replies
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.request import FinishedTurn, Request, State
from rekindle.engine.sequence import Ended
from rekindle.engine.types import FinishReason
from rekindle.errors import BackendFailed, RekindleError
from rekindle.store.commands import StoreCommand
from rekindle_backends.calls import scored
from rekindle_backends.client import Arrived, Backend, Sending
from rekindle_backends.memory import Memory, Place
from rekindle_backends.wire import OTHER_PROMPT, Call, Piece

ENDS: dict[str, FinishReason] = {"length": "length", "stop": "stop"}
MOST_UNWANTED = 16  # several may come at once


class Left:
    """What arrives last: nothing of a request is under way any more."""


class Calls(Protocol):
    """Writes requests for one backend."""

    def call(self, request: Request) -> Call:
        """Return the call of a request; BadRequest for what the backend cannot be asked."""
        ...


@dataclass(slots=True, eq=False)
class Answer:
    """What is under way for a request: its call, and pieces that are held back until the reuse is known.

    `num_certain` leading ids of the reply are the backend's own; None: all of them. Those after it are guessed from its
    text, and are not remembered.
    """

    request: Request
    call: Sending | None = None
    held: list[Piece] = field(default_factory=list)
    reason: str | None = None
    num_certain: int | None = None
    num_reused: int = 0
    num_unwanted: int = 0  # tokens of a reply that nobody asked for: a prompt alone is computed by asking for one


class RemoteCore(Core):
    """A core without a model. `on_turn` is called with every ended sequence worth remembering, `wake` from any thread.

    Token ids of replies are below `vocab_size`, or the request fails.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        calls: Calls,
        cache: PrefixCache,
        memory: Memory,
        scheduler: Scheduler,
        vocab_size: int,
        min_reuse_tokens: int,
        on_turn: Callable[[FinishedTurn], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self._backend = backend
        self._calls = calls
        self._memory = memory
        self._vocab_size = vocab_size
        self._wake = wake
        self._clock = clock
        self._arrived: queue.SimpleQueue[tuple[Answer, Arrived | Left]] = queue.SimpleQueue()
        self._answers: dict[int, Answer] = {}  # by the number of the request
        self._prompt_tokens = 0
        self._reused_tokens = 0
        orphans = OrphanBlocks(cache.pool)
        self.background = Background(cache=cache, scheduler=scheduler, orphans=orphans, min_tokens=min_reuse_tokens)
        self._replies = Replies(
            scheduler=scheduler,
            orphans=orphans,
            min_reuse_tokens=min_reuse_tokens,
            on_turn=on_turn,
            clock=clock,
            end=self._end,
            reports_early=False,
        )

    @property
    def counts(self) -> CoreCounts:
        """The counters so far; the backend has its own."""
        return CoreCounts(prompt_tokens=self._prompt_tokens, reused_tokens=self._reused_tokens)

    @property
    def has_work(self) -> bool:
        """False: whatever happens is announced."""
        return False

    def add(self, work: Request | IdleWork) -> None:
        """Queue a request; there is no idle work, as nothing is anticipated."""
        assert isinstance(work, Request), "another server computes: nothing is anticipated"
        self.scheduler.add(work)

    def finish_load(self, load: Load, num_good: int) -> None:
        """Publish blocks that were loaded; the request that they are for waits for its place again."""
        self.cache.loads.finish(load, num_good)
        request = next((each for each in self.scheduler.loading if each.sequence is load.sequence), None)
        if request is not None:
            request.times.load_s += self._clock() - request.times.load_started
            self.scheduler.move(request, State.WAITING)

    def seconds_left(self) -> float | None:
        """Return the seconds until the first request times out, or something else is due; None if nothing is."""
        now = self._clock()
        due = [left for left in (self.scheduler.seconds_left(now), self._memory.seconds_left(now)) if left is not None]
        return min(due, default=None)

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store, after what it depends on."""
        self._memory.save(command)

    def hand_over(self) -> int:
        """Let what ended turns have go to the store now; return how much it has not accepted yet."""
        return self._memory.hand_over()

    def forget(self, namespace: str, agent: str) -> set[BlockHash]:
        """Keep nothing of an agent at the backend."""
        self._memory.forget(namespace, agent)
        return self.background.forget(namespace, agent)

    def step(self) -> None:
        """Deliver what has arrived, end what is not wanted any more, send what waits as far as there is room."""
        while not self._arrived.empty():
            answer, arrived = self._arrived.get_nowait()
            if isinstance(arrived, Left):
                self._memory.left(answer.request)
            elif answer.request.state is State.RUNNING:
                self._receive(answer, arrived)
        now = self._clock()
        self._replies.drop_unwanted(now)
        self._memory.step(now)
        for request in self.scheduler.picks(self.scheduler.waiting, now):
            if not self.scheduler.has_room():
                break
            place = self._memory.place(request)
            if isinstance(place, Place):
                self._start(request, place)
            elif place == "loading":
                request.times.load_started = self._clock()
                self.scheduler.move(request, State.LOADING)
        if not self._memory.is_writing:
            self.cache.saving.pump()

    def _start(self, request: Request, place: Place) -> None:
        """Send a request; one that cannot be asked of the backend fails."""
        request.times.admitted = self._clock()
        request.reply.generation.begin()
        request.is_reuse_known = False
        self.scheduler.move(request, State.RUNNING)
        answer = self._answers[request.id] = Answer(request)
        try:
            call, put = self._calls.call(request), partial(self._put, answer)
            call = replace(call, body={**call.body, **place.options})
            answer.call = self._backend.submit(call, put, prepare=place.prepare, left=partial(put, Left()))
        except RekindleError as error:
            self._replies.fail(request, error)
            self._memory.left(request)
            return
        self._prompt_tokens += request.sequence.num_prompt

    def _put(self, answer: Answer, arrived: Arrived | Left) -> None:
        """Queue what a request got, or that its call has ended. On the backend's thread."""
        self._arrived.put((answer, arrived))
        self._wake()

    def _receive(self, answer: Answer, arrived: Arrived) -> None:
        request = answer.request
        if isinstance(arrived, RekindleError):
            self._replies.stop(request, arrived)
        elif arrived is None:
            self._finish(answer)
        else:
            if arrived.prompt_ids is not None and not np.array_equal(arrived.prompt_ids, request.sequence.prompt_ids):
                self._replies.fail(request, BackendFailed(OTHER_PROMPT))
                return
            if arrived.cached_tokens is not None:
                self._note_reuse(answer, arrived.cached_tokens)
            if arrived.done_tokens is not None:
                self._note_progress(request, arrived.done_tokens)
            answer.reason = arrived.reason or answer.reason
            answer.held.append(arrived)
            if answer.reason is None:
                self._release(answer)

    def _note_reuse(self, answer: Answer, cached_tokens: int) -> None:
        """Record what the backend says it has reused of the prompt."""
        request, sequence = answer.request, answer.request.sequence
        reused = min(cached_tokens, sequence.num_prompt)
        self._reused_tokens += reused - answer.num_reused
        answer.num_reused = reused
        sequence.warm_tokens = min(sequence.warm_tokens, reused)
        sequence.hot_tokens = reused - sequence.warm_tokens
        sequence.read = None  # they may be others than those that were restored: see `reporting.chain_of`
        self._memory.reused(request, reused)
        request.is_reuse_known = True

    def _note_progress(self, request: Request, done_tokens: int) -> None:
        """Report how far the backend is with the prompt."""
        sequence = request.sequence
        sequence.num_computed = min(done_tokens, sequence.num_prompt)
        report_progress(request, now=self._clock(), min_reuse_tokens=self._replies.min_reuse_tokens)

    def _release(self, answer: Answer) -> None:
        """Deliver the tokens that were held back, until the reply ends."""
        request, held = answer.request, answer.held
        answer.held = []
        if request.sequence.task != "generate":
            answer.num_unwanted += sum(len(piece.token_ids) for piece in held)
            if answer.num_unwanted > MOST_UNWANTED:
                self._replies.stop(request, BackendFailed("the backend sent a reply where one token was asked for"))
            return
        num_top, bytes_of = request.reply.sampler.params.logprobs, request.reply.stream.token_bytes
        for piece in held:
            fault = self._fault(piece, needs_scores=num_top is not None)
            if fault is not None:
                self._replies.stop(request, BackendFailed(fault))
                return
            if not piece.is_certain and answer.num_certain is None:
                answer.num_certain = request.sequence.num_generated
            scores = scored(piece.token_ids, piece.scores, num_top, bytes_of)
            for token, score in zip(piece.token_ids, scores, strict=True):
                if request.state is not State.RUNNING:
                    return
                self._replies.take(request, token, score)

    def _fault(self, piece: Piece, *, needs_scores: bool) -> str | None:
        """Return why tokens of a backend cannot be delivered; None if they can."""
        scored_ids = chain.from_iterable(score.top for score in piece.scores if score is not None)
        strange = [token for token in chain(piece.token_ids, scored_ids) if not 0 <= token < self._vocab_size]
        if strange:
            return f"the backend sent token id {strange[0]}, which the model does not have"
        if needs_scores and len(piece.scores) != len(piece.token_ids):
            return "the backend sent no log probabilities: leave logprobs out"
        return None

    def _finish(self, answer: Answer) -> None:
        """End a request as the backend has ended it, unless its own tokens have."""
        request, reason = answer.request, answer.reason
        self._release(answer)
        if request.state is not State.RUNNING:
            return
        if request.sequence.task != "generate":
            self._replies.finish(request, "stop")
        elif reason in ENDS:
            self._replies.finish(request, ENDS[reason])
        else:
            self._replies.stop(request, BackendFailed(f"the backend ended the reply early: {reason or 'no reason'}"))

    def _end(self, request: Request, keep: bool) -> Ended:
        """Close the connection of a request that ends; it is remembered if it was sent."""
        answer = self._answers.pop(request.id, None)
        if answer is not None and answer.call is not None:
            answer.call.cancel()
        if answer is None:
            return self._memory.end(request, keep=False, num_known=0, num_computed=0)
        num_known, is_computed = self._num_certain(answer), answer.reason == "stop"  # by what follows the last token
        num_computed = min(num_known, request.sequence.num_tokens - (not is_computed))
        return self._memory.end(request, keep=keep, num_known=num_known, num_computed=num_computed)

    @staticmethod
    def _num_certain(answer: Answer) -> int:
        """Return how many ids of prompt and reply are the backend's own: a turn is remembered up to there."""
        sequence = answer.request.sequence
        return sequence.num_tokens if answer.num_certain is None else sequence.num_prompt + answer.num_certain

    def settle(self) -> None:
        """Nothing: the backend writes to blocks of its own."""

    def rest(self) -> None:
        """Nothing: the backend has the threads that compute."""

    def check(self) -> None:
        """Assert the invariants between steps, one answer for each request that runs, and that no block is held."""
        super().check()
        running = {request.id for request in self.scheduler.running}
        assert running == self._answers.keys(), f"{running} run, {self._answers.keys()} are at the backend"
        self._memory.check()
