"""OpenMP's pool of threads, of torch and of our kernels: giving it back when a thread has nothing to compute.

Every thread that computes has a pool of its own, which lasts as long as it does. While the pools of a process have more
threads than there are processors, idle ones no longer wait for work by spinning, but sleep, and waking them up for each
of the hundreds of products in a step takes longer than a small product: one stream on two processors decodes at 14
tokens/s instead of 24, if the thread that loaded the model still has a pool, too. So a thread gives its pool back
before it stops computing; the next product makes a new one, in about 50 us.

On a machine with neighbours a thread of the pool is often not running when the others wait for it. By default they spin
for about 6 ms, longer than a time slice: each uses up its share of the processors and is then not running either. So
spinning is bounded before OpenMP is loaded, which reads its settings once: by the commands for good, by the library
for as long as it imports torch. A program that has imported torch before has OpenMP as it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from rekindle.compute.cpu.kernels.library import openmp_file

# Rounds of spinning, of 20 ns or so. Measured with a model of 24 layers in 8 bits, two threads: at a load of 6 on two
# processors 2,000 to 5,000 rounds give 4.2 to 5.0 tokens/s, the default 0.9, and one thread 4.4; alone they cost
# nothing that stands out from the noise, where 1,000 cost 7 %.
SPINS = ("GOMP_SPINCOUNT", "3000")
SOFT_PAUSE = 1  # omp_pause_soft: settings such as the number of threads stay


def bound_spinning() -> None:
    """Let threads that wait for each other sleep soon, unless the environment says how; before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(*SPINS)


@contextmanager
def spinning_bounded() -> Iterator[None]:
    """Do the same for what is imported meanwhile: the program's own environment stays, and that of its children."""
    before = os.environ.get(SPINS[0])
    bound_spinning()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SPINS[0], None)


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
