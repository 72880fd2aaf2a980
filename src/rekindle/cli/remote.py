"""A client of a running server for the commands: JSON over HTTP, and advice if no server answers.

Owns the server's address (`--url`, else the settings' host and port) and the errors of its requests.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from rekindle.config import ServerSettings, is_loopback
from rekindle.errors import ConfigError, NotFound, RekindleError

TIMEOUT_S = 120.0  # a purge waits for the disk
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to reach a server that listens everywhere


class Unreachable(RekindleError):
    """No server answers at this address."""


class Remote:
    """One server. Ids in paths are percent-encoded by `agent_path`."""

    def __init__(self, url: str, key: str | None, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: write it as http://host:port")
        self._timeout_s = timeout_s
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        # Proxies apply to other machines only.
        proxies = [urllib.request.ProxyHandler({})] if is_loopback(parts.hostname) else []
        self._opener = urllib.request.build_opener(*proxies)

    @classmethod
    def of(cls, settings: ServerSettings, url: str | None = None, *, timeout_s: float = TIMEOUT_S) -> Remote:
        """The server at `url`, else at the address in these settings; the key is that of the settings."""
        host = ANY_ADDRESS.get(settings.host, settings.host)
        url = url or f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
        return cls(url, settings.api_key, timeout_s=timeout_s)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON answer.

        Raises Unreachable if no server answers, NotFound for a 404, ConfigError if the key is refused, and
        RekindleError with the server's message otherwise.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers, method=method)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            raise _refusal(error, self.url) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise Unreachable(
                f"no server answers at {self.url} ({reason}): start one with `rekindle serve`, or name another by --url"
            ) from error
        except ValueError as error:
            raise RekindleError(f"{self.url}{path} answers, but not in JSON: is it a Rekindle server?") from error


def agent_path(agent: str, *rest: str) -> str:
    """`/v1/agents/ID/...` with the id percent-encoded."""
    return "/".join(("/v1/agents", quote(agent, safe=""), *rest))


def _refusal(error: urllib.error.HTTPError, url: str) -> RekindleError:
    body = error.read().decode(errors="replace")
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{error.code} {error.reason}"
    if error.code == 404:
        return NotFound(message)
    if error.code in (401, 403):
        return ConfigError(f"{url}: {message} (the key is read from REKINDLE_API_KEY)")
    return RekindleError(f"{url}: {message}")
