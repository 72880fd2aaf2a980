"""Memory that large bodies have taken, given back to the system some time after they have been answered.

The allocator keeps what was freed in pieces of up to 32 MiB for the next one that is as large; what one tenant has sent
would stay for good, once for every thread that has seen it.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

LARGE = 1 << 20  # bytes of a body after which it is worth while
AFTER_S = 1.0  # a trim walks all free memory, which takes milliseconds: one for all bodies of a second
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class FreedMemory:
    """For one event loop. Where the allocator cannot be asked nothing happens."""

    def __init__(self) -> None:
        self._is_due = False

    def give_back(self) -> None:
        """Have what is free given back soon, in a worker thread."""
        if _trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)
