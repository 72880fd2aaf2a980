"""HTTP to one server, on `httpx`: clients for the commands, the demo and the benchmarks, and the events of a stream.

A connection serves one request, so a killed server leaves no stale one. Errors are those of `httpx`. Knows no routes
and no dialects.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.request import proxy_bypass

import httpx

from rekindle.config import is_loopback
from rekindle.errors import ConfigError

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to reach a server that listens everywhere


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens on `host`."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def connect(
    url: str, *, timeout_s: float, api_key: str | None = None, proxies: Mapping[str, str] | None = None
) -> httpx.Client:
    """Return a client for paths below `url`; ConfigError if that is no URL.

    `timeout_s` limits connecting and each wait for bytes, not the whole request. `proxies`, by scheme, are used for
    other machines only; those of the environment are not.
    """
    return httpx.Client(**_options(url, timeout_s, api_key, proxies))


def connect_async(
    url: str, *, timeout_s: float, api_key: str | None = None, proxies: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client as `connect` does, for an event loop."""
    return httpx.AsyncClient(**_options(url, timeout_s, api_key, proxies))


def _options(url: str, timeout_s: float, api_key: str | None, proxies: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL:
        base = httpx.URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigError(f"{url!r} is no server's URL: write it as http://host:port")
    is_here = is_loopback(base.host)
    proxy = None if is_here or proxy_bypass(base.netloc.decode()) else (proxies or {}).get(base.scheme)
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    return {
        "base_url": base,
        "headers": headers | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"}),
        "timeout": timeout_s,
        "limits": httpx.Limits(max_keepalive_connections=0),  # and any number of connections
        "verify": False if is_here and base.scheme == "http" else ssl.create_default_context(),  # reads files for 20 ms
        "proxy": proxy if not proxy or "://" in proxy else f"http://{proxy}",
        "trust_env": False,
    }


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Yield name ("" without one) and JSON data of each event as soon as it arrives; the data of `[DONE]` is None.

    Data is one line. Skips comments, and a line that the end of the connection truncated.
    """
    reader = _EventReader()
    for received in response.iter_bytes():
        yield from reader.read(received)


async def events_async(response: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    """Yield what `events` does, of a client for an event loop."""
    reader = _EventReader()
    async for received in response.aiter_bytes():
        for event in reader.read(received):
            yield event


class _EventReader:
    """Splits the bytes of a stream into its events; keeps the name and the line that have begun."""

    def __init__(self) -> None:
        self._name, self._rest = "", b""

    def read(self, received: bytes) -> Iterator[tuple[str, Any]]:
        """Yield the events that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")  # `iter_lines` also splits at U+2028 inside a text
        for line in lines:
            field, _, value = line.decode(errors="replace").partition(":")
            if field == "event":
                self._name = value.strip()
            elif field == "data":
                yield self._name, None if value.strip() == "[DONE]" else json.loads(value)
            elif not line.strip():
                self._name = ""
