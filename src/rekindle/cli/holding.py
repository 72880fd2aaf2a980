"""Which running server has the store, for commands that otherwise load a model themselves.

Owns the rule: a server is used if `--url` names it, or if it answers at the address of the settings, its process has a
store in the settings' directory open, and it serves the model that was asked for. What such a command is given and only
the server could honour is refused. Imports no torch, so that the answer is there at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import typer

from rekindle.cli.remote import Remote
from rekindle.config import Settings
from rekindle.errors import ConfigError, NotFound, RekindleError, StoreLocked
from rekindle.model.short_names import short_name

FINDING_S = 5.0  # a server answers this at once, also while it computes
DECIDED_HERE = frozenset({"model", "store", "config"})  # flags that say which server, or nothing of an engine


@dataclass(frozen=True, slots=True)
class Held:
    """A server that is used, and the entry of /v1/models of what it serves."""

    server: Remote
    model: Mapping[str, Any]


def find_server(settings: Settings, flags: Collection[str], url: str | None) -> Held | None:
    """Return the server at `url`, else the one that has the store; None if the model is to be loaded here.

    `flags`: the names of the settings that were given to the command. Says so where a process has the store open and no
    server of its answers at the settings' address. Raises Unreachable if `url` does not answer, ConfigError for a key
    that is missing or refused and for flags that the server decides, NotFound for a model that the server at `url` does
    not have.
    """
    if url is not None:
        server = Remote.of(settings.server, url)
        entry = _served(server, settings.model.model)
    else:
        holders = _holders(settings)
        if not holders or not _is_at_address(settings, holders):
            if holders:
                typer.echo(_elsewhere(settings, holders), err=True)
            return None
        server = Remote.of(settings.server)
        try:
            entry = _served(server, settings.model.model)
        except NotFound:
            return None
    decided = sorted(set(flags) - (DECIDED_HERE if url is None else DECIDED_HERE - {"store"}))
    if decided:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in decided)
        raise ConfigError(
            f"{names}: the server at {server.url} computes, and decides this: leave it out"
            + ("" if url is not None else ", or choose another --store")
        )
    return Held(server, entry)


@contextlib.contextmanager
def naming_the_server() -> Iterator[None]:
    """Add to the error of a store that is in use what helps where its server runs at another address."""
    try:
        yield
    except StoreLocked as error:
        raise StoreLocked(f"{error}; if that is a server, name it by --url") from error


def _holders(settings: Settings) -> set[str]:
    """The processes that have a store in the directory open."""
    from rekindle.store.admin import holders

    if settings.store.enabled:
        with contextlib.suppress(OSError):  # what is wrong with the directory is said when it is opened
            return holders(settings.store.directory())
    return set()


def _is_at_address(settings: Settings, holders: Collection[str]) -> bool:
    """Whether the server at the settings' address is one of these processes."""
    quick = Remote.of(settings.server, timeout_s=FINDING_S)
    try:
        process = quick.ask("GET", "/health/ready").get("process")
        if process is None:  # only callers with a key see it: this refuses the others
            quick.ask("GET", "/v1/models")
    except ConfigError:
        raise
    except RekindleError:  # nobody answers, or not one of ours, or one that cannot serve now
        return False
    return f"process {process}" in holders


def _elsewhere(settings: Settings, holders: Collection[str]) -> str:
    have = "has" if len(holders) == 1 else "have"
    return (
        f"rekindle: {', '.join(sorted(holders))} {have} a store in {settings.store.directory()} open: if that is a "
        "server at another address, --url uses it at once"
    )


def _served(server: Remote, model: str | None) -> dict[str, Any]:
    """The entry of the served model; NotFound if it is not `model` (None: any)."""
    if model is None:
        found: list[dict[str, Any]] = server.ask("GET", "/v1/models")["data"]
        return found[0]
    short = short_name(model)
    for name in () if short is None else short.names:
        with contextlib.suppress(NotFound):
            return _entry(server, name)
    return _entry(server, model)


def _entry(server: Remote, name: str) -> dict[str, Any]:
    entry: dict[str, Any] = server.ask("GET", f"/v1/models/{quote(name, safe='')}")
    return entry
