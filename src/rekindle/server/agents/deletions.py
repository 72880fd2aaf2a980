"""Deletes or purges an agent everywhere: its memory in the engine, stored responses, what extensions keep of it.

These are in several files, so the order keeps them consistent. Refusals that can be known in advance are checked first.
The engine comes next; if it refuses, nothing else has changed. If another file then refuses, the error names what is
left, and the agent stays listed (until the server stops) and can be deleted again until all of it is gone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rekindle.engine.api import Engine
from rekindle.engine.types import AgentInfo, PurgeReport
from rekindle.errors import NotFound, StoreError
from rekindle.server.border import in_thread
from rekindle.server.extension import Extension
from rekindle.server.observers.history import History
from rekindle.server.responses.stored import StoredResponses
from rekindle.store.files.directory import remove_set_aside
from rekindle.store.files.sync import OsFileSystem

T = TypeVar("T")
MAX_UNFINISHED = 4096  # partly deleted agents; beyond it the oldest are no longer listed


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was deleted with an agent's memory: stored responses; and sessions in which it still takes part."""

    num_responses: int
    sessions: tuple[str, ...]


class Deletions:
    """Deletes agents of one server; for one event loop. `clock` is wall time."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        responses: StoredResponses,
        extensions: Sequence[Extension],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._history = history
        self._responses = responses
        self._extensions = extensions
        self._clock = clock
        self._unfinished: OrderedDict[tuple[str, str], AgentInfo] = OrderedDict()

    def unfinished(self, namespace: str | None) -> list[AgentInfo]:
        """Agents whose memory is deleted while something else is left; None: of all namespaces. Any thread."""
        found = list(self._unfinished.values())
        return [each for each in found if namespace in (None, each.namespace)]

    async def delete(self, namespace: str, agent: str) -> Forgotten:
        """Delete an agent; raises NotFound, and StoreError, which names what is left."""
        _, forgotten = await self._carry_out(self._engine.agent(agent, namespace=namespace).delete, namespace, agent)
        return forgotten

    async def purge(self, namespace: str, agent: str) -> tuple[PurgeReport, Forgotten]:
        """Delete an agent and prove it. If its memory was already deleted, the report's figures are 0.

        Damaged files of responses and sessions that were set aside may hold what it said, so they are removed.
        """
        store = self._engine.settings.store
        damaged = store.text_files() if store.enabled else ()
        handle = self._engine.agent(agent, namespace=namespace)
        report, forgotten = await self._carry_out(handle.purge, namespace, agent, damaged)
        return report or PurgeReport(agent, 0, 0, 0, 0, 0), forgotten

    async def _carry_out(
        self, forget: Callable[[], T], namespace: str, agent: str, damaged: Sequence[Path] = ()
    ) -> tuple[T | None, Forgotten]:
        key, report, is_known = (namespace, agent), None, True
        self._responses.check_open()
        self._check_extensions(agent)
        for extension in self._extensions:
            await extension.state.check_forgettable(agent)
        try:
            report = await in_thread(forget)
        except NotFound:
            is_known = key in self._unfinished
        if is_known:
            self._note(key)  # until the rest is deleted, even if the caller disconnects
        forgotten = await self._forget_rest(namespace, agent)
        if not is_known and not forgotten.num_responses:
            raise NotFound(f"no agent {agent!r}", param="agent")
        try:
            for path in damaged:
                await in_thread(remove_set_aside, path, OsFileSystem())
        except OSError as error:
            self._note(key)
            message = f"{agent!r} is deleted, but a damaged file that was set aside may hold what it said ({error})"
            raise StoreError(f"{message}: purge it again, or remove the file") from error
        self._unfinished.pop(key, None)
        return report, forgotten

    def _check_extensions(self, agent: str) -> None:
        """Refuse if a file of sessions is there that nothing installed can read; StoreError."""
        path = self._engine.settings.store.sessions_path()
        is_read = any(extension.name == "sessions" for extension in self._extensions)
        if not is_read and path is not None and path.exists():
            raise StoreError(
                f"{agent!r} is not deleted: {path} may hold what it said in sessions, which needs the package "
                "rekindle-sessions; pip install 'rekindle[serve]', or remove the file, then delete it again"
            )

    def _note(self, key: tuple[str, str]) -> None:
        namespace, agent = key
        self._unfinished[key] = AgentInfo(namespace, agent, 0, 0, 0, 0, 0, self._clock(), None)
        while len(self._unfinished) > MAX_UNFINISHED:
            self._unfinished.popitem(last=False)

    async def _forget_rest(self, namespace: str, agent: str) -> Forgotten:
        self._history.forget(namespace, agent)
        left: list[str] = []
        found: list[str] = []
        num_responses = 0
        try:
            for extension in self._extensions:
                found += await extension.state.forget(namespace, agent)
        except StoreError as error:
            left.append(f"what it remembers of sessions ({error})")
        try:
            num_responses = await in_thread(self._responses.forget, namespace, agent)
        except StoreError as error:
            left.append(f"its stored responses ({error})")
        if left:
            raise StoreError(
                f"the memory of {agent!r} is deleted, and there is left: {'; '.join(left)}: delete it again, and all "
                "of it goes"
            )
        return Forgotten(num_responses, tuple(found))
