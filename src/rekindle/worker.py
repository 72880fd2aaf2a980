"""Worker threads that record why they died, and the error boundary between a thread and its work.

Errors raised by work are passed to its caller, including those that are no `Exception`: a panic of a library written
in Rust, such as tokenizers, derives from `BaseException`, and `KeyboardInterrupt` and `SystemExit` have a special
meaning on the main thread only. So one piece of work fails, never the thread.

An error in a thread's loop itself does end the thread. `Worker.death` then holds the reason, and `on_death`, called
once on the dying thread, fails the work that waits for it. A thread that queues work checks `death` after queueing, so
that no work is left waiting.
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
# Errors that keep their meaning inside coroutines.
MEANT_FOR_THE_LOOP = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, slots=True)
class Death:
    """A thread that ended unexpectedly, and the error that ended it."""

    thread: str
    reason: str

    @property
    def summary(self) -> str:
        """A message that is safe for every client: it omits the error, which may quote a request."""
        return f"the {self.thread} thread has ended; restart the server"

    def __str__(self) -> str:
        return f"the {self.thread} thread has ended: {self.reason}; restart the server"

    def error(self) -> Unavailable:
        """Return the error for work that the thread can no longer do."""
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
        """Start the thread; call once."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end; return at once if it is not running or is the current thread."""
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
            logger.exception("could not fail the work that waits for the %s thread", self.name)


def described(error: BaseException) -> str:
    """Return the type and the message of an error."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def concealed(what: str, error: BaseException) -> RequestFailed:
    """Return a client's error for a failure inside: only its cause has the reason, which may quote a library's state or
    other requests."""
    failure = RequestFailed(f"{what}; the server's log has the reason")
    failure.__cause__ = error
    return failure


def is_meant_for_thread(error: BaseException) -> bool:
    """Whether an error is meant for the current thread, not for the work: Ctrl-C and exit on the main thread."""
    return isinstance(error, KeyboardInterrupt | SystemExit) and threading.current_thread() is threading.main_thread()


def failure_of(error: BaseException) -> Exception:
    """Return an error that may cross threads and coroutines: one that is no Exception becomes a RequestFailed."""
    if isinstance(error, Exception):
        return error
    failure = RequestFailed(described(error))
    failure.__cause__ = error
    return failure


def contained(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap `work` for a worker thread whose result is awaited: errors that are no Exception become RequestFailed.

    Unwrapped, an awaited SystemExit ends the event loop, and a panic passes every handler of a web application.
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
            logger.exception("work on a thread raised an error that is no Exception")
            raise failure_of(error) from error

    return run


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Run the work and set the future's result or exception; do nothing if the future was cancelled."""
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
        # The error's traceback holds this frame. If the frame held the future, both, and the request held by the
        # work, would stay until the garbage collector runs, which may be never: it counts objects, not bytes.
        del future, work


def fail(future: Future[Any], error: Exception) -> None:
    """Set the error on a future whose work will not run; leave one that is done or cancelled unchanged."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)
