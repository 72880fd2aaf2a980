"""What happens to rows between products, in Triton: norms, sums, gates, rotary embedding.

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
    return _weighted(value * scale, tl.load(weights.weight + d, mask=d < WIDTH.columns, other=0.0), ROUNDING, WIDTH)


@triton.jit
def _weighted(value, weight, ROUNDING: tl.constexpr, SHAPE: tl.constexpr):
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


class Positions(NamedTuple):
    """cos and sin of a step's positions [rows, dims], contiguous."""

    cos: Tensor
    sin: Tensor


class Heads(NamedTuple):
    """What norms of heads and rotary embedding are compiled for."""

    q_heads: int
    dim: int
    rotated: int  # dimensions, the first ones of a head; they are halves, or pairs of neighbours
    paired: bool
    cos_dims: int  # of a row of `Positions`; as many as are rotated, or half of them
    half: int  # of the rotated dimensions, up to a power of two
    rest: int  # the others, up to a power of two
    rows: int  # of a program
    q_rounding: int  # when the norm of q rounds; 0: there is none
    k_rounding: int
    dtype: tl.dtype


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(q, k, positions, q_norm, k_norm, num_rows, HEADS: tl.constexpr):
    """Norm and rotate rows of one head of q or k in place: q, k `places.Rows`; positions: `Positions`; norms `Weights`
    or None."""
    head = tl.program_id(1)
    if head < HEADS.q_heads:
        _place_head(q, head, positions, q_norm, num_rows, HEADS.q_rounding, HEADS)
    else:
        _place_head(k, head - HEADS.q_heads, positions, k_norm, num_rows, HEADS.k_rounding, HEADS)


@triton.jit
def _place_head(x, head, positions, norm, num_rows, ROUNDING: tl.constexpr, HEADS: tl.constexpr):
    HALF: tl.constexpr = HEADS.rotated // 2
    r = tl.program_id(0) * HEADS.rows + tl.arange(0, HEADS.rows)[:, None]
    j = tl.arange(0, HEADS.half)[None, :]
    is_row, is_half = r < num_rows, j < HALF
    r = r.to(tl.int64)
    if HEADS.paired:
        one, other = 2 * j, 2 * j + 1
    else:
        one, other = j, j + HALF
    at = x.data + r * x.row + head * x.head
    first = tl.load(at + one, mask=is_row & is_half, other=0.0).to(tl.float32)
    second = tl.load(at + other, mask=is_row & is_half, other=0.0).to(tl.float32)
    if ROUNDING > 0:
        squares = tl.sum(first * first, 1, keep_dims=True) + tl.sum(second * second, 1, keep_dims=True)
        if HEADS.rotated < HEADS.dim:
            d = HEADS.rotated + tl.arange(0, HEADS.rest)[None, :]
            is_rest = is_row & (d < HEADS.dim)
            rest = tl.load(at + d, mask=is_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1, keep_dims=True)
            rest *= tl.rsqrt(squares / HEADS.dim + norm.epsilon)
            rest = _weighted(rest, tl.load(norm.weight + d, mask=d < HEADS.dim, other=0.0), ROUNDING, HEADS)
            tl.store(at + d, rest.to(HEADS.dtype), mask=is_rest)
        scale = tl.rsqrt(squares / HEADS.dim + norm.epsilon)
        first = _weighted(first * scale, tl.load(norm.weight + one, mask=is_half, other=0.0), ROUNDING, HEADS)
        second = _weighted(second * scale, tl.load(norm.weight + other, mask=is_half, other=0.0), ROUNDING, HEADS)
    of_first = r * HEADS.cos_dims + j
    if HEADS.paired or HEADS.cos_dims == HALF:  # both have the same
        of_second = of_first
    else:
        of_second = of_first + HALF
    turned = _product(first, positions.cos + of_first, is_row & is_half, HEADS)
    turned -= _product(second, positions.sin + of_first, is_row & is_half, HEADS)
    tl.store(at + one, turned.to(HEADS.dtype), mask=is_row & is_half)
    turned = _product(second, positions.cos + of_second, is_row & is_half, HEADS)
    turned += _product(first, positions.sin + of_second, is_row & is_half, HEADS)
    tl.store(at + other, turned.to(HEADS.dtype), mask=is_row & is_half)


@triton.jit
def _product(x, factors, wanted, HEADS: tl.constexpr):
    """x times what lies at these places, rounded."""
    return (x * tl.load(factors, mask=wanted, other=0.0).to(tl.float32)).to(HEADS.dtype).to(tl.float32)
