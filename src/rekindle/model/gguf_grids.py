"""Weights of a GGUF file as the codes that are in it, for kernels that multiply by codes.

Owns which types are grids: every 32 values are codes times a step, some with an offset, and nothing is rounded on the
way from the file. Of Q4_K a step is a product, which is rounded to the 11 bits of fp16. Other quantised types are
rounded to 8 bits, with a step for every 32 values. Reads tensors in parts, when they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.layer_forms import GROUP, ZERO, Grid
from rekindle.model.gguf_header import TensorEntry

PART_VALUES = 1 << 22
PANEL = 64  # columns, of which parts are multiples


@dataclass(frozen=True, slots=True, eq=False)
class FileGrid:
    """A tensor of a quantised type; `order`: its rows in the order of the weight's, None: as they are."""

    path: Path
    entry: TensorEntry
    order: np.ndarray | None = None

    def parts(self) -> Iterator[Grid]:
        """The codes of rows that follow each other, read when they are asked for; all but the last of 64 rows each."""
        rows, depth = self.entry.shape
        row_bytes, step = (self.entry.end - self.entry.begin) // rows, max(PANEL, PART_VALUES // depth // PANEL * PANEL)
        if self.order is not None:
            yield self._grid(np.fromfile(self.path, np.uint8, rows * row_bytes, offset=self.entry.begin), self.order)
            return
        for first in range(0, rows, step):
            count = min(step, rows - first)
            offset = self.entry.begin + first * row_bytes
            yield self._grid(np.fromfile(self.path, np.uint8, count * row_bytes, offset=offset), slice(count))

    def _grid(self, held: np.ndarray, order: Any) -> Grid:
        depth, kind = self.entry.shape[1], self.entry.type
        blocks = held.reshape(-1, depth // kind.block_values, kind.block_bytes)[order]
        return UNPACKED[kind.name](blocks) if kind.name in UNPACKED else _rounded(blocks, kind.name)


def file_grid(path: Path, entry: TensorEntry, process: Callable[[np.ndarray], Any]) -> FileGrid | None:
    """A tensor's codes, if it is quantised and all that `process` does to values is to order rows otherwise."""
    if entry.type.block_values == 1 or len(entry.shape) != 2:
        return None
    numbers = np.arange(entry.shape[0], dtype=np.float32)[:, None]
    found = np.asarray(process(numbers))
    if found.shape != numbers.shape or not np.array_equal(np.sort(found, axis=0), numbers):
        return None
    order = found[:, 0].astype(np.int64)
    return FileGrid(path, entry, None if np.array_equal(found, numbers) else order)


def _fp16(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _halves(packed: np.ndarray) -> np.ndarray:
    """Codes of 4 bits: the first 16 of a group are the low halves of its bytes."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _q8_0(blocks: np.ndarray) -> Grid:
    codes = blocks[..., 2:] + np.uint8(ZERO)  # two's complement, and ZERO is half the range
    return Grid(codes.reshape(len(blocks), -1), _fp16(blocks, 0))


def _q5_0(blocks: np.ndarray) -> Grid:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    codes = (_halves(blocks[..., 6:]) | fifth << 4) + np.uint8(ZERO - 16)
    return Grid(codes.reshape(len(blocks), -1), _fp16(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Grid:
    steps = _fp16(blocks, 0)
    return Grid(_halves(blocks[..., 2:]).reshape(len(blocks), -1), steps, np.float16(-8) * steps)


def _q4_1(blocks: np.ndarray) -> Grid:
    return Grid(_halves(blocks[..., 4:]).reshape(len(blocks), -1), _fp16(blocks, 0), _fp16(blocks, 2))


def _q4_k(blocks: np.ndarray) -> Grid:
    """Eight groups: two factors for the steps and offsets of all, and for each two numbers of 6 bits."""
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    steps = np.concatenate((low & 63, rest & 15 | low >> 6 << 4), axis=-1)
    offsets = np.concatenate((high & 63, rest >> 4 | high >> 6 << 4), axis=-1)
    codes = _halves(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, GROUP))  # of two groups
    return Grid(
        codes.reshape(len(blocks), -1),
        _times(_fp16(blocks, 0), steps).reshape(len(blocks), -1),
        -_times(_fp16(blocks, 2), offsets).reshape(len(blocks), -1),
    )


def _rounded(blocks: np.ndarray, kind: str) -> Grid:
    """The nearest codes of 8 bits, for types whose steps are for fewer than 32 values, or whose codes need more."""
    from gguf import GGMLQuantizationType, dequantize

    values = dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[kind])
    groups = values.reshape(len(blocks), -1, GROUP)
    wanted = np.abs(groups).max(axis=-1) / (ZERO - 1)
    steps = wanted.astype(np.float16)
    steps = np.where(steps < wanted, np.nextafter(steps, np.float16(np.inf)), steps)
    codes = np.rint(groups / np.where(steps == 0, 1, steps).astype(np.float32)[..., None])
    return Grid((codes + ZERO).astype(np.uint8).reshape(values.shape), steps)


def _times(factors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Products of fp16 factors and of numbers, rounded once."""
    found: np.ndarray = (factors[..., None].astype(np.float32) * numbers).astype(np.float16)
    return found


UNPACKED: dict[str, Callable[[np.ndarray], Grid]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}
