"""The engine thread: messages in, steps out.

Owns the thread and its inbox. Whoever is not the engine thread reaches the core through `submit`, `cancel`,
`report_load`, `save` and `call`; while nothing is to be done the thread sleeps on the inbox.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rekindle.engine.core import EngineCore
from rekindle.engine.loads import Load
from rekindle.engine.request import Request
from rekindle.engine.saving import SaveOrder, refuse
from rekindle.errors import RequestFailed

logger = logging.getLogger(__name__)
T = TypeVar("T")
# With blocks waiting for room in the staging buffer, look again this often.
_SAVE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class _LoadReport:
    load: Load
    num_good: int


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[EngineCore], Any]
    future: Future[Any]


class _Wake:
    """Nothing to say but: look again (a cancel flag was set, or the thread is to stop)."""


Message = Request | SaveOrder | _LoadReport | _Call | _Wake


class EngineLoop:
    """Runs one `EngineCore` on a thread of its own, started by `start`."""

    def __init__(self, *, check_when_idle: bool) -> None:
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._refusing = threading.Event()
        self._ended = threading.Event()
        self._check_when_idle = check_when_idle

    def start(self, core: EngineCore) -> None:
        """Begin stepping; the core belongs to the thread from here on."""
        self._core = core
        self._thread = threading.Thread(target=self._run, args=(core,), name="rekindle-engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether steps are taken: it was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait in the engine, idle work and what is still in its inbox aside. Any thread."""
        return self._core is not None and bool(self._core.scheduler.everybody())

    def submit(self, request: Request) -> None:
        """Hand over a request; it gets an error if the loop has ended."""
        self._put(request)

    def wake(self) -> None:
        """Make a sleeping loop look at its requests again."""
        self._put(_Wake())

    def report_load(self, load: Load, num_good: int) -> None:
        """Called by a reader thread when a load has ended."""
        self._put(_LoadReport(load, num_good))

    def save(self, order: SaveOrder) -> None:
        """Queue a sequence for the store, or its end, behind the blocks published so far."""
        self._put(order)

    def call(self, run: Callable[[EngineCore], T]) -> Future[T]:
        """Run a function on the engine thread between two steps; the future fails if the loop has ended."""
        future: Future[T] = Future()
        self._put(_Call(run, future))
        return future

    def _put(self, message: Message) -> None:
        self._inbox.put(message)
        if self._ended.is_set():
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer what reached the inbox too late, so that nobody waits for ever. Any thread."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Request):
                message.generation.put(RequestFailed("the engine was closed"))
            elif isinstance(message, _Call):
                message.future.set_exception(RequestFailed("the engine was closed"))
            elif isinstance(message, SaveOrder):
                refuse(message)

    def refuse(self) -> None:
        """Fail what runs and waits, and all requests from now on; saving and calls go on."""
        self._refusing.set()
        self.wake()

    def stop(self) -> None:
        """Fail what is left with an error, end the thread and wait for it; calling twice is safe."""
        self._stopping.set()
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self, core: EngineCore) -> None:
        while not self._stopping.is_set():
            self._drain(core)
            if self._stopping.is_set():
                break
            if self._refusing.is_set():
                core.fail_all(RequestFailed("the engine was closed"))
            try:
                core.step()
            except Exception as error:
                # Border: a broken invariant ends the requests at hand, never silently the thread.
                logger.exception("an engine step failed")
                core.fail_all(RequestFailed(f"the engine failed: {error}"))
        core.fail_all(RequestFailed("the engine was closed"))
        self._drain(core, wait=False)
        core.fail_all(RequestFailed("the engine was closed"))
        core.cache.saving.close()
        self._ended.set()
        self._refuse_rest()

    def _timeout(self, core: EngineCore) -> float | None:
        """How long to sleep: not at all with work at hand, briefly with blocks to save, else until a message.

        While blocks come from disk for a request that must not take for ever, until its time is up.
        """
        if core.has_work:
            return 0.0
        if len(core.cache.saving):
            return _SAVE_POLL_S
        return core.seconds_left() if core.scheduler.loading else None

    def _drain(self, core: EngineCore, *, wait: bool = True) -> None:
        timeout = self._timeout(core) if wait else 0.0
        if timeout is None and self._check_when_idle:
            core.check()
        try:
            message = self._inbox.get(block=timeout != 0.0, timeout=timeout)
            while True:
                self._handle(core, message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, core: EngineCore, message: Message) -> None:
        if isinstance(message, Request):
            core.add(message)
        elif isinstance(message, SaveOrder):
            core.cache.saving.add(message)
        elif isinstance(message, _LoadReport):
            core.finish_load(message.load, message.num_good)
        elif isinstance(message, _Call):
            try:
                message.future.set_result(message.run(core))
            except Exception as error:
                # Border: the caller of `call` gets its error, the loop goes on.
                message.future.set_exception(error)
