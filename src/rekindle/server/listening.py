"""The sockets that listen: opened here, or by systemd (`LISTEN_FDS`, as sd_listen_fds(3) has it)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

from rekindle.config import ServerSettings, is_loopback
from rekindle.errors import ConfigError, PortTaken

NO_SUCH_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # for "localhost" without IPv6
BACKLOG = 2048  # connections that may wait to be accepted, as in uvicorn
FIRST_OF_SYSTEMD = 3


def url_of(host: str, port: int) -> str:
    """Return a URL to copy; a wildcard address is replaced by this machine's name."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def open_listeners(settings: ServerSettings) -> list[socket.socket]:
    """Open sockets that listen on every address of the host, on one port.

    PortTaken if another program has it; ConfigError if that fails otherwise.
    """
    listeners: list[socket.socket] = []
    port = settings.port
    try:
        found = socket.getaddrinfo(settings.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in sorted(set(found)):  # IPv4 first
            try:
                listeners.append(_listener(family, (address[0], port, *address[2:])))
            except OSError as error:
                if not listeners or error.errno not in NO_SUCH_FAMILY:
                    raise
            port = listeners[0].getsockname()[1]
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise _refusal(f"cannot listen on {settings.host}:{settings.port}", error) from error
    return listeners


def _listener(family: int, address: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # otherwise a restart waits for old connections
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _refusal(what: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"{what}: another program has this port; choose another --port (0 takes any free one)")
    return ConfigError(f"{what}: {error.strerror or error}; choose another --host or --port")


def systemd_listeners(settings: ServerSettings) -> list[socket.socket]:
    """Take the sockets that systemd passed to this process; none, if it passed none. ConfigError as in `taken`."""
    count, owner = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))
    os.environ.pop("LISTEN_FDNAMES", None)
    if owner != str(os.getpid()) or not count.isdecimal():
        return []
    return taken(range(FIRST_OF_SYSTEMD, FIRST_OF_SYSTEMD + int(count)), settings)


def taken(descriptors: Sequence[int], settings: ServerSettings) -> list[socket.socket]:
    """Return the sockets of descriptors that this process inherited; its own children will not inherit them.

    ConfigError for one that does not listen for TCP, or that others can reach although no key is required.
    """
    listeners = []
    for descriptor in descriptors:
        try:
            listener = socket.socket(fileno=descriptor)
            listens = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            )
        except OSError as error:
            raise ConfigError(f"the socket {descriptor} that was passed to this process: {error.strerror}") from error
        if not listens:
            raise ConfigError(f"the socket {descriptor} that was passed to this process does not listen for TCP")
        os.set_inheritable(descriptor, False)
        host = listener.getsockname()[0]
        if not (settings.open or settings.needs_key or is_loopback(host)):
            raise ConfigError(
                f"the socket that was passed to this process listens on {host}, which can be reached by others: set "
                "api_key (REKINDLE_API_KEY), or open=true to do without a key"
            )
        listeners.append(listener)
    return listeners
