"""Agents' branches, queried from the engine as they change, within a time limit per request.

Querying one agent costs two calls to the engine thread and a scan of every branch, so an open page must not query all
agents every other second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo, BranchInfo
from rekindle.errors import NotFound

LOOK_S = 0.2  # of one request; agents not queried in time are queried in the next


@dataclass(frozen=True, slots=True)
class _Known:
    """One agent's branches, with its info and that of all agents at the time of the query."""

    branches: tuple[BranchInfo, ...]
    info: AgentInfo
    all_infos: Sequence[AgentInfo]


class Details:
    """Caches the engine's answers about agents, by namespace. May be called from any thread."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, _Known]] = {}

    def of(self, namespace: str, infos: Sequence[AgentInfo]) -> list[AgentInfo]:
        """Return these agents of one namespace with their branches, as far as they are known by now.

        Changed agents are queried first, then unchanged ones if any agent changed: what they share may have changed
        too. At least one is queried, and none after `LOOK_S`.
        """
        with self._lock:
            before = self._namespaces.get(namespace, {})
            known = {info.agent: before[info.agent] for info in infos if info.agent in before}
            self._namespaces[namespace] = known
            changed = [info for info in infos if info.agent not in known or known[info.agent].info != info]
            unchanged = [info for info in infos if info.agent in known and known[info.agent].info == info]
            stale = [info for info in unchanged if known[info.agent].all_infos != infos]
            deadline = self._clock() + LOOK_S
            for info in (*changed, *stale):
                known[info.agent] = _Known(self._branches(info), info, infos)
                if self._clock() >= deadline:
                    break
            return [
                replace(info, branch_infos=known[info.agent].branches if info.agent in known else ()) for info in infos
            ]

    def _branches(self, info: AgentInfo) -> tuple[BranchInfo, ...]:
        """The agent's branches; empty if it was deleted meanwhile."""
        try:
            return self._engine.agent_info(info.agent, namespace=info.namespace).branch_infos
        except NotFound:
            return ()
