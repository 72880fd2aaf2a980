"""Memory of packed weights: aligned, disjoint, from regions that end with their last array."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.weight_memory import ALIGNMENT, WeightMemory

SIZES = (1, 63, 64, 65, 1000, 5000, 3 << 20)


def spans(arrays: list[np.ndarray]) -> list[tuple[int, int]]:
    return sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays)


@pytest.mark.parametrize("region_bytes", [64, 4096, 1 << 20])
def test_arrays_are_aligned_and_do_not_overlap(region_bytes: int) -> None:
    memory = WeightMemory(region_bytes)
    arrays = [memory.take(size) for size in SIZES * 3]
    assert [len(array) for array in arrays] == list(SIZES * 3)
    assert all(start % ALIGNMENT == 0 for start, _ in spans(arrays))
    assert all(end <= start for (_, end), (start, _) in zip(spans(arrays), spans(arrays)[1:], strict=False))
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))


def test_threads_get_memory_of_their_own() -> None:
    memory = WeightMemory(1 << 16)
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(memory.take, [100] * 2000))
    assert all(end <= start for (_, end), (start, _) in zip(spans(arrays), spans(arrays)[1:], strict=False))


def test_a_region_ends_with_its_last_array() -> None:
    memory = WeightMemory(1 << 20)
    first, second = memory.take(1 << 19), memory.take(1 << 18)
    assert isinstance(first.base, np.ndarray) and first.base is second.base
    region = weakref.ref(first.base)
    memory.take(2 << 20)  # a new region
    del first
    gc.collect()
    assert region() is not None
    del second
    gc.collect()
    assert region() is None
