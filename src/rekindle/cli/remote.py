"""A client of a running server for the commands: JSON over HTTP, and advice if no server answers.

Owns the server's address (`--url`, else the settings' host and port) and the errors of its requests. `httpx` is
imported once a command asks, not for every `--help`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rekindle.config import ServerSettings, is_loopback
from rekindle.errors import ConfigError, NotFound, RekindleError, RequestFailed

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 120.0  # a purge waits for the disk


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

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON answer.

        Raises Unreachable if no server answers, NotFound for a 404, ConfigError if the key is refused, and
        RekindleError with the server's message otherwise.
        """
        import httpx

        try:
            content = None if body is None else json.dumps(body)
            moves = not is_loopback(self._http.base_url.host)
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
