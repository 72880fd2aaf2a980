"""Where kernels find a layer's K and V, and in what form: tuples that they take as one argument each."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.spec import Format, rotation_size

NATIVE, Q4H, Q8H = 0, 4, 8  # formats
CODES: dict[Format, int] = {"q4h": Q4H, "q8h": Q8H}
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MOST_TILE = 64  # tokens that are read at a time


class Rows(NamedTuple):
    """Vectors [rows, heads, dim] of a step, and their strides."""

    data: Tensor
    row: int
    head: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        x = x if x.stride(2) == 1 else x.contiguous()
        return cls(x, x.stride(0), x.stride(1))


class Places(NamedTuple):
    """Where rows are stored, int32 [rows] each; block -1: nowhere."""

    blocks: Tensor
    offsets: Tensor


class Stored(NamedTuple):
    """Sections of a layer's K or V, [blocks, heads, tokens, ...] each, and their strides by block."""

    codes: Tensor
    codes_block: int
    scales: Tensor
    scales_block: int


class Form(NamedTuple):
    """The form of a layer's K or V, which kernels are compiled for."""

    format: int
    dim: int
    size: int  # of what is rotated together; of a native format all dimensions, up to a power of two
    log: int  # 2^log = size
    group: int
    padded: int  # half of the dimensions, as a power of two that `tl.dot` takes
    factor: float  # 1 / sqrt(size), rounded to fp32

    @property
    def parts(self) -> int:
        """How many programs a vector has."""
        return -(-self.dim // self.size)


class Values(NamedTuple):
    """K or V of a layer."""

    stored: Stored
    form: Form

    @classmethod
    def of(cls, sections: tuple[Tensor, ...], fmt: Format, dim: int) -> Values:
        codes, scales, kind = sections[0], sections[-1], CODES.get(fmt, NATIVE)
        size = triton.next_power_of_2(dim) if kind == NATIVE else rotation_size(dim)
        group = 1 if kind == NATIVE else dim // scales.shape[-1]
        codes = codes.view(torch.uint8) if kind == Q4H else codes
        padded, factor = max(16, triton.next_power_of_2(dim // 2)), float(np.float32(1 / math.sqrt(size)))
        form = Form(kind, dim, size, size.bit_length() - 1, group, padded, factor)
        return cls(Stored(codes, codes.stride(0), scales, scales.stride(0)), form)


def order_of(form: Form) -> np.ndarray:
    """The dimension at each place of a vector in two halves, as `formats.place_of`."""
    dims = np.arange(form.dim)
    if form.format != Q4H:
        return dims
    i = dims % 8
    return np.argsort(4 * (dims // 8) + 2 * (i & 1) + (i >> 2) + form.dim // 2 * ((i >> 1) & 1))
