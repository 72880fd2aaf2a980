"""A restart that refuses no request: this process starts the next one, which gets its listening sockets.

    this process                                   the next one
    starts it, at SIGUSR2 ───────────────────────▶ loads its model, while this one serves
                          ◀────────── loaded ───── waits
    accepts no more, ends what
    runs, saves, closes its store ──── closed ───▶ opens the store, accepts

Connections that come meanwhile wait in the kernel's queue of the sockets, which are the same in both processes. Two
sockets on one port (SO_REUSEPORT) have a queue each, and connections in that of the older one are reset when it closes.
A next process that ends before it has loaded changes nothing: this one serves. One that finds this one gone follows it
at once. The store has one process at a time, and both its lock and the sockets are the kernel's to release, so a kill
-9 of either leaves nothing for the other to clear.

Owns the other process, and what systemd is informed of: which process is the service's main one. Knows neither models
nor stores.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.config import ServerSettings
from rekindle.errors import ConfigError
from rekindle.server.listening import open_listeners, systemd_listeners, taken

logger = logging.getLogger("rekindle.server")
VARIABLE = "LISTEN_AFTER_REKINDLE"  # what the next process gets: descriptors, and the slot of the store
LOADED = b"loaded"
END_S = 10.0  # for the next process to end when it is not needed


def notify(state: str) -> None:
    """Send a state to systemd, as sd_notify(3) does, if it wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)
    except OSError as error:
        logger.warning("systemd could not be informed (%s): %s", state, error)


@dataclass(slots=True)
class Handover:
    """The sockets of this process, from where it has them, and the process that follows it.

    `is_lasting`: they are somebody else's, too, so that connections wait there once this process accepts no more.
    `slot`: of the store of the process before this one, which this one is to continue; None: as the settings say.
    """

    listeners: list[socket.socket]
    is_lasting: bool = False
    slot: str | None = None
    is_followed: bool = False  # the next process has loaded and waits
    _before: socket.socket | None = None
    _next: subprocess.Popen[bytes] | None = None
    _control: socket.socket | None = None

    @classmethod
    def of_process(cls, settings: ServerSettings) -> Handover:
        """Take the sockets of the process before this one, or systemd's; else open them.

        PortTaken or ConfigError if that fails.
        """
        if sys.platform != "win32":
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which would end a process that loads its model
        given = os.environ.pop(VARIABLE, None)
        if given is not None:
            return cls._after(json.loads(given), settings)
        found = systemd_listeners(settings)
        return cls(found or open_listeners(settings), is_lasting=bool(found))

    @classmethod
    def _after(cls, given: dict[str, Any], settings: ServerSettings) -> Handover:
        before = socket.socket(fileno=given["control"])
        os.set_inheritable(before.fileno(), False)
        made = cls(taken(given["listeners"], settings), given["is_lasting"], given["slot"], _before=before)
        port = made.listeners[0].getsockname()[1]
        if not made.is_lasting and settings.port not in (0, port):
            raise ConfigError(f"port: it is {port} for as long as the socket is handed over: stop and start the server")
        return made

    def wait(self) -> None:
        """Wait until the process before this one, if there is one, has closed its store. Call it once loaded."""
        if self._before is None:
            return
        before, self._before = self._before, None
        with before:
            try:
                before.sendall(LOADED)
                while before.recv(64):
                    pass
            except OSError as error:
                logger.warning("the process before this one has ended: %s", error)

    def start_next(self, listeners: Sequence[int], slot: str, *, loaded: Callable[[], None]) -> None:
        """Start the next process, by the command of this one; `loaded` is called on this event loop once it has."""
        if self._next is not None:
            logger.warning("process %d follows this one already: wait until it has loaded", self._next.pid)
            return
        ours, theirs = socket.socketpair()
        given = {"control": theirs.fileno(), "listeners": [*listeners], "slot": slot, "is_lasting": self.is_lasting}
        try:
            self._next = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env=os.environ | {VARIABLE: json.dumps(given)},
                pass_fds=(theirs.fileno(), *listeners),
            )
        except OSError as error:
            ours.close()
            logger.error("the next process cannot be started, and this one stays: %s", error)
            return
        finally:
            theirs.close()
        self._control = ours
        logger.info("process %d is started to follow this one, which serves until it has loaded", self._next.pid)
        asyncio.get_running_loop().add_reader(ours, self._hear, loaded)

    def _hear(self, loaded: Callable[[], None]) -> None:
        assert self._control is not None and self._next is not None, "there is no next process"
        asyncio.get_running_loop().remove_reader(self._control)
        try:
            has_loaded = self._control.recv(64) == LOADED
        except OSError:
            has_loaded = False
        if has_loaded:
            logger.info("process %d has loaded: it accepts once this one has ended what runs", self._next.pid)
            self.is_lasting = self.is_followed = True
            notify(f"MAINPID={self._next.pid}")
            loaded()
            return
        code = _end_of(self._next)
        logger.error("process %d ended with %d before it had loaded: this one serves as before", self._next.pid, code)
        self._control.close()
        self._control = self._next = None

    def abandon(self) -> None:
        """End a next process that has not loaded: this one stops for good."""
        if self._next is not None and not self.is_followed:
            self._next.terminate()
            _end_of(self._next)

    def close(self) -> None:
        """Let the next process open the store. Call it when all is saved and closed."""
        if self._control is not None:
            self._control.close()


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process that ends, or kill it, and return its exit code."""
    try:
        return process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
