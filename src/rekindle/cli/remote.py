"""The running server of a command: which it is, JSON over HTTP to it, and advice if none answers.

Owns the server's address (`--url`, else the settings' host and port) and the errors of its requests. `httpx` is
imported once a command asks, not for every `--help`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rekindle.config import ServerSettings, is_loopback
from rekindle.errors import ConfigError, NotFound, RekindleError, RequestFailed

if TYPE_CHECKING:
    import httpx
import contextlib
from collections.abc import Collection
from dataclasses import dataclass

import typer

from rekindle.config import Settings
from rekindle.errors import StoreLocked
from rekindle.model.short_names import short_name

TIMEOUT_S = 120.0  # a purge waits for the disk
FINDING_S = 5.0  # a server answers this at once, also while it computes
DECIDED_HERE = frozenset({"model", "store", "config"})  # flags that say which server, or nothing of an engine


class Unreachable(RekindleError):
    """No server answers at this address."""


class Remote:
    """One server. Ids in paths are percent-encoded by `agent_path`."""

    def __init__(self, url: str, key: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        from urllib.request import getproxies

        from rekindle.harness.http import connect

        self.url = url.rstrip("/").removesuffix("/v1")
        self._access: dict[str, Any] = {"api_key": key, "timeout_s": timeout_s, "proxies": getproxies()}
        self._http = connect(self.url, **self._access)

    @classmethod
    def of(cls, settings: ServerSettings, url: str | None = None, *, timeout_s: float = TIMEOUT_S) -> Remote:
        """The server at `url`, else at the address in these settings; the key is that of the settings."""
        from rekindle.harness.http import url_of

        return cls(url or url_of(settings.host, settings.port), settings.api_key, timeout_s=timeout_s)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | Iterable[bytes] | None = None) -> Any:
        """Send a request, with a JSON body or the pieces of a file, and return the JSON answer.

        Raises Unreachable if no server answers, NotFound for a 404, ConfigError if the key is refused, and
        RekindleError with the server's message otherwise.
        """
        import httpx

        try:
            content = json.dumps(body) if isinstance(body, Mapping) else body
            moves = not is_loopback(self._http.base_url.host) and (body is None or isinstance(body, Mapping))
            response = self._http.request(method, path, content=content, follow_redirects=moves)
        except httpx.HTTPError as error:
            raise _unreachable(self.url, error) from error
        if not response.is_success:
            raise _refusal(response, self.url)
        try:
            return response.json()
        except ValueError as error:
            raise RekindleError(f"{self.url}{path} answers, but not in JSON: is it a Rekindle server?") from error

    @contextmanager
    def download(self, path: str) -> Iterator[Iterator[bytes]]:
        """Get a file and yield its bytes, piece by piece; raises what `streaming` does."""
        import httpx

        try:
            with self._http.stream("GET", path) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response, self.url)
                yield response.iter_raw()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(self.url, error) from error
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error

    @contextmanager
    def streaming(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Iterator[Iterator[tuple[str, Any]]]:
        """Post a request and yield the events of its answer; leaving ends the request.

        Raises what `ask` does, and RequestFailed if the connection breaks in the middle.
        """
        import httpx

        from rekindle.harness.http import events

        try:
            with self._http.stream("POST", path, content=json.dumps(body), headers=headers) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response, self.url)
                yield events(response)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(self.url, error) from error
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error

    async def streaming_async(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[tuple[str, Any], None]:
        """Post a request and yield the events of its answer, as `streaming` does; closing it ends the request."""
        import httpx

        from rekindle.harness.http import connect_async, events_async

        try:
            async with (
                connect_async(self.url, **self._access) as http,
                http.stream("POST", path, content=json.dumps(body)) as response,
            ):
                if not response.is_success:
                    await response.aread()
                    raise _refusal(response, self.url)
                async for event in events_async(response):
                    yield event
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(self.url, error) from error
        except httpx.HTTPError as error:
            raise _broken(self.url, error) from error


def _unreachable(url: str, error: Exception) -> Unreachable:
    return Unreachable(
        f"no server answers at {url} ({error}): start one with `rekindle serve`, or name another by --url"
    )


def _broken(url: str, error: Exception) -> RequestFailed:
    return RequestFailed(f"the server at {url} went away in the middle of its answer ({error}); is it still running?")


def agent_path(agent: str, *rest: str) -> str:
    """`/v1/agents/ID/...` with the id percent-encoded, dots too: ".." is an id."""
    return "/".join(("/v1/agents", quote(agent, safe="").replace(".", "%2E"), *rest))


def _refusal(response: httpx.Response, url: str) -> RekindleError:
    code = response.status_code
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{code} {response.reason_phrase}"
    if code == 404:
        return NotFound(message)
    if code in (401, 403):
        return ConfigError(f"{url}: {message} (the key is read from REKINDLE_API_KEY)")
    return RekindleError(f"{url}: {message}")


# Which running server has the store, for commands that otherwise load a model themselves.
#
# Owns the rule: a server is used if `--url` names it, or if it answers at the address of the settings, its process has
# a store in the settings' directory open, and it serves the model that was asked for. What such a command is given and
# only the server could honour is refused. Imports no torch, so that the answer is there at once.


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
