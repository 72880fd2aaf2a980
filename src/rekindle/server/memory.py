"""Return of memory that large bodies used to the operating system, shortly after they are answered.

The allocator would keep the memory of a tenant's body, once for every thread that has handled it.
"""

from __future__ import annotations

import asyncio

from rekindle.kernels import allocator

LARGE = 1 << 20  # bytes of a body that make a trim worthwhile
AFTER_S = 1.0  # once for all bodies of a second


class FreedMemory:
    """Schedules trims on one event loop."""

    def __init__(self) -> None:
        self._is_due = False

    def give_back(self) -> None:
        """Schedule a trim of free memory, in a worker thread."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(AFTER_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, allocator.trim)
