"""The caller's end of a request: deltas come out, a cancel goes in.

Owned by nobody's thread: the engine puts deltas, one consumer takes them, synchronously (`for`) or asynchronously
(`async for`). The queue is unbounded because a reply is; a slow reader never holds the engine up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from rekindle.engine.types import ChatResult, Delta, Progress, Report
from rekindle.errors import RequestFailed
from rekindle.model.logprobs import TokenLogprob

_ids = itertools.count(1)


class Generation:
    """A reply as it comes. Iterate once; `result()` drains what is left and returns the whole.

    `progress` is set by the engine while the prompt is computed (None: it has not begun). `opening` is what the prompt
    has begun of the reply already: a mark that opens its thinking, and the reply's prefix.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.prompt_ids: tuple[int, ...] = ()
        self.opening = ""
        self.progress: Progress | None = None
        self._items: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self._cancel: Callable[[], None] | None = None
        self._cancel_asked = False
        self._on_begin: Callable[[], None] | None = None
        self._on_report: Callable[[Report], None] | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def put(self, item: Delta | BaseException) -> None:
        """Called by the engine: the next delta, or the error that ends the reply."""
        if isinstance(item, BaseException) or item.finish_reason is not None:
            self.begin()
        if self._on_report is not None and isinstance(item, Delta) and item.finish_reason and item.report:
            self._on_report(item.report)
        with self._lock:
            self._items.put(item)
            wake = self._wake
        if wake is not None:
            wake()

    def on_begin(self, begun: Callable[[], None]) -> None:
        """Have `begun` called once: when the work on the reply begins, or it ends before."""
        self._on_begin = begun

    def on_report(self, kept: Callable[[Report], None]) -> None:
        """Have `kept` called with the report of the whole reply, before its last delta can be read."""
        self._on_report = kept

    def begin(self) -> None:
        """Called by the engine: the reply waits no longer. Only the first call counts."""
        with self._lock:
            begun, self._on_begin = self._on_begin, None
        if begun is not None:
            begun()

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Called by the engine: what stops the work; called at once if cancelling was asked before."""
        with self._lock:
            self._cancel = cancel
            asked = self._cancel_asked
        if asked:
            cancel()

    def cancel(self) -> None:
        """Stop within a step; the blocks computed so far are kept. Safe from any thread, also when finished."""
        with self._lock:
            self._cancel_asked = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    @property
    def cancel_asked(self) -> bool:
        """Whether somebody no longer wants the reply."""
        return self._cancel_asked

    def _take(self, item: Delta | BaseException) -> Delta:
        if isinstance(item, BaseException):
            raise item
        self._texts.append(item.text)
        self._token_ids.extend(item.token_ids)
        self._logprobs.extend(item.logprobs)
        if item.finish_reason is not None:
            self._last = item
        return item

    def __iter__(self) -> Iterator[Delta]:
        while self._last is None:
            yield self._take(self._items.get())

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be woken
                loop.call_soon_threadsafe(arrived.set)

        with self._lock:
            self._wake = wake
        while self._last is None:
            arrived.clear()
            while self._last is None:
                try:
                    item = self._items.get_nowait()
                except queue.Empty:
                    break
                yield self._take(item)
            if self._last is None:
                await arrived.wait()

    def _result(self) -> ChatResult:
        last = self._last
        if last is None or last.finish_reason is None or last.report is None:
            raise RequestFailed("the reply ended without a finish reason")
        return ChatResult(
            "".join(self._texts),
            tuple(self._token_ids),
            last.finish_reason,
            last.report,
            self.prompt_ids,
            tuple(self._logprobs),
        )

    def result(self) -> ChatResult:
        """Wait for the end and return the whole reply; raises what ended it."""
        for _ in self:
            pass
        return self._result()

    async def aresult(self) -> ChatResult:
        """As `result`, without blocking the event loop."""
        async for _ in self:
            pass
        return self._result()
