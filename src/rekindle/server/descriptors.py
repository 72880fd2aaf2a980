"""Descriptors of this process: how many it may have, and what happens to a connection for which none is left.

Owns the limit, which is raised where that is allowed, what is set apart for files of the store, and the one descriptor
that is kept in reserve: without it a connection that cannot be accepted stays in the kernel's queue, which asyncio asks
again and again (59,334 tracebacks in 10 s were seen). Knows nothing of HTTP. Windows has no such limit.
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
MOST_FILES = 1 << 16  # what the limit is raised to at most: programs that are started close all they may have inherited
SET_APART = 64  # for files that are opened later
LEAST_PLACES = 8  # connections there are places for, however low the limit is
BATCH = 32  # connections accepted before those accepted so far are looked at
LOG_EVERY_S = 60.0
PAUSE_S = 0.01  # where even the reserve is gone
NONE_LEFT = (errno.EMFILE, errno.ENFILE)


def raise_limit() -> int | None:
    """Raise the soft limit of open files to the hard one, `MOST_FILES` at most; return the limit, None for none."""
    if sys.platform == "win32":
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        for wanted in (most, min(most, 10240)):  # macOS refuses more than OPEN_MAX, whatever the hard limit is
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
                break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def places(wanted: int, *, lingering: int, store_files: int) -> int:
    """How many of the `wanted` connections fit under the limit, next to what is open and what the store will open.

    `lingering` connections more are open for a moment, while they are turned away. At least `LEAST_PLACES`, unless
    fewer are wanted.
    """
    limit = raise_limit()
    if limit is None:
        return wanted
    spoken_for = _num_open() + min(store_files, limit // 4) + lingering + BATCH + SET_APART
    fit = max(LEAST_PLACES, limit - spoken_for)
    if fit < wanted:
        logger.warning(
            "max_connections is %d, not %d: this process may have %d files open (ulimit -n)", fit, wanted, limit
        )
    return min(wanted, fit)


def _num_open() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return SET_APART


class Listener(socket.socket):
    """A listening socket whose `accept` never fails for want of a descriptor. Takes over `listening`.

    Where none is left, `make_room` has a connection close, or the newcomer is closed at once; one line a minute says
    so. After `BATCH` connections `accept` says once that none waits, so that the event loop gets to those it has.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        make_room: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fileno=listening.detach())
        self._make_room = make_room
        self._clock = clock
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY)
        self._num_accepted = 0
        self._num_short = 0
        self._logged_at = -LOG_EVERY_S

    def accept(self) -> tuple[socket.socket, Any]:
        """A connection and its address; BlockingIOError where none waits, or none can be had now."""
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
        """Give the reserve for the connection that waits longest, close it, and take the reserve back."""
        self._release()
        with contextlib.suppress(OSError):  # another thread was faster
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
