"""What happens to rows between products, in Triton: norms, sums, gates.

Every intermediate is rounded where transformers rounds it, in the rows' dtype. A row's result depends on that row
alone. Nothing is compiled again for a number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rekindle.layer_forms import Activation, Rounding

ROUNDINGS: dict[Rounding | None, int] = {None: 0, "before the weight": 1, "after the weight": 2}
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
_BEFORE: tl.constexpr = tl.constexpr(ROUNDINGS["before the weight"])
_SILU: tl.constexpr = tl.constexpr(ACTIVATIONS["silu"])


class Weights(NamedTuple):
    """Of a norm: fp32 [columns], and its epsilon."""

    weight: Tensor
    epsilon: float


class Lines(NamedTuple):
    """Rows [rows, columns] whose values lie next to each other, and their stride."""

    data: Tensor
    row: int


class Width(NamedTuple):
    """What norms and sums are compiled for."""

    columns: int
    padded: int  # the columns, up to a power of two
    rows: int  # of a program
    inner: int  # when the norm rounds that comes before the sum; 0: there is none
    adds: bool
    outer: int  # the same of the norm that comes after it
    dtype: tl.dtype


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(x, base, total, normed, inner, outer, num_rows, WIDTH: tl.constexpr):
    """total = base + x, x after the `inner` norm; normed is total, or x where nothing is added, after the `outer` one.

    x, base: `Lines`; inner, outer: `Weights`; total, normed: contiguous. What WIDTH leaves out may be None. `total` may
    be `base`.
    """
    r = tl.program_id(0) * WIDTH.rows + tl.arange(0, WIDTH.rows)[:, None]
    d = tl.arange(0, WIDTH.padded)[None, :]
    is_value = (r < num_rows) & (d < WIDTH.columns)
    r = r.to(tl.int64)
    value = tl.load(x.data + r * x.row + d, mask=is_value, other=0.0).to(tl.float32)
    if WIDTH.inner > 0:
        value = _normalised(value, inner, d, WIDTH.inner, WIDTH)
    if WIDTH.adds:
        value += tl.load(base.data + r * base.row + d, mask=is_value, other=0.0).to(tl.float32)
        value = value.to(WIDTH.dtype).to(tl.float32)
        tl.store(total + r * WIDTH.columns + d, value.to(WIDTH.dtype), mask=is_value)
    if WIDTH.outer > 0:
        value = _normalised(value, outer, d, WIDTH.outer, WIDTH)
        tl.store(normed + r * WIDTH.columns + d, value.to(WIDTH.dtype), mask=is_value)


@triton.jit
def _normalised(value, weights, d, ROUNDING: tl.constexpr, WIDTH: tl.constexpr):
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / WIDTH.columns + weights.epsilon)
    return weighted(value * scale, tl.load(weights.weight + d, mask=d < WIDTH.columns, other=0.0), ROUNDING, WIDTH)


@triton.jit
def weighted(value, weight, ROUNDING: tl.constexpr, SHAPE: tl.constexpr):
    """A norm's quotient times its weights, rounded."""
    if ROUNDING == _BEFORE:
        value = value.to(SHAPE.dtype).to(tl.float32)
    return (value * weight).to(SHAPE.dtype).to(tl.float32)


@triton.jit
def gate_kernel(gates, others, out, COLUMNS, TILE: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gates) * others, TILE values of a row: gates and others `Lines`, out contiguous [rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_value = c < COLUMNS
    gate = tl.load(gates.data + row * gates.row + c, mask=is_value, other=0.0).to(tl.float32)
    other = tl.load(others.data + row * others.row + c, mask=is_value, other=0.0).to(tl.float32)
    if ACTIVATION == _SILU:
        steep = gate
    else:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate * tl.sigmoid(steep)).to(DTYPE).to(tl.float32)
    tl.store(out + row * COLUMNS + c, (active * other).to(DTYPE), mask=is_value)
