"""Agents as files over HTTP: exported as a stream, imported from a body that is put aside on the store's disk first.

A namespace has one import under way, of at most its part of the store's bytes, so that no tenant fills the disk. The
file that is put aside has no name: nothing of it is left if the server is killed. What is encrypted stays so until a
client has opened it: no passphrase is sent to a server.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import RawIOBase
from typing import Annotated, Any, BinaryIO, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from rekindle.agent_ids import check_new_agent_id
from rekindle.config import ServerSettings
from rekindle.engine.agent_files import Kv
from rekindle.engine.api import Engine
from rekindle.errors import Conflict, StoreError, StoreRefused
from rekindle.server.agents.routes import PREFIX, Agent, AgentEntry, described
from rekindle.server.border import Router, in_thread
from rekindle.server.gate.caller import Namespace
from rekindle.server.gate.limits import to_file

MEDIA_TYPE = "application/vnd.rekindle.agent"
BODY = {  # of an import, whatever its Content-Type says
    "required": True,
    "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
}


class ImportedEntry(AgentEntry):
    """The new agent, and how many tokens of its longest branch have their KV here: the next turn computes the rest."""

    kv_tokens: int
    without_kv: str | None


class _Uploads:
    """Files on their way in, at most one of a namespace."""

    def __init__(self, engine: Engine, num_tenants: int) -> None:
        self._engine = engine
        self._num_tenants = num_tenants
        self._under_way: set[str] = set()

    def most_bytes(self) -> int:
        """Return how large a file may be; StoreError without a store."""
        store = self._engine.stats().store
        if store is None:
            raise StoreError("without a store agents are not imported: start the server with one")
        most: int = store["disk_bytes"]
        return most // self._num_tenants

    @contextmanager
    def aside(self, namespace: str) -> Iterator[RawIOBase]:
        """Open a file without a name in the store's directory; Conflict if the namespace has one already."""
        if namespace in self._under_way:
            raise Conflict("another agent is being imported in this namespace: try again when that is done")
        with ExitStack() as opened:
            self._under_way.add(namespace)
            opened.callback(self._under_way.discard, namespace)
            try:
                # Without a buffer, of which a disk that is full would refuse the rest once more as the file is closed.
                directory = self._engine.settings.store.directory()
                file = opened.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0))
            except OSError as error:
                raise StoreRefused(f"the file cannot be taken, and nothing has changed: {error}") from error
            yield file


def _again(file: RawIOBase) -> Callable[[], BinaryIO]:
    """Return what opens a file at its start."""

    def opened() -> BinaryIO:
        file.seek(0)
        return cast("BinaryIO", os.fdopen(os.dup(file.fileno()), "rb"))

    return opened


def files_router(engine: Engine, settings: ServerSettings) -> APIRouter:
    """The routes of agents' files; plain functions run in worker threads."""
    router = Router(prefix=PREFIX, tags=["agents"])
    uploads = _Uploads(engine, len(settings.namespaces()))

    @router.get("/{id}/export", response_class=StreamingResponse)
    def export_agent(agent: Agent, namespace: Namespace) -> StreamingResponse:
        """The agent as a file: its texts and their KV, as a stream. A file that ends early is refused by an import."""
        return StreamingResponse(engine.agent(agent, namespace=namespace).export(), media_type=MEDIA_TYPE)

    @router.post("/{id}/import", response_model=ImportedEntry, openapi_extra={"requestBody": BODY})
    async def import_agent(
        request: Request,
        agent: Agent,
        namespace: Namespace,
        kv: Annotated[Kv, Query(description="`off`: texts alone, so that all KV is computed here")] = "same_model",
    ) -> dict[str, Any]:
        """Make a new agent from the file in the body. A 400 says what is wrong with it, and nothing has changed.

        Its KV comes along if the same model has computed it in the same form, else its texts alone, as `without_kv`
        says; with `kv=off` always.
        """
        handle = engine.agent(check_new_agent_id(agent, where="id"), namespace=namespace)
        most = await in_thread(uploads.most_bytes)
        with uploads.aside(namespace) as file:
            await to_file(request, file, most=most, timeout_s=settings.read_timeout_s)
            imported = await in_thread(handle.import_file, _again(file), kv=kv)
        info = await in_thread(handle.info)
        return described(info, kv_tokens=imported.kv_tokens, without_kv=imported.without_kv)

    return router
