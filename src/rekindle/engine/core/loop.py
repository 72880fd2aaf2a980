"""The engine thread: messages in, steps out.

Owns the thread and its inbox. Other threads reach the core through `submit`, `wake`, `report_load`, `save` and `call`;
an idle engine thread sleeps on the inbox, without a pool of threads. A step or a message that fails in any way ends the
current requests; if the thread itself dies, waiting callers get an error at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.save_queue import refuse
from rekindle.engine.core.background import IdleWork
from rekindle.engine.core.interface import Core
from rekindle.engine.request import Request
from rekindle.errors import RekindleError, RequestFailed
from rekindle.store.commands import StoreCommand
from rekindle.worker import Death, Worker, concealed, fail, fulfil

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Poll interval while blocks wait for room in the staging buffer.
_SAVE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class _LoadReport:
    load: Load
    num_good: int


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[Core], Any]
    future: Future[Any]


class _Wake:
    """Wakes the loop: a cancel flag was set, or the thread should stop."""


Message = Request | IdleWork | StoreCommand | _LoadReport | _Call | _Wake
Inbox = queue.SimpleQueue[Message]


class EngineLoop:
    """Runs one core on its own thread, started by `start`."""

    def __init__(self, *, check_when_idle: bool, inbox: Inbox | None = None) -> None:
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
        self._core: Core | None = None
        self.worker = Worker("engine", self._run, on_death=self._fail_rest)
        self._stopping = threading.Event()
        self._refusing = threading.Event()
        self._ended = threading.Event()
        self._check_when_idle = check_when_idle

    def start(self, core: Core) -> None:
        """Start the thread, which owns the core from now on."""
        self._core = core
        self.worker.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self.worker.is_alive

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait in the engine, not counting idle work and its inbox. Any thread."""
        return self._core is not None and bool(self._core.scheduler.everybody())

    def submit(self, work: Request | IdleWork) -> None:
        """Submit a request, which gets an error if the loop has ended, or idle work."""
        self._put(work)

    def wake(self) -> None:
        """Make a sleeping loop look at its requests again."""
        self._put(_Wake())

    def report_load(self, load: Load, num_good: int) -> None:
        """Report that a load has ended. Called by a reader thread."""
        self._put(_LoadReport(load, num_good))

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store after the blocks published so far."""
        self._put(command)

    def call(self, run: Callable[[Core], T]) -> Future[T]:
        """Run a function on the engine thread between two steps; the future fails if the loop has ended."""
        future: Future[T] = Future()
        self._put(_Call(run, future))
        return future

    def _put(self, message: Message) -> None:
        self._inbox.put(message)
        if self.worker.death is not None:
            self._refuse_rest(self.worker.death.error())
        elif self._ended.is_set():
            self._refuse_rest(RequestFailed("the engine was closed"))

    def _refuse_rest(self, error: RekindleError) -> None:
        """Fail what is in the inbox, so that no caller waits forever. Any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                _refuse(self._inbox.get_nowait(), error)

    def _fail_rest(self, death: Death) -> None:
        """Fail all requests after the thread has died, and pass on to the store what it has room for."""
        error, core = death.error(), self._core
        if core is not None:
            for request in core.scheduler.everybody():
                request.reply.generation.put(error)
        self._refuse_rest(error)
        if core is not None:
            core.cache.saving.close(error)

    def refuse(self) -> None:
        """Fail all current and future requests; saving and calls continue."""
        self._refusing.set()
        self.wake()

    def stop(self) -> None:
        """Fail what is left, end the thread and join it, unless it died; calling twice is safe."""
        self._stopping.set()
        self.wake()
        self.worker.join()

    def _run(self) -> None:
        core = self._core
        assert core is not None
        while not self._stopping.is_set():
            self._drain(core)
            if self._stopping.is_set():
                break
            if self._refusing.is_set():
                core.fail_all(RequestFailed("the engine was closed"))
            try:
                core.step()
            except BaseException as error:
                # Border: a broken invariant ends the current requests, never silently the thread.
                logger.exception("an engine step failed")
                core.fail_all(concealed("the engine failed", error))
        closed = RequestFailed("the engine was closed")
        core.fail_all(closed)
        self._drain(core, wait=False)
        core.fail_all(closed)
        core.cache.saving.close(closed)
        self._ended.set()
        self._refuse_rest(closed)

    def _timeout(self, core: Core) -> float | None:
        """Return how long to sleep: 0 with work to do, briefly with blocks to save, else until a message.

        With requests that nothing wakes, at most until the first deadline.
        """
        if core.has_work:
            return 0.0
        if len(core.cache.saving):
            return _SAVE_POLL_S
        return core.seconds_left()

    def _drain(self, core: Core, *, wait: bool = True) -> None:
        timeout = self._timeout(core) if wait else 0.0
        if timeout is None:
            if self._check_when_idle:
                core.check()
            core.rest()
        try:
            message = self._inbox.get(block=timeout != 0.0, timeout=timeout)
            while True:
                self._receive(core, message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _receive(self, core: Core, message: Message) -> None:
        try:
            self._handle(core, message)
        except BaseException as error:
            # Border: as for a step; the sender of this message also gets the error.
            logger.exception("the engine failed on a message")
            failure = concealed("the engine failed", error)
            _refuse(message, failure)
            core.fail_all(failure)

    @staticmethod
    def _handle(core: Core, message: Message) -> None:
        if isinstance(message, Request | IdleWork):
            core.add(message)
        elif isinstance(message, StoreCommand):
            core.save(message)
        elif isinstance(message, _LoadReport):
            core.finish_load(message.load, message.num_good)
        elif isinstance(message, _Call):
            fulfil(message.future, lambda: message.run(core))


def _refuse(message: Message, error: RekindleError) -> None:
    """Fail a message that will not be handled."""
    if isinstance(message, Request):
        message.reply.generation.put(error)
    elif isinstance(message, _Call):
        fail(message.future, error)
    elif isinstance(message, StoreCommand):
        refuse(message, error)
