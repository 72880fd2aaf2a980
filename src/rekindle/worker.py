"""Threads that are alive or say why they ended, and the border between a thread and the work that it is given.

Whatever work raises belongs to its caller, also what is no `Exception`: a panic of a library written in Rust, such
as the tokenizers, derives from `BaseException`, and `KeyboardInterrupt` and `SystemExit` have a meaning of their own on
the main thread only. So one piece of work fails, never the thread.

An error in the code of a thread's loop itself does end it. Then `Worker.death` says why, and `on_death`, called once on
the dying thread, fails what waits for it. A thread that queues work looks at `death` after queueing, so that no work is
left between the two.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from rekindle.errors import RequestFailed, Unavailable

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
# Of what is no Exception, the kinds that keep their meaning inside coroutines.
MEANT_FOR_THE_LOOP = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, slots=True)
class Death:
    """A thread that has ended without being asked to, and the error that ended it."""

    thread: str
    reason: str

    @property
    def summary(self) -> str:
        """Which thread, for everybody: the error itself may quote what somebody sent."""
        return f"the {self.thread} thread has ended; restart the server"

    def __str__(self) -> str:
        return f"the {self.thread} thread has ended: {self.reason}; restart the server"

    def error(self) -> Unavailable:
        """What work gets that the thread can no longer do."""
        return Unavailable(self.summary)


class Worker:
    """One daemon thread that runs `loop` until it returns. `death` is None unless `loop` has raised."""

    def __init__(self, name: str, loop: Callable[[], None], *, on_death: Callable[[Death], None]) -> None:
        self.name = name
        self.death: Death | None = None
        self._loop = loop
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name=f"rekindle-{name}", daemon=True)

    def start(self) -> None:
        """Begin; once only."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end; at once where it was never started or has died, and on the thread itself."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self.death = Death(self.name, described(error))
            try:
                logger.critical("%s", self.death, exc_info=error)
            finally:
                self._fail_what_waits(self.death)

    def _fail_what_waits(self, death: Death) -> None:
        try:
            self._on_death(death)
        except BaseException:
            logger.exception("what waited for the %s thread could not be failed", self.name)


def described(error: BaseException) -> str:
    """The kind of an error and what it says."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def is_meant_for_thread(error: BaseException) -> bool:
    """Whether an error is not the work's but for the thread it was raised on: Ctrl-C and exit on the main thread."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread()


def failure_of(error: BaseException) -> Exception:
    """The error as one that may cross threads and coroutines: what is no Exception becomes a RequestFailed."""
    if isinstance(error, Exception):
        return error
    failure = RequestFailed(described(error))
    failure.__cause__ = error
    return failure


def contained(work: Callable[P, T]) -> Callable[P, T]:
    """`work` for a worker thread whose answer is awaited; raises RequestFailed for what is no Exception.

    As it is, a SystemExit that is awaited ends the event loop, and a panic passes every handler of a web application.
    """

    @functools.wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if is_meant_for_thread(error):
                raise
            logger.exception("work on a thread ended in what is no Exception")
            raise failure_of(error) from error

    return run


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work and answer the future with what came of it; nothing is done for a future that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        answer = work()
    except BaseException as error:
        future.set_exception(failure_of(error))
        if is_meant_for_thread(error):
            raise
    else:
        future.set_result(answer)
    finally:
        # The error's traceback holds this frame. With the future in it the two, and the request that the work knows,
        # would stay until the garbage collector looks, which may be never: it counts objects, not bytes.
        del future, work


def fail(future: Future[Any], error: Exception) -> None:
    """Answer a future that nobody will do the work of; one that was answered or cancelled is left as it is."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)
