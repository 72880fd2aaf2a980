"""Threads for work that takes long, shared by namespaces so that none waits for another's.

Of each namespace one piece of work is done at a time, in the order in which it came; namespaces take turns. So what one
of them asks, however much it is, holds up nobody else as long as there are threads, and its own requests keep their
order. Threads are started when they are needed. What work raises is its future's.
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
    """At most `most` threads; `name` is theirs."""

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
        """Do the work after all that its namespace asked for before; after the end at once, by the caller."""
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
        """Do what is queued, end the threads and wait for them; calling twice is safe."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _wake(self) -> None:
        """Have somebody look for work: a thread that waits, or a new one where too few do."""
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
            del taken, do  # what it holds may be large, and the next may be long in coming
            with self._changed:
                self._busy.discard(namespace)
                if namespace in self._queues:
                    self._queues.move_to_end(namespace)
                if self._queues or self._is_stopped:
                    self._changed.notify_all()

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        """The next piece of work, of the namespace whose turn it is; None at the end."""
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
        """A thread has died, which only an error of ours can do: what waits is refused."""
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
