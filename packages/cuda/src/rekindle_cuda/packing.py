"""Weights of linear layers on a card: how they lie there, how they are packed, and products with them.

    x ──round──▶ rows in 8 bits ──multiply, by packed weights──▶ exact sums ──scales, bias──▶ rounded once, in x's dtype

Owns the form. Codes and scales are those that the processor's kernels pack from the same weights, and the bits of
products are theirs, as far as the card's arithmetic is IEEE's.

    int8   numbers int8 [columns, padded]
    int4   of each 128 in depth the codes int8 [columns, padded / 2], two's complement: byte j has that of value j in
           the low nibble, that of value 64 + j in the high one; multipliers int8 [columns, groups], of every 32 values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH
from rekindle_cuda.attention import EXACT
from rekindle_cuda.places import DTYPES
from rekindle_cuda.products import multiply_kernel
from rekindle_cuda.rounding import group_kernel, round_kernel

RoundFormat = Literal["int8", "int4"]
MOST_ROTATED = 256
BLOCK, GROUP = 128, 32  # in depth: what it is padded to, and what has one multiplier
LARGEST: dict[RoundFormat, float] = {"int8": 127.0, "int4": 112.0}  # of a column, in units of its scale
CHUNK, ROWS = 8192, 1  # values of a row, and rows, that a program holds at a time
BLOCKS = 16  # of a program that looks for multipliers
SCRATCH_BYTES = 64 << 20  # of units of columns that are rounded to 4 bits at a time


class Matrix(NamedTuple):
    """Values [rows, columns] whose rows lie `stride` values apart."""

    data: Tensor
    stride: int


class Rotation(NamedTuple):
    """How rows of a depth are rotated, in pieces of `size` = 2^log values; what a program holds of how many rows."""

    size: int
    log: int
    pieces: int
    rows: int
    factor: float  # 1 / sqrt(size), rounded to fp32

    @classmethod
    def of(cls, depth: int) -> Rotation:
        """That of a depth."""
        size = min(depth & -depth, MOST_ROTATED)
        pieces = max(1, min(triton.next_power_of_2(depth), CHUNK) // size)
        return cls(size, size.bit_length() - 1, pieces, ROWS, float(np.float32(1 / np.sqrt(size))))


class Rounded(NamedTuple):
    """Rows in units of their scales (fp32 [rows]): int8 or, not rounded, fp32 [rows, padded]."""

    numbers: Tensor
    scales: Tensor


class Held(NamedTuple):
    """Packed weights as kernels read them."""

    numbers: Tensor
    multipliers: Tensor  # of int8 any tensor
    scales: Tensor
    columns: int
    padded: int
    stride: int  # bytes of a column
    groups: int  # bytes of a column's multipliers, up to a multiple of 16 for wide loads


class Tile(NamedTuple):
    """What a program of `multiply_kernel` computes at a time."""

    rows: int
    columns: int
    depth: int
    in_4_bits: bool


@dataclass(frozen=True, slots=True, eq=False)
class CardWeights:
    """Weights [columns, depth] of a linear layer, packed on a card; the tensors are the only copy."""

    format: RoundFormat
    columns: int
    depth: int
    held: Held

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(each.nbytes for each in self._tensors())

    @property
    def address(self) -> int:
        """Where they are on the device: no other weights are there."""
        return self.held.numbers.data_ptr()

    def check(self) -> None:
        """Assert that all sizes are those of the shape."""
        padded = padded_depth(self.depth)
        stride = padded if self.format == "int8" else padded // 2
        assert self.held[3:] == (self.columns, padded, stride, _groups(padded)), self
        assert self.held.numbers.shape == (self.columns, stride) and self.held.scales.shape == (self.columns,), self

    def part(self, first: int, end: int) -> CardWeights:
        """Some of the columns, in the same memory."""
        numbers, multipliers, scales = (each[first:end] for each in self.held[:3])
        held = self.held._replace(numbers=numbers, multipliers=multipliers, scales=scales, columns=end - first)
        return CardWeights(self.format, end - first, self.depth, held)

    @classmethod
    def joined(cls, parts: Sequence[CardWeights]) -> CardWeights:
        """The columns of all, one after the other, in memory of their own; all have one format and depth."""
        first = parts[0]
        assert {(each.format, each.depth) for each in parts} == {(first.format, first.depth)}, parts
        columns, every = sum(each.columns for each in parts), [each.held[:3] for each in parts]
        numbers, multipliers, scales = map(torch.cat, zip(*every, strict=True))
        held = first.held._replace(numbers=numbers, multipliers=multipliers, scales=scales, columns=columns)
        return cls(first.format, columns, first.depth, held)

    def _tensors(self) -> tuple[Tensor, ...]:
        numbers, multipliers, scales = self.held[:3]
        return (numbers, scales) if self.format == "int8" else (numbers, multipliers, scales)


def pack(weight: Tensor, weight_format: RoundFormat) -> CardWeights:
    """Round weights [columns, depth] on the device where they are.

    ValueError if there is nothing to pack, or the depth is beyond what products can sum.
    """
    columns, depth = weight.shape
    if not columns or not 1 <= depth <= MOST_INT8_DEPTH:
        raise ValueError(f"weights of shape {tuple(weight.shape)} cannot be packed in {weight_format}")
    padded = padded_depth(depth)
    if weight_format == "int8":
        numbers, scales = rounded(weight)
        held = Held(numbers, scales, scales, columns, padded, padded, _groups(padded))
    else:
        held = Held(*_in_4_bits(weight, padded), columns, padded, padded // 2, _groups(padded))
    return CardWeights(weight_format, columns, depth, held)


def _in_4_bits(weight: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, multipliers and scales."""
    columns, blocks = len(weight), padded // BLOCK
    codes = torch.empty(columns, padded // 2, dtype=torch.int8, device=weight.device)
    multipliers = torch.zeros(columns, _groups(padded), dtype=torch.int8, device=weight.device)
    scales = torch.empty(columns, dtype=torch.float32, device=weight.device)
    step = max(1, SCRATCH_BYTES // (4 * padded))
    for first in range(0, columns, step):
        part = slice(first, first + step)
        units, scales[part] = rounded(weight[part], LARGEST["int4"], torch.float32)
        count = len(units) * blocks
        group_kernel[(triton.cdiv(count, BLOCKS),)](
            *(units, codes[part], multipliers[part], count, blocks, multipliers.stride(0)), BLOCKS=BLOCKS, **EXACT
        )
    return codes, multipliers, scales


def rounded(x: Tensor, largest: float = LARGEST["int8"], dtype: torch.dtype = torch.int8) -> Rounded:
    """Rows [rows, depth], rotated, in units of their scales, the largest value of each `largest`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, depth = x.shape
    padded, rotation = padded_depth(depth), Rotation.of(depth)
    to = Rounded(
        torch.empty(rows, padded, dtype=dtype, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    round_kernel[(triton.cdiv(rows, ROWS),)](
        Matrix(x, x.stride(0)),
        to,
        rows,
        depth,
        padded,
        _signs(x.device),
        LARGEST=largest,
        ROTATION=rotation,
        num_warps=4 if rotation.pieces * rotation.size <= 2048 else 8,
        **EXACT,
    )
    return to


def multiply(packed: CardWeights, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows [..., depth] by packed weights, add the bias, round once: [..., columns] in x's dtype.

    RuntimeError if `x` is neither bf16 nor fp32, or its rows have another length.
    """
    if x.dtype not in DTYPES or x.shape[-1] != packed.depth:
        raise RuntimeError(f"rows of {packed.depth} values in bf16 or fp32 are needed, not {x.dtype} {tuple(x.shape)}")
    out = x.new_empty(*x.shape[:-1], packed.columns)
    if x.numel():
        multiply_rounded(packed, rounded(x.reshape(-1, packed.depth)), bias, out.view(-1, packed.columns))
    return out


def multiply_rounded(packed: CardWeights, rows: Rounded, bias: Tensor | None, out: Tensor) -> None:
    """As `multiply`, of rows that are rounded already, into out [rows, columns], which has at least one row."""
    held, num_rows = packed.held, len(rows.numbers)
    tile, launch = tile_of(num_rows, packed)
    multiply_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(packed.columns, tile.columns))](
        rows,
        held,
        held.scales if bias is None else bias,
        Matrix(out, out.stride(0)),
        num_rows,
        TILE=tile,
        BIASED=bias is not None,
        **launch,
        **EXACT,
    )


def tile_of(num_rows: int, packed: CardWeights) -> tuple[Tile, dict[str, int]]:
    """What a program computes, and its warps and stages: for up to 64 rows weights are read once.

    All fit the 99 KB of shared memory that the smallest cards have.
    """
    in_4_bits, is_deep = packed.format == "int4", packed.held.padded % (2 * BLOCK) == 0
    if num_rows <= 32:
        depth = 2 * BLOCK if is_deep else BLOCK
        return Tile(16 if num_rows <= 16 else 32, 32, depth, in_4_bits), {"num_warps": 4, "num_stages": 4}
    if num_rows <= 64:
        depth = 2 * BLOCK if is_deep and not in_4_bits else BLOCK  # codes of more take all registers
        return Tile(64, 32, depth, in_4_bits), {"num_warps": 4, "num_stages": 3}
    return Tile(128, 128, BLOCK, in_4_bits), {"num_warps": 8, "num_stages": 3}


def padded_depth(depth: int) -> int:
    """Values of a packed column or row: whole blocks."""
    return -(-depth // BLOCK) * BLOCK


def _groups(padded: int) -> int:
    return -(-padded // GROUP // 16) * 16


@lru_cache(maxsize=16)
def _signs(device: torch.device) -> Tensor:
    """The signs of the rotation, fp32 [256]: a linear congruential generator, as in native/int8.hpp."""
    state, signs = 1, list[float]()
    for _ in range(MOST_ROTATED):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        signs.append(-1.0 if state >> 31 else 1.0)
    with torch.inference_mode(False):
        return torch.tensor(signs, device=device)
