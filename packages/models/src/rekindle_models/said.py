"""What the process of a model writes: passed on to our own log, line by line, and the last lines kept for errors."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque

KEPT = 20  # lines
SHOWN = 3  # of them, where none is an error of ours
WAIT_S = 2.0  # for what was written last
OURS = "rekindle: "  # how the line begins that says why a command ended


class Said:
    """A pipe, whose end to write is `descriptor`, and the thread that reads it.

    `prefix` is put before each line. `descriptor` is for one child: `started` closes it here.
    """

    def __init__(self, prefix: str) -> None:
        self._read, self.descriptor = os.pipe()
        self._prefix = prefix.encode()
        self._last: deque[bytes] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._pass_on, name="rekindle-said", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Leave the pipe to the child: reading ends when it does."""
        os.close(self.descriptor)

    def why(self) -> str:
        """Return what was said about an end: the last line with an error of ours, else the last lines."""
        self._thread.join(WAIT_S)
        lines = [line.decode(errors="replace").strip() for line in list(self._last)]
        ours = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
        return ours[-1] if ours else " | ".join([line for line in lines if line][-SHOWN:])

    def _pass_on(self) -> None:
        with os.fdopen(self._read, "rb") as pipe:
            for line in pipe:
                self._last.append(line)
                with contextlib.suppress(OSError, ValueError):  # nobody reads our log
                    sys.stderr.buffer.write(self._prefix + line)
                    sys.stderr.buffer.flush()
