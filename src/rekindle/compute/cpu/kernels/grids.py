"""Weights on grids: every 32 in depth are codes times a step, plus an offset, as files of quantised models hold them.

Owns how codes, steps and offsets lie in packed memory, as native/panel.hpp describes it, so packing and reading rows
back are here. Nothing is rounded on the way. `grid4` has codes from 0 to 15 and an offset for each step; the codes of
`grid8` are 0 to 255, and 128 stands for 0. Steps and offsets are fp16.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rekindle.compute.cpu.kernels.linear import LinearKernel, PackedWeights
from rekindle.compute.cpu.kernels.weight_memory import aligned_memory
from rekindle.layer_forms import GROUP, Grid, GridFormat

PANEL, STRIP, BLOCK, WORD = 64, 16, 64, 4  # columns, columns, steps of depth, bytes
GROUPS = BLOCK // GROUP
CODE_BYTES: dict[GridFormat, int] = {"grid4": PANEL * BLOCK // 2, "grid8": PANEL * BLOCK}
KINDS: dict[GridFormat, int] = {"grid4": 2, "grid8": 1}  # of fp16 numbers: steps, and offsets


def pack_grid(kernel: LinearKernel, grids: Iterable[Grid], *, columns: int, depth: int) -> PackedWeights:
    """Pack columns that follow each other, of one format and all but the last a multiple of 64: a part at a time.

    `depth` is a multiple of 32. ValueError if the parts have other sizes.
    """
    packed, done = None, 0
    for grid in grids:
        if packed is None:
            memory = aligned_memory(kernel.packed_bytes(grid.format, columns, depth))
            packed = PackedWeights(grid.format, columns, depth, memory, memory.ctypes.data)
        if grid.format != packed.format or grid.codes.shape[1] != depth or depth % GROUP or done % PANEL:
            raise ValueError(f"{grid.format} of {grid.codes.shape} does not follow column {done} of {packed}")
        _put(packed, done, grid)
        done += len(grid.codes)
    if packed is None or done != columns:
        raise ValueError(f"{done} columns are there, and {columns} are to be packed")
    return packed


def rows_of(packed: PackedWeights, ids: np.ndarray) -> np.ndarray:
    """The values of these columns, as `Grid.values` gives them: ids [n] -> fp32 [n, depth]."""
    panel, lane = ids // PANEL, ids % PANEL
    codes, numbers = _codes(packed)[panel, :, lane // STRIP, :, lane % STRIP], _numbers(packed)[panel, ..., lane]
    if packed.format == "grid4":
        codes = np.stack((codes & 15, codes >> 4), axis=2)  # the first 32 values of a block, and the others
    steps = numbers[:, :, 0].reshape(len(ids), -1)
    offsets = numbers[:, :, 1].reshape(len(ids), -1) if packed.format == "grid4" else None
    return Grid(codes.reshape(len(ids), -1), steps, offsets).values()[:, : packed.depth]


def _codes(packed: PackedWeights) -> np.ndarray:
    """Bytes of codes in packed memory: [panel, block, strip, word, column, byte], a view."""
    words = CODE_BYTES[_format(packed)] // (PANEL * WORD)
    return _view(packed, np.uint8, 0, (PANEL // STRIP, words, STRIP, WORD))


def _numbers(packed: PackedWeights) -> np.ndarray:
    """Steps and offsets in packed memory: fp16 [panel, block, kind, group, column], a view."""
    weight_format = _format(packed)
    return _view(packed, np.float16, CODE_BYTES[weight_format], (KINDS[weight_format], GROUPS, PANEL))


def _format(packed: PackedWeights) -> GridFormat:
    assert packed.format in ("grid4", "grid8"), packed
    return packed.format


def _view(packed: PackedWeights, dtype: type[np.generic], offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """Part of every block, from the byte `offset` on, in this shape."""
    panels, blocks = -(-packed.columns // PANEL), -(-packed.depth // BLOCK)
    block_bytes = packed.num_bytes // (panels * blocks)
    strides = [np.dtype(dtype).itemsize]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    outer = (blocks * block_bytes, block_bytes)
    return np.ndarray((panels, blocks, *shape), dtype, packed.memory, offset, (*outer, *strides))


def _put(packed: PackedWeights, first: int, grid: Grid) -> None:
    """Write columns from `first` on, which is a multiple of 64."""
    panels = -(-len(grid.codes) // PANEL)
    missing, short = panels * PANEL - len(grid.codes), -packed.depth % BLOCK
    codes = np.pad(grid.codes, ((0, missing), (0, short))) if missing or short else grid.codes
    at = slice(first // PANEL, first // PANEL + panels)
    blocks = codes.shape[1] // BLOCK
    if packed.format == "grid4":
        halves = codes.reshape(panels, PANEL // STRIP, STRIP, blocks, GROUPS, GROUP // WORD, WORD)
        words = halves[..., 0, :, :] | halves[..., 1, :, :] << 4
    else:
        words = codes.reshape(panels, PANEL // STRIP, STRIP, blocks, BLOCK // WORD, WORD)
    _codes(packed)[at] = words.transpose(0, 3, 1, 4, 2, 5)
    for kind, numbers in enumerate((grid.steps, grid.offsets)):
        if numbers is not None:
            whole = np.zeros((panels * PANEL, blocks * GROUPS), np.float16)
            whole[: len(numbers), : numbers.shape[1]] = numbers
            _numbers(packed)[at, :, kind] = whole.reshape(panels, PANEL, blocks, GROUPS).transpose(0, 2, 3, 1)
