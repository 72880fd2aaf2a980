"""Before and after the engine: requests become token ids here, finished turns become memories.

Owns the thread on which templates, matching and tokenising of short prompts run, the matcher and the branch book; the
server and the library use the same one. Long prompts are rendered and tokenised elsewhere (see long_prompts). Work
arrives as closures over frozen values and is done in order, so an ended turn is known before the next request of its
agent is matched. In idle time next prompts are anticipated, the text index is filled from the store, and old or lost
branches are forgotten; the latter once a minute even without idle time. A failure of any kind ends one piece of work;
if the thread itself dies, waiting and later work is refused at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rekindle.engine.generation import Generation
from rekindle.engine.intake.anticipation import Anticipation
from rekindle.engine.intake.fairness import MOST_THREADS, FairWorkers
from rekindle.engine.intake.long_prompts import LongPrompts
from rekindle.engine.intake.request_builder import RequestBuilder
from rekindle.engine.memory.memory import AgentMemory, OnMemory
from rekindle.engine.memory.retention import EVERY_S, Retention
from rekindle.engine.request import FinishedTurn
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest, Cancelled, Overloaded, RekindleError
from rekindle.worker import Death, Worker, concealed, fail, fulfil, is_meant_for_thread

logger = logging.getLogger(__name__)
T = TypeVar("T")


def _here(work: Callable[[], T], /) -> T:
    return work()


def _discard(error: RekindleError) -> None:
    """Refuse work that has no caller waiting: nothing to report."""


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to do on the intake thread; `refuse` answers its caller when it cannot be done."""

    do: Callable[[], None]
    refuse: Callable[[RekindleError], None] = _discard


Inbox = queue.SimpleQueue[Work | None]

# With turns to anticipate, check this often whether the engine is idle, and only after that long without new work: a
# request right after a turn, as agents that talk to each other send, would wait for a step of idle work (60-100 ms).
LOOK_AGAIN_S = 0.02
MOST_IMPORTS = 16  # requests that wait for the object tier at the same moment


class AdmissionQueueLimit:
    """Counts of waiting requests by namespace, and when to refuse more. Safe from any thread.

    In total `limit` may wait. If one namespace fills the queue, another is still admitted as long as it has less than
    its share, the limit divided by the namespaces that wait, itself included: the requests of k namespaces together
    stay below limit * (1 + 1/2 + … + 1/k).

    Requests with `waits_aside`, such as prefills for session listeners, are not counted: they delay no one. A request
    enters when it is submitted and leaves once: when it begins, or ends before that.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting = Counter[str]()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Waiting requests of all namespaces."""
        with self._lock:
            return self._waiting.total()

    def enter(self, namespace: str, count: int) -> bool:
        """Admit `count` requests of a namespace, all or none; False when there is no room for them.

        An empty queue admits any number.
        """
        with self._lock:
            total, mine = self._waiting.total(), self._waiting[namespace] + count
            share = max(1, self._limit // len(self._waiting.keys() | {namespace}))
            if total and total + count > self._limit and mine > share:
                return False
            self._waiting[namespace] = mine
            return True

    def leave(self, namespace: str) -> None:
        """Count one admitted request of a namespace out."""
        with self._lock:
            assert self._waiting[namespace] > 0, "more requests left than entered"
            self._waiting[namespace] -= 1
            if not self._waiting[namespace]:
                del self._waiting[namespace]


class Intake:
    """One thread that prepares requests and remembers turns. It waits only for its `inbox`.

    Long prompts are prepared by `workers`, which call back to it to look into memory.

    With `has_tier` every request may wait for the object tier, so all are prepared by workers.

    `preparer`, `memory`, `retention` and `room` (the limit of waiting requests) are the constructor's.
    """

    def __init__(
        self,
        *,
        preparer: RequestBuilder,
        memory: AgentMemory,
        retention: Retention,
        room: AdmissionQueueLimit,
        anticipation: Anticipation | None = None,
        inbox: Inbox | None = None,
        workers: FairWorkers | None = None,
        has_tier: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.preparer = preparer
        self.memory = memory
        self.retention = retention
        self.room = room
        self._anticipation = anticipation
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        most = MOST_IMPORTS if has_tier else MOST_THREADS
        self._long = LongPrompts(workers or FairWorkers("prompts", most=most), has_tier=has_tier)
        self._ended = threading.Event()
        self._rest = threading.Lock()
        self.worker = Worker("intake", self._run, on_death=self._refuse_rest)

    def start(self) -> None:
        """Start the thread; work queued before is done first."""
        self.worker.start()

    def stop(self) -> None:
        """Finish what is queued and join the thread, unless it has died; calling twice is safe."""
        self._long.stop()
        self.preparer.close()
        self._inbox.put(None)
        self.worker.join()
        if self.worker.death is None:
            self._ended.set()
            self._work_off()

    def submit(self, request: GenerationRequest, generations: Sequence[Generation]) -> None:
        """Prepare a request and submit it to the engine, once for each generation; errors arrive through these."""
        if not request.waits_aside and not self._enter(request.namespace, generations):
            return
        submitted = self._clock()

        def refuse(error: RekindleError) -> None:
            for generation in generations:
                generation.put(error)

        if self._long.takes(request):
            self._long.submit(
                request,
                lambda: self._guarded(
                    generations,
                    lambda: self.preparer.prepare(request, generations, submitted, on_memory=self._on_memory),
                ),
            )
        else:
            prepare = partial(self.preparer.prepare, request, generations, submitted, on_memory=_here)
            aside = partial(self._aside, request, generations)
            self._put(Work(lambda: self._guarded(generations, lambda: prepare(aside=aside)), refuse))

    def _aside(
        self, request: GenerationRequest, generations: Sequence[Generation], rest: Callable[[OnMemory], None]
    ) -> None:
        """Let the rest of the preparation run on a thread for long work."""
        self._long.submit(request, lambda: self._guarded(generations, lambda: rest(self._on_memory)))

    def _on_memory(self, work: Callable[[], T], /) -> T:
        """Run `work` on the intake thread and wait for its result. Any other thread."""
        return self.call(work).result()

    def _enter(self, namespace: str, generations: Sequence[Generation]) -> bool:
        """Count the generations as waiting; if too many wait already, fail them and return False."""
        if not self.room.enter(namespace, len(generations)):
            for generation in generations:
                generation.put(Overloaded(f"{self.room.num_waiting} requests wait already", retry_after_s=1.0))
            return False
        for generation in generations:
            generation.on_begin(partial(self.room.leave, namespace))
        return True

    def turn_ended(self, turn: FinishedTurn) -> None:
        """Remember a finished turn (called by the engine before the caller gets the last delta)."""
        if self._anticipation is not None:
            self._anticipation.expect(turn)
        self._put(Work(lambda: self._remember(turn)))

    def _remember(self, turn: FinishedTurn) -> None:
        if self._anticipation is not None:
            self._anticipation.ended(turn)
        self.memory.end_turn(turn)
        self.memory.release_ids()
        self.retention.bound()

    def turn_saved(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Note what the store has made durable."""
        self._put(Work(lambda: self.memory.saved(namespace, agent, branch, num_tokens)))

    def turn_lost(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Note how much of a branch the store still has."""
        self._put(Work(lambda: self.retention.lost(namespace, agent, branch, num_tokens)))

    def run(self, work: Callable[[], None]) -> None:
        """Run something on the intake thread after everything queued before; no caller waits for it."""
        self._put(Work(work))

    def call(self, run: Callable[[], T]) -> Future[T]:
        """Run something on the intake thread after everything queued before."""
        future: Future[T] = Future()

        self._put(Work(lambda: fulfil(future, run), lambda error: fail(future, error)))
        return future

    def _put(self, work: Work) -> None:
        self._inbox.put(work)
        if self.worker.death is not None:
            self._refuse_rest(self.worker.death)
        elif self._ended.is_set():
            self._work_off()

    def _refuse_rest(self, death: Death) -> None:
        """Refuse what the thread can no longer do. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if work is not None:
                    work.refuse(death.error())

    def _work_off(self) -> None:
        """Do the work that came after the thread had ended, one caller at a time, so that none waits forever."""
        with self._rest, contextlib.suppress(queue.Empty):
            while True:
                work = self._inbox.get_nowait()
                if work is not None:
                    self._do(work)

    @staticmethod
    def _guarded(generations: Sequence[Generation], prepare: Callable[[], None]) -> None:
        """Prepare a request that is still wanted; whatever fails, fails for its callers only."""
        if all(generation.cancel_asked for generation in generations):
            error: RekindleError = Cancelled("cancelled before it began")
        else:
            try:
                prepare()
                return
            except RekindleError as refusal:
                error = refusal
            except RecursionError:
                error = BadRequest("the request is nested too deeply")
            except BaseException as failure:
                # Border: a template or tokenizer that fails, even in a panic, ends this request only.
                if is_meant_for_thread(failure):
                    raise
                logger.exception("request %s could not be prepared", generations[0].id)
                error = concealed("the prompt could not be prepared", failure)
        for generation in generations:
            generation.put(error)

    def _fill(self) -> bool:
        try:
            return self.memory.index_one_more()
        except BaseException:
            # Border: a stored branch that cannot be indexed costs its reuse, never the intake.
            logger.exception("a stored branch could not be made findable")
            return True

    def _anticipate(self) -> bool:
        try:
            return self._anticipation is not None and self._anticipation.work()
        except BaseException:
            # Border: what cannot be anticipated is computed when it is requested.
            logger.exception("a next prompt could not be anticipated")
            return True

    def _idle(self) -> float:
        """Forget what is due; return the seconds until there may be more to do."""
        try:
            self.memory.release_ids()
            return self.retention.idle()
        except BaseException:
            # Border: what could not be forgotten stays, the intake continues.
            logger.exception("idle work of the intake failed")
            return EVERY_S

    def _run(self) -> None:
        filling = True
        while True:
            if self.retention.is_due:
                self._idle()
            anticipates = self._anticipation is not None and self._anticipation.has_turns
            try:
                work = self._inbox.get(timeout=LOOK_AGAIN_S) if anticipates else self._inbox.get_nowait()
            except queue.Empty:
                if self._anticipate():
                    continue
                if filling:
                    filling = self._fill()
                    continue
                if anticipates:
                    continue
                try:
                    work = self._inbox.get(timeout=self._idle())
                except queue.Empty:
                    continue
            if work is None:
                return
            self._do(work)
            del work  # it may hold large values, and the next work may come much later

    @staticmethod
    def _do(work: Work) -> None:
        try:
            work.do()
        except BaseException as error:
            # Border: a turn that cannot be remembered costs its reuse, never the intake.
            logger.exception("the intake failed on one item")
            work.refuse(concealed("the intake failed", error))
            if is_meant_for_thread(error):
                raise
