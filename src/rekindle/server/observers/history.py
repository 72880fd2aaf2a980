"""The latest requests of each agent, to explain afterwards why one was slow.

Owns a bounded number of requests for a bounded number of agents, the most recently used, and the request numbers. These
count within one namespace since the start, so that they reveal nothing about other tenants. An entry holds the engine's
report, so stored text is in it only if it is the agent's own. In memory only: a restart clears the history.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.engine.recent import MAX_AGENTS, Recent
from rekindle.engine.types import FinishReason, Report
from rekindle.server.border import problem_of
from rekindle.server.gate.caller import Caller
from rekindle.server.lines import CURRENT
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text.messages import Message


class History(Recent[dict[str, Any]]):
    """An observer; its entries may be read from any thread."""

    def __init__(self, *, max_agents: int = MAX_AGENTS, clock: Callable[[], float] = time.time) -> None:
        super().__init__(max_agents=max_agents)
        self._clock = clock
        self._counts: Counter[str] = Counter()

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> HistoryWatch:
        """Follow one request; requests without an agent are not recorded."""
        with self._lock:
            self._counts[caller.namespace] += 1
            number = self._counts[caller.namespace]
        line = CURRENT.get()
        head = {"request": number, "request_id": line and line.request_id, "at": self._clock(), "endpoint": endpoint}
        return HistoryWatch(self, caller, head)


class HistoryWatch(RequestWatch):
    """Records one entry per choice, or one for the failure."""

    def __init__(self, history: History, caller: Caller, head: Mapping[str, Any]) -> None:
        self._history = history
        self._caller = caller
        self._head = head

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Record the report, and where its receipt is; None for what has none."""
        receipt, choice = (None, None) if id is None else (id.receipt(self._head["request_id"]), id.choice)
        where = {"receipt": receipt, "choice": choice}
        self._add({**report.as_dict(), "finish_reason": reason, "error": None, **where})

    def failed(self, number: int | None, error: Exception) -> None:
        """Record the error that the client received."""
        problem = problem_of(error)
        described = {"status": problem.status, "message": problem.message, "param": problem.param, "code": problem.code}
        self._add({"finish_reason": None, "error": described})

    def _add(self, entry: dict[str, Any]) -> None:
        if self._caller.agent is not None:
            self._history.add(self._caller.namespace, self._caller.agent, {**self._head, **entry})
