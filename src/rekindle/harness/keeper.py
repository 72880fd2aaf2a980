"""A program between us and a server that we start: it ends the server, with all its processes, when we end.

It reads from us: the pipe closes however we end, also by SIGKILL. It ends when the server does, once none of the
server's processes is left: one that survived would keep the lock of a store.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

STOP_S = 30.0  # for processes to end by themselves, unless the first argument is another time
POLL_S = 0.05
OF_SIGNALS = 128  # added to the number of a signal that ended the server, as shells do
SET_CHILD_SUBREAPER = 36  # of Linux's prctl


def keep(command: Sequence[str], *, stop_s: float) -> int:
    """Run a command in a process group of its own until it ends, or our input does; return its status.

    What has not ended `stop_s` after it was asked to is killed.
    """
    if sys.platform == "linux":
        # Orphans of the server become our children: an init that is slow to reap them would make us wait.
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_after_input, args=(process.pid, stop_s), daemon=True).start()
    status = process.wait()
    _end_rest(process.pid, stop_s)
    return OF_SIGNALS - status if status < 0 else status


def _end_after_input(group: int, stop_s: float) -> None:
    while os.read(0, 1):
        pass
    _signal(group, signal.SIGTERM)
    time.sleep(stop_s)
    _signal(group, signal.SIGKILL)


def _end_rest(group: int, stop_s: float) -> None:
    """Ask what is left of a group whose leader has ended to end, wait, and kill what does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + stop_s
        is_left = _signal(group, number)
        while is_left and time.monotonic() < end:
            time.sleep(POLL_S)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            is_left = _signal(group, 0)


def _signal(group: int, number: int) -> bool:
    """Send a signal to the processes of a group; return whether there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], stop_s=float(sys.argv[1])))
