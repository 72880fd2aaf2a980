"""Threads for long work, shared by namespaces so that none waits for another's.

Each namespace has one piece of work running at a time, in order of arrival; namespaces take turns. So the work of one
namespace, however much it is, does not delay another as long as there are threads, and its own requests keep their
order. Threads are started on demand. An exception of the work is set on its future.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rekindle.worker import Death, Worker, fail, fulfil

MOST_THREADS = 4  # namespaces whose work is done at the same moment
T = TypeVar("T")


class FairWorkers:
    """At most `most` threads, named after `name`."""

    def __init__(self, name: str, *, most: int = MOST_THREADS) -> None:
        self._name = name
        self._most = most
        self._queues: OrderedDict[str, deque[tuple[Future[Any], Callable[[], None]]]] = OrderedDict()
        self._busy: set[str] = set()
        self._workers: list[Worker] = []
        self._num_idle = 0
        self._is_stopped = False
        self._changed = threading.Condition()

    def submit(self, namespace: str, work: Callable[[], T]) -> Future[T]:
        """Run the work after all earlier work of its namespace; after `stop`, at once in the caller's thread."""
        future: Future[T] = Future()
        do = partial(fulfil, future, work)
        with self._changed:
            is_queued = not self._is_stopped
            if is_queued:
                self._queues.setdefault(namespace, deque()).append((future, do))
                self._wake()
        if not is_queued:
            do()
        return future

    def stop(self) -> None:
        """Finish what is queued, end the threads and join them; calling twice is safe."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _wake(self) -> None:
        """Wake a waiting thread to look for work, or start a new one if too few wait."""
        num_ready = sum(namespace not in self._busy for namespace in self._queues)
        if num_ready > self._num_idle and len(self._workers) < self._most:
            worker = Worker(f"{self._name}-{len(self._workers)}", self._run, on_death=self._refuse_rest)
            self._workers.append(worker)
            worker.start()
        self._changed.notify()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            namespace, do = taken
            do()
            del taken, do  # it may hold large values, and the next work may come much later
            with self._changed:
                self._busy.discard(namespace)
                if namespace in self._queues:
                    self._queues.move_to_end(namespace)
                if self._queues or self._is_stopped:
                    self._changed.notify_all()

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        """Return the next piece of work, of the namespace whose turn it is; None at the end."""
        with self._changed:
            while (namespace := next((each for each in self._queues if each not in self._busy), None)) is None:
                if self._is_stopped and not self._queues:
                    return None
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            waiting = self._queues[namespace]
            _, do = waiting.popleft()
            if not waiting:
                del self._queues[namespace]
            self._busy.add(namespace)
            return namespace, do

    def _refuse_rest(self, death: Death) -> None:
        """Refuse waiting work after a thread has died, which only a bug of ours can cause."""
        with self._changed:
            futures = [future for queue in self._queues.values() for future, _ in queue]
            self._queues.clear()
        for future in futures:
            fail(future, death.error())

    def check(self) -> None:
        """Assert that every namespace with work has a queue, and none an empty one."""
        with self._changed:
            assert all(self._queues.values()), "an empty queue is kept"
            assert len(self._busy) <= len(self._workers) <= self._most, f"{len(self._workers)} threads"
            assert self._num_idle <= len(self._workers), f"{self._num_idle} of {len(self._workers)} threads are idle"
