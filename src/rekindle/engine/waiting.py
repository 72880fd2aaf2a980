"""How many requests have been asked for and not begun, and that it never is more than the engine may keep waiting.

Those that wait aside, as what listeners of sessions take in does, are not counted here: they are in nobody's way.
Safe from any thread. A request enters when it is asked for and leaves once: when it begins, or ends before that.
"""

from __future__ import annotations

import threading


class WaitingRoom:
    """A count with a limit."""

    def __init__(self, limit: int) -> None:
        self.num_waiting = 0
        self._limit = limit
        self._lock = threading.Lock()

    def enter(self, count: int) -> bool:
        """Let `count` requests in, all or none; False when there is no room for them.

        Into an empty room everybody comes, however small it is.
        """
        with self._lock:
            if self.num_waiting and self.num_waiting + count > self._limit:
                return False
            self.num_waiting += count
            return True

    def leave(self) -> None:
        """One of those that came in is out."""
        with self._lock:
            assert self.num_waiting > 0, "more went out than came in"
            self.num_waiting -= 1
