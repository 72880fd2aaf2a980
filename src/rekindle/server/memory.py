"""Return of memory that large bodies used to the operating system, shortly after they are answered.

The allocator keeps freed chunks of up to 32 MiB for the next allocation of that size; the memory of a tenant's body
would stay allocated, once for every thread that has handled it.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys

LARGE = 1 << 20  # bytes of a body that make a trim worthwhile
AFTER_S = 1.0  # a trim scans all free memory, which takes milliseconds: once for all bodies of a second
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class FreedMemory:
    """Schedules trims on one event loop; does nothing if the allocator has no trim."""

    def __init__(self) -> None:
        self._is_due = False

    def give_back(self) -> None:
        """Schedule a trim of free memory, in a worker thread."""
        if _trim is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        if _trim is not None:
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)
