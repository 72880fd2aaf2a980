"""The last entries of each agent, in memory: a bounded number of them, for a bounded number of agents."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_ENTRIES = 8
MAX_AGENTS = 1024


class Recent(Generic[T]):
    """The last MAX_ENTRIES of the `max_agents` agents that asked last. Any thread may ask."""

    def __init__(self, *, max_agents: int = MAX_AGENTS) -> None:
        self._max_agents = max_agents
        self._lock = threading.Lock()
        self._agents: OrderedDict[tuple[str, str], deque[T]] = OrderedDict()

    def of(self, namespace: str, agent: str) -> list[T]:
        """The agent's last entries, the newest first."""
        with self._lock:
            return list(reversed(self._agents.get((namespace, agent), ())))

    def forget(self, namespace: str, agent: str) -> None:
        """Drop what is known of an agent; of one that is not known: nothing."""
        with self._lock:
            self._agents.pop((namespace, agent), None)

    def add(self, namespace: str, agent: str, entry: T) -> None:
        """Keep one more entry; the oldest of the agent, or the agent used longest ago, makes room."""
        with self._lock:
            entries = self._agents.setdefault((namespace, agent), deque(maxlen=MAX_ENTRIES))
            entries.append(entry)
            self._agents.move_to_end((namespace, agent))
            if len(self._agents) > self._max_agents:
                self._agents.popitem(last=False)
