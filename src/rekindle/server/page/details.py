"""Agents branch by branch, asked of the engine as they change and no faster than it has time.

One agent costs two questions to the thread that computes and a look at every branch there is, so a page that is left
open must not ask for all of them every other second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo, BranchInfo
from rekindle.errors import NotFound

LOOK_S = 0.2  # of one request; who is not looked at in time is in the next


@dataclass(frozen=True, slots=True)
class _Told:
    """What the engine told of one agent, when it and all of them were as they are here."""

    branches: tuple[BranchInfo, ...]
    info: AgentInfo
    everybody: Sequence[AgentInfo]


class Details:
    """Remembers what the engine told of agents, by namespace. May be asked by any thread."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: dict[str, dict[str, _Told]] = {}

    def of(self, namespace: str, infos: Sequence[AgentInfo]) -> list[AgentInfo]:
        """These agents of one namespace with their branches, as far as they are known by now.

        Those that have changed are asked for first, then those that stood beside somebody who has: what they share may
        have changed, too. One of them at least, and no more after `LOOK_S`.
        """
        with self._lock:
            before = self._namespaces.get(namespace, {})
            known = {info.agent: before[info.agent] for info in infos if info.agent in before}
            self._namespaces[namespace] = known
            changed = [info for info in infos if info.agent not in known or known[info.agent].info != info]
            beside = [info for info in infos if info.agent in known and known[info.agent].info == info]
            beside = [info for info in beside if known[info.agent].everybody != infos]
            deadline = self._clock() + LOOK_S
            for info in (*changed, *beside):
                known[info.agent] = _Told(self._branches(info), info, infos)
                if self._clock() >= deadline:
                    break
            return [
                replace(info, branch_infos=known[info.agent].branches if info.agent in known else ()) for info in infos
            ]

    def _branches(self, info: AgentInfo) -> tuple[BranchInfo, ...]:
        """The agent's branches; none of one that has been forgotten meanwhile."""
        try:
            return self._engine.agent_info(info.agent, namespace=info.namespace).branch_infos
        except NotFound:
            return ()
