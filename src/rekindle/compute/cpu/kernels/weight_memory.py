"""Memory for packed weights, in large pages where the system has them.

Every token reads all weights once. In pages of 4 KiB the processor must look up an address for each 64 cache lines,
which makes a step up to a sixth slower; and the C library reuses small pages that were freed before, for other matrices
at each start. So weights have regions of their own. A region lives as long as any array in it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import numpy as np

ALIGNMENT = 64  # bytes
REGION_BYTES = 64 << 20
LARGE_PAGE = 2 << 20


class WeightMemory:
    """Hands out memory from regions, one after the other. Any thread may ask."""

    def __init__(self, region_bytes: int = REGION_BYTES) -> None:
        self._region_bytes = region_bytes
        self._region = np.empty(0, np.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray:
        """Return memory (uint8, [num_bytes]) that begins at a multiple of 64, zero at first."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._used + size > len(self._region):
                self._region, self._used = _region(max(size, self._region_bytes)), 0
            start, self._used = self._used, self._used + size
            return self._region[start : start + num_bytes]


def _region(num_bytes: int) -> np.ndarray:
    """Return memory of its own, whose pages the system gives at their first use: large ones, if it has them."""
    size = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    if sys.platform != "linux":
        return np.frombuffer(mmap.mmap(-1, size), np.uint8)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    with contextlib.suppress(OSError):  # a kernel built without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


_MEMORY = WeightMemory()


def aligned_memory(num_bytes: int) -> np.ndarray:
    """Return memory (uint8, [num_bytes]) for weights that begins at a multiple of 64."""
    return _MEMORY.take(num_bytes)
