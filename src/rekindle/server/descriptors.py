"""File descriptors of this process: their limit, and what happens to a connection when none is left.

Owns the limit, which is raised if allowed, the share reserved for the store's files, and one descriptor in reserve:
without it a connection that cannot be accepted stays in the kernel's queue, which asyncio polls endlessly (59,334
tracebacks in 10 s were seen). Knows nothing of HTTP. Windows has no such limit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

if sys.platform != "win32":
    import resource

logger = logging.getLogger("rekindle.server")
MAX_FILES = 1 << 16  # raise the limit to this at most: child programs close all they may inherit
RESERVED_FILES = 64  # descriptors for files that are opened later
MIN_PLACES = 8  # places for connections, however low the limit is
BATCH = 32  # connections accepted in a row before the event loop handles them
LOG_EVERY_S = 60.0
PAUSE_S = 0.01  # when even the reserve is gone
NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> int | None:
    """Raise the soft limit of open files to the hard one, `MAX_FILES` at most; return the limit, None if unlimited."""
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        for wanted in (most, min(most, 10240)):  # macOS refuses more than OPEN_MAX, whatever the hard limit is
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
                break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def places(wanted: int, *, lingering: int, store_files: int) -> int:
    """Return how many of the `wanted` connections fit under the limit, next to open files and those of the store.

    `lingering`: refused connections that stay open for a moment. At least `MIN_PLACES`, unless fewer are wanted.
    """
    limit = raise_limit()
    if limit is None:
        return wanted
    reserved = _num_open() + min(store_files, limit // 4) + lingering + BATCH + RESERVED_FILES
    fit = max(MIN_PLACES, limit - reserved)
    if fit < wanted:
        logger.warning(
            "max_connections is %d, not %d: this process may have %d files open (ulimit -n)", fit, wanted, limit
        )
    return min(wanted, fit)


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return RESERVED_FILES


class Listener(socket.socket):
    """A listening socket whose `accept` never fails for lack of descriptors. Takes over the socket `listening`.

    If none is left, `make_room` closes another connection, or the new one is closed at once; this is logged once a
    minute at most. After `BATCH` connections `accept` reports once that none is waiting, so that the event loop can
    handle those accepted.
    """

    def __init__(
        self, listening: socket.socket, *, make_room: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(fileno=listening.detach())
        self._make_room = make_room
        self._clock = clock
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY)
        self._num_accepted = 0
        self._num_short = 0
        self._logged_at = -LOG_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its address; BlockingIOError if none is waiting or can be accepted now."""
        if self._num_accepted == BATCH:
            self._num_accepted = 0
            raise BlockingIOError
        try:
            found = super().accept()
        except OSError as error:
            self._num_accepted = 0
            if error.errno not in NONE_LEFT:
                raise
            self._log(error)
            if not self._make_room():
                self._drop_one()
            raise BlockingIOError from None
        self._num_accepted += 1
        return found

    def close(self) -> None:
        """Close the socket and the reserve."""
        super().close()
        self._release()

    def _release(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _drop_one(self) -> None:
        """Use the reserve to accept and close the connection that has waited longest, then restore the reserve."""
        self._release()
        with contextlib.suppress(OSError):  # another thread accepted it
            super().accept()[0].close()
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY)
        except OSError:
            time.sleep(PAUSE_S)

    def _log(self, error: OSError) -> None:
        now = self._clock()
        self._num_short += 1
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            reason = error.strerror or error
            logger.warning("%s (ulimit -n): idle or new connections are closed; so far %d", reason, self._num_short)
