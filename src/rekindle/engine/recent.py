"""The last entries of each agent, in memory: a bounded number, for a bounded number of agents."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ENTRIES = 8
MAX_AGENTS = 1024


class Recent(Generic[T]):
    """The last MAX_ENTRIES entries of the `max_agents` most recently used agents. Any thread."""

    def __init__(self, *, max_agents: int = MAX_AGENTS) -> None:
        self._max_agents = max_agents
        self._lock = threading.Lock()
        self._agents: OrderedDict[tuple[str, str], deque[T]] = OrderedDict()

    def of(self, namespace: str, agent: str) -> list[T]:
        """Return the agent's last entries, the newest first."""
        with self._lock:
            return list(reversed(self._agents.get((namespace, agent), ())))

    def forget(self, namespace: str, agent: str) -> None:
        """Drop an agent's entries; a no-op for an unknown agent."""
        with self._lock:
            self._agents.pop((namespace, agent), None)

    def add(self, namespace: str, agent: str, entry: T) -> None:
        """Add an entry; drop the agent's oldest, or the least recently used agent, to make room."""
        with self._lock:
            entries = self._agents.setdefault((namespace, agent), deque(maxlen=MAX_ENTRIES))
            entries.append(entry)
            self._agents.move_to_end((namespace, agent))
            if len(self._agents) > self._max_agents:
                self._agents.popitem(last=False)
