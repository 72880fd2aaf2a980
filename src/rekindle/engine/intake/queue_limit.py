"""Admission queue limit: how many requests of each namespace wait to begin, and when to refuse more.

In total `limit` may wait. If one namespace fills the queue, another is still admitted as long as it has less than its
share, the limit divided by the namespaces that wait, itself included: the requests of k namespaces together stay below
limit * (1 + 1/2 + … + 1/k).

Requests with `waits_aside`, such as prefills for session listeners, are not counted here: they delay no one. Safe from
any thread. A request enters when it is submitted and leaves once: when it begins, or ends before that.
"""

from __future__ import annotations

import threading
from collections import Counter


class AdmissionQueueLimit:
    """Counts of waiting requests by namespace, and a limit."""

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
