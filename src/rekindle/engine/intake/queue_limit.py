"""How many requests have been asked for and not begun, of which namespace, and that they are not more than may wait.

Together they are `limit` at most. Where one namespace fills the room, another comes in all the same as long as it has
less than its share, the limit divided by the namespaces that wait, itself included: what k namespaces have waiting
stays below limit * (1 + 1/2 + … + 1/k).

Those that wait aside, as what listeners of sessions take in does, are not counted here: they are in nobody's way.
Safe from any thread. A request enters when it is asked for and leaves once: when it begins, or ends before that.
"""

from __future__ import annotations

import threading
from collections import Counter


class AdmissionQueueLimit:
    """A count for each namespace, and a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting = Counter[str]()
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Requests of all namespaces."""
        with self._lock:
            return self._waiting.total()

    def enter(self, namespace: str, count: int) -> bool:
        """Let `count` requests of a namespace in, all or none; False when there is no room for them.

        Into an empty room everybody comes, however small it is.
        """
        with self._lock:
            total, mine = self._waiting.total(), self._waiting[namespace] + count
            share = max(1, self._limit // len(self._waiting.keys() | {namespace}))
            if total and total + count > self._limit and mine > share:
                return False
            self._waiting[namespace] = mine
            return True

    def leave(self, namespace: str) -> None:
        """One of a namespace's requests that came in is out."""
        with self._lock:
            assert self._waiting[namespace] > 0, "more went out than came in"
            self._waiting[namespace] -= 1
            if not self._waiting[namespace]:
                del self._waiting[namespace]
