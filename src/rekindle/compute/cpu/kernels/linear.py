"""Linear layers over packed weights: their memory, and products on raw addresses.

Owns the memory of packed weights. Knows addresses and strides only, no tensors: callers keep what they point to alive,
and guarantee dtypes and shapes. An output depends on its row and its column of weights, to the bit: not on the other
rows of the call, their number, or the number of threads. Between levels bits of bf16 products differ, those of other
formats do not; the packed form is the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.cpu.kernels.weight_memory import ALIGNMENT, aligned_memory
from rekindle.layer_forms import GridFormat, WeightFormat

BF16, FP32 = 0, 1  # RK_BF16 and RK_FP32 of native/rekindle.h, as are the codes of formats
FORMATS = {"bf16": BF16, "int8": 3, "int4": 4, "grid4": 6, "grid8": 7}
MOST_INT8_DEPTH = 1 << 16  # sums of products of bytes fit 32 bits


class _Call(ctypes.Structure):
    """`rk_linear_call` of native/rekindle.h."""

    _fields_ = (
        *(("format", ctypes.c_int32), ("output_format", ctypes.c_int32)),
        *((name, ctypes.c_void_p) for name in ("packed", "bias", "input", "output")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth", "input_stride", "output_stride")),
    )


class Matrix(NamedTuple):
    """Values [rows, columns] in memory that somebody else holds; `stride` is the number of values from row to row."""

    address: int
    rows: int
    columns: int
    stride: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """Weights [columns, depth] of a linear layer in the form the kernels read; `memory` (uint8) is the only copy.

    `int8`: rounded to 8 bits with a scale for each column, after a rotation that rows of inputs go through as well.
    `int4`: of these 8-bit numbers, every 32 in depth are 4-bit ones times a multiplier of theirs. `grid4`, `grid8`: see
    `kernels.grids`.
    """

    format: WeightFormat | GridFormat
    columns: int
    depth: int
    memory: np.ndarray = field(repr=False)
    address: int

    @property
    def num_bytes(self) -> int:
        """Bytes held, columns rounded up to 64 and depth to 32, to 64 but in bf16; int8 and int4: 8 for each column."""
        return self.memory.nbytes

    def check(self) -> None:
        """Assert that the address is that of the memory, and aligned."""
        assert self.address == self.memory.ctypes.data and self.address % ALIGNMENT == 0, self


class Linear(NamedTuple):
    """Packed weights, and the address of a bf16 bias or None."""

    packed: PackedWeights
    bias: int | None


class WeightsStruct(ctypes.Structure):
    """`rk_weights` of native/rekindle.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
        *((name, ctypes.c_int64) for name in ("columns", "depth")),
        ("format", ctypes.c_int32),
    )


def described(linear: Linear | None) -> WeightsStruct:
    """A linear layer as other kernels read it; without one, all zeros."""
    if linear is None:
        return WeightsStruct(None, None, 0, 0, 0)
    packed, bias = linear
    return WeightsStruct(packed.address, bias, packed.columns, packed.depth, FORMATS[packed.format])


class LinearKernel:
    """`rk_packed_bytes`, `rk_pack` and `rk_linear` of one library."""

    def __init__(self, library: KernelLibrary) -> None:
        size, word, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
        self._bytes = library.function("rk_packed_bytes", [word, size, size], size)
        self._pack = library.function("rk_pack", [word, pointer, size, size, size, size, pointer, word])
        self._linear = library.function("rk_linear", [pointer, word])

    def pack(
        self,
        weights: Matrix,
        *,
        weight_format: WeightFormat = "bf16",
        layout: Literal["columns first", "depth first"] = "columns first",
        threads: int = 1,
    ) -> PackedWeights:
        """Copy bf16 weights into packed memory: [columns, depth], as nn.Linear has them, or [depth, columns].

        ValueError if there is nothing to pack, or the depth is beyond what products in int8 or int4 can sum.
        """
        if weights.rows < 1 or weights.columns < 1:
            raise ValueError(f"weights of shape [{weights.rows}, {weights.columns}] cannot be packed")
        by_column = layout == "columns first"
        columns, depth = (weights.rows, weights.columns) if by_column else (weights.columns, weights.rows)
        if weight_format != "bf16" and depth > MOST_INT8_DEPTH:
            raise ValueError(f"a depth of {depth} is too large for {weight_format}: at most {MOST_INT8_DEPTH}")
        memory = aligned_memory(self.packed_bytes(weight_format, columns, depth))
        packed = PackedWeights(weight_format, columns, depth, memory, memory.ctypes.data)
        strides = (weights.stride, 1) if by_column else (1, weights.stride)
        self._pack(FORMATS[weight_format], weights.address, *strides, columns, depth, packed.address, threads)
        return packed

    def packed_bytes(self, weight_format: WeightFormat | GridFormat, columns: int, depth: int) -> int:
        """Bytes of packed weights of this shape."""
        return int(self._bytes(FORMATS[weight_format], columns, depth))

    def multiply(
        self,
        packed: PackedWeights,
        source: Matrix,
        target: Matrix,
        *,
        bias: int | None = None,
        output: Literal["bf16", "fp32"] = "bf16",
        threads: int = 1,
    ) -> None:
        """Write source [rows, depth] times the weights, plus `bias`, into target [rows, columns]; both may have no row.

        Sums are fp32, of int8 and int4 exact, and rounded once, after the bias; `output="fp32"` does not round them.
        Rows are rounded to 8 bits for int8 and int4, to 16 for grids.
        `source` and the values at the address `bias` [columns] are bf16. Numbers below 2^-126 may count as 0; with int8
        and int4 an output is NaN where its row or its column of weights is not finite.
        """
        assert source.columns == packed.depth and target.columns == packed.columns, (packed, source, target)
        assert source.rows == target.rows, (source, target)
        kind = FP32 if output == "fp32" else BF16
        call = _Call(
            *(FORMATS[packed.format], kind, packed.address, bias, source.address, target.address),
            *(source.rows, packed.columns, packed.depth, source.stride, target.stride),
        )
        self._linear(ctypes.byref(call), threads)
