"""Pages that the system gives to memory at its first use, asked for before that.

A first use costs most in virtual machines that give free memory back to their host: 2 to 4 ms for every 2 MiB, where
one that has the memory takes a tenth of that.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: pages are given, their content stays


def populate(memory: np.ndarray) -> bool:
    """Have the system give all pages that lie wholly in contiguous memory; False where it cannot be asked for that.

    May run while other threads read and write there.
    """
    assert memory.flags.c_contiguous
    if sys.platform != "linux":
        return False
    address = memory.ctypes.data
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return True
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, end - first, _POPULATE_WRITE) == 0)
