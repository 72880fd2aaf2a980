"""OpenMP's pool of threads, of torch and of our kernels: giving it back when a thread has nothing to compute.

Every thread that computes has a pool of its own, which lasts as long as it does. While the pools of a process have more
threads than there are processors, idle ones no longer wait for work by spinning, but sleep, and waking them up for each
of the hundreds of products in a step takes longer than a small product: one stream on two processors decodes at 14
tokens/s instead of 24, if the thread that loaded the model still has a pool, too. So a thread gives its pool back
before it stops computing; the next product makes a new one, in about 50 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from rekindle.kernels.library import openmp_file

SOFT_PAUSE = 1  # omp_pause_soft: settings such as the number of threads stay


def release() -> None:
    """End the threads of the calling thread's pool; nothing if it has none, or OpenMP cannot do that (before 5.0)."""
    pause = _pause()
    if pause is not None:
        pause(SOFT_PAUSE)


@cache
def _pause() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(openmp_file()).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
