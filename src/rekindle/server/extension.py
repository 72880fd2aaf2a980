"""What another distribution adds to the server: routes, files of the page, and state that is closed with the server.

Its function in the entry point group `rekindle.server` is called once for an application.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fastapi import APIRouter
from pydantic import BaseModel

from rekindle.config import ServerSettings
from rekindle.engine.api import Engine
from rekindle.extensions import extensions, load
from rekindle.server.gate.limits import ShutdownGate
from rekindle.server.observers.log import RequestLog
from rekindle.server.observers.observer import Observer


@dataclass(frozen=True, slots=True)
class Context:
    """What routes are made from. `observers` follow requests, and `log` writes their lines; `clock` is wall time.

    `forget_receipts` deletes the receipts of these answers of a namespace; StoreError if the disk refuses.
    """

    engine: Engine
    settings: ServerSettings
    gate: ShutdownGate
    log: RequestLog
    observers: tuple[Observer, ...]
    forget_receipts: Callable[[str, Collection[str]], None]
    clock: Callable[[], float]


class State(Protocol):
    """What an extension keeps, on the event loop of one application."""

    async def check_forgettable(self, agent: str) -> None:
        """Raise StoreError, worded for the request that deletes the agent, if `forget` would fail. Deletes nothing."""

    async def forget(self, namespace: str, agent: str) -> tuple[str, ...]:
        """Delete what is kept of an agent; return the ids of sessions in which it still takes part. StoreError if its
        file refuses: calling again continues."""

    def problems(self) -> tuple[str, ...]:
        """Problems to report to the operator."""

    async def close(self) -> None:
        """Stop what runs and close files. Closing twice is safe."""


@dataclass(frozen=True, slots=True)
class Extension:
    """One distribution's part of an application.

    `events`: models of streams that its routes describe themselves. `page`: a folder of files for the page, of which
    NAME.html is the view, an element with the id NAME-view, and NAME.js exports `show`, `open` and `leave`.
    """

    name: str
    router: APIRouter
    state: State
    events: tuple[type[BaseModel], ...] = ()
    page: Path | None = None


def extended(context: Context) -> tuple[Extension, ...]:
    """Make the extensions that are installed; ConfigError if one does not fit this version."""
    return tuple(load(point)(context) for point in extensions("rekindle.server"))
