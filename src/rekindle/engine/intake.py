"""Before and after the engine: requests become token ids here, finished turns become memories.

Owns the thread on which templates, matching and tokenising run, the matcher and the branch book; the server and the
library use the same one. Work arrives as closures over frozen values and is done in order, so a turn that ended is
known before the next request of its agent is matched. In idle time next prompts are foreseen, the text index is filled
from the store, and what is old or lost is forgotten.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from rekindle.engine.anticipation import Anticipation
from rekindle.engine.generation import Generation
from rekindle.engine.memory import AgentMemory
from rekindle.engine.preparing import Preparer
from rekindle.engine.request import FinishedTurn
from rekindle.engine.retention import EVERY_S, Retention
from rekindle.engine.types import GenerationRequest
from rekindle.engine.waiting import WaitingRoom
from rekindle.errors import BadRequest, Cancelled, Overloaded, RekindleError, RequestFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")
Inbox = queue.SimpleQueue[Callable[[], None] | None]

# With next prompts to foresee, look this often whether the engine is idle; and not before nothing has come for as long:
# who asks right behind a turn, as agents that talk with each other do, would wait for a step of idle work (60-100 ms).
LOOK_AGAIN_S = 0.02


class Intake:
    """One thread that prepares requests and remembers turns. It waits for nothing but its `inbox`."""

    def __init__(
        self,
        *,
        preparer: Preparer,
        memory: AgentMemory,
        retention: Retention,
        room: WaitingRoom,
        anticipation: Anticipation | None = None,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._preparer = preparer
        self._memory = memory
        self._retention = retention
        self._room = room
        self._anticipation = anticipation
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._ended = threading.Event()
        self._rest = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="rekindle-intake", daemon=True)

    def start(self) -> None:
        """Begin working; what was queued before is done first."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is queued and end the thread; calling twice is safe."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._ended.set()
        self._work_off()

    def submit(self, request: GenerationRequest, generations: Sequence[Generation]) -> None:
        """Prepare a request and hand it to the engine, once for each generation; what is wrong arrives through them."""
        if not request.waits_aside and not self._enter(generations):
            return
        submitted = self._clock()
        self._put(lambda: self._prepare(request, generations, submitted))

    def _enter(self, generations: Sequence[Generation]) -> bool:
        """Have them wait with the others; False where too many do, which they are told."""
        if not self._room.enter(len(generations)):
            for generation in generations:
                generation.put(Overloaded(f"{self._room.num_waiting} requests wait already", retry_after_s=1.0))
            return False
        for generation in generations:
            generation.on_begin(self._room.leave)
        return True

    def turn_ended(self, turn: FinishedTurn) -> None:
        """Remember a finished turn (called by the engine before the caller hears of the end)."""
        if self._anticipation is not None:
            self._anticipation.expect(turn)
        self._put(lambda: self._remember(turn))

    def _remember(self, turn: FinishedTurn) -> None:
        if self._anticipation is not None:
            self._anticipation.ended(turn)
        self._memory.end_turn(turn)
        self._memory.let_go()
        self._retention.bound()

    def turn_saved(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Note what the store has made durable."""
        self._put(lambda: self._memory.saved(namespace, agent, branch, num_tokens))

    def turn_lost(self, namespace: str, agent: str, branch: int, num_tokens: int) -> None:
        """Note what the store has left of a branch."""
        self._put(lambda: self._retention.lost(namespace, agent, branch, num_tokens))

    def run(self, work: Callable[[], None]) -> None:
        """Do something on the intake thread, after all that was queued before; nobody waits for it."""
        self._put(work)

    def call(self, run: Callable[[], T]) -> Future[T]:
        """Run something on the intake thread, after all that was queued before."""
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(run())
            except Exception as error:
                # Border: the error belongs to whoever waits on the future.
                future.set_exception(error)

        self._put(answer)
        return future

    def _put(self, work: Callable[[], None]) -> None:
        self._inbox.put(work)
        if self._ended.is_set():
            self._work_off()

    def _work_off(self) -> None:
        """Do what came after the thread had ended, one caller at a time: nobody is to wait for ever."""
        with self._rest:
            while True:
                try:
                    work = self._inbox.get_nowait()
                except queue.Empty:
                    return
                if work is not None:
                    self._do(work)

    def _prepare(self, request: GenerationRequest, generations: Sequence[Generation], submitted: float) -> None:
        if all(generation.cancel_asked for generation in generations):
            error: RekindleError = Cancelled("cancelled before it began")
        else:
            try:
                self._preparer.prepare(request, generations, submitted)
                return
            except RekindleError as refusal:
                error = refusal
            except RecursionError:
                error = BadRequest("the request is nested too deeply")
            except Exception as failure:
                # Border: a template or tokenizer that fails ends this request only.
                logger.exception("request %s could not be prepared", generations[0].id)
                error = RequestFailed(f"the prompt could not be prepared: {failure}")
        for generation in generations:
            generation.put(error)

    def _fill(self) -> bool:
        try:
            return self._memory.index_one_more()
        except Exception:
            # Border: a stored branch that cannot be taken in costs its reuse, never the intake.
            logger.exception("a stored branch could not be made findable")
            return True

    def _anticipate(self) -> bool:
        try:
            return self._anticipation is not None and self._anticipation.work()
        except Exception:
            # Border: what cannot be foreseen is computed when it is asked for.
            logger.exception("a next prompt could not be foreseen")
            return True

    def _idle(self) -> float:
        """Forget what is due to be forgotten; the seconds until there may be more to do."""
        try:
            self._memory.let_go()
            return self._retention.idle()
        except Exception:
            # Border: what could not be forgotten stays, the intake goes on.
            logger.exception("idle work of the intake failed")
            return EVERY_S

    def _run(self) -> None:
        filling = True
        while True:
            foresees = self._anticipation is not None and self._anticipation.has_turns
            try:
                work = self._inbox.get(timeout=LOOK_AGAIN_S) if foresees else self._inbox.get_nowait()
            except queue.Empty:
                if self._anticipate():
                    continue
                if filling:
                    filling = self._fill()
                    continue
                if foresees:
                    continue
                try:
                    work = self._inbox.get(timeout=self._idle())
                except queue.Empty:
                    continue
            if work is None:
                return
            self._do(work)

    @staticmethod
    def _do(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # Border: a turn that cannot be remembered costs its reuse, never the intake.
            logger.exception("the intake failed on one item")
