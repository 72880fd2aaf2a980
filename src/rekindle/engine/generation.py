"""The caller's end of a request: deltas come out, a cancel goes in.

Not tied to a thread: the engine puts deltas, one consumer takes them, synchronously (`for`) or asynchronously
(`async for`). The queue is unbounded, so a slow reader never delays the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

from rekindle.engine.types import ChatResult, Delta, Progress, Report
from rekindle.errors import RequestFailed
from rekindle.model.logprobs import TokenLogprob

_ids = itertools.count(1)
Piece = Delta | Progress
Kind = TypeVar("Kind", bound=Piece)


class Generation:
    """A reply as it is generated. Iterate once, over deltas or also over the `steps` of its prompt; `result()` drains
    what is left and returns the whole.

    `progress` is the last of its prompt, which comes before the first delta (None: it has not begun). `opening` is the
    beginning of the reply that is already in the prompt: a mark that opens its reasoning, and the reply's prefix.
    `prompt_logprobs`, if requested, has one entry for each token of the prompt, None for the first, and is set before
    the first delta.
    """

    def __init__(self) -> None:
        self.id = next(_ids)
        self.prompt_ids: tuple[int, ...] = ()
        self.opening = ""
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.progress: Progress | None = None
        self._items: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None
        self._cancel: Callable[[], None] | None = None
        self._cancel_asked = False
        self._on_begin: Callable[[], None] | None = None
        self._on_report: Callable[[Report], None] | None = None
        self._on_spent: Callable[[int, int], None] | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: Delta | None = None

    def put(self, item: Piece | BaseException) -> None:
        """Add how far the prompt is, the next delta, or the error that ends the reply. Called by the engine."""
        if isinstance(item, Progress):
            self.progress = item
        elif isinstance(item, BaseException) or item.finish_reason is not None:
            self.begin()
        if self._on_report is not None and isinstance(item, Delta) and item.finish_reason and item.report:
            self._on_report(item.report)
        with self._lock:
            self._items.put(item)
            wake = self._wake
        if wake is not None:
            wake()

    def on_begin(self, begun: Callable[[], None]) -> None:
        """Set a callback for when the work on the reply begins, or the reply ends before that; called once."""
        self._on_begin = begun

    def on_report(self, kept: Callable[[Report], None]) -> None:
        """Set a callback that gets the report of the whole reply, before its last delta can be read."""
        self._on_report = kept

    def on_spent(self, count: Callable[[int, int], None]) -> None:
        """Set a callback that gets how many tokens of the prompt were computed and how many generated, once the work
        ends, however it ends."""
        self._on_spent = count

    def spend(self, computed: int, generated: int) -> None:
        """Say what the reply has cost. Called by the engine, before the last item."""
        if self._on_spent is not None:
            self._on_spent(computed, generated)

    def begin(self) -> None:
        """Mark the reply as begun. Called by the engine; only the first call counts."""
        with self._lock:
            begun, self._on_begin = self._on_begin, None
        if begun is not None:
            begun()

    def on_cancel(self, cancel: Callable[[], None]) -> None:
        """Set the callback that stops the work, called at once if already cancelled. Called by the engine."""
        with self._lock:
            self._cancel = cancel
            asked = self._cancel_asked
        if asked:
            cancel()

    def cancel(self) -> None:
        """Stop within a step; the blocks computed so far stay cached. Safe from any thread, also when finished."""
        with self._lock:
            self._cancel_asked = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    @property
    def cancel_asked(self) -> bool:
        """Whether the reply was cancelled."""
        return self._cancel_asked

    def _take(self, item: Piece | BaseException) -> Piece:
        if isinstance(item, BaseException):
            raise item
        if isinstance(item, Progress):
            return item
        self._texts.append(item.text)
        self._token_ids.extend(item.token_ids)
        self._logprobs.extend(item.logprobs)
        if item.finish_reason is not None:
            self._last = item
        return item

    def __iter__(self) -> Iterator[Delta]:
        while self._last is None:
            if isinstance(item := self._take(self._items.get()), Delta):
                yield item

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._arriving(Delta)

    def steps(self) -> AsyncIterator[Piece]:
        """Iterate over all that comes: how far the prompt is after each step of it, the first one as it begins, then
        the deltas."""
        return self._arriving(Delta, Progress)

    async def _arriving(self, *kinds: type[Kind]) -> AsyncIterator[Kind]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no reader is left to wake
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
                if isinstance(piece := self._take(item), kinds):
                    yield piece
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
            self.prompt_logprobs,
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
