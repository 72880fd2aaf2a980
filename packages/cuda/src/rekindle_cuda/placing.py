"""From products to blocks in Triton: q, k and v of a step in one launch.

    q ──norm of heads──▶ rotary embedding ──▶ rotated as keys are stored, for `attend`
    k ──norm of heads──▶ rotary embedding ──▶ encoded and stored
    v ──────────────────────────────────────▶ encoded and stored

Every intermediate is rounded where transformers rounds it; formats are those of `formats`. TURN: a `Turn`; K, V:
`places.Form`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rekindle_cuda.elementwise import Weights, weighted
from rekindle_cuda.formats import store_query, store_rows


class Turn(NamedTuple):
    """What heads go through, for which kernels are compiled."""

    q_heads: int
    kv_heads: int
    dim: int
    whole: int  # the dimensions, up to a power of two
    rotated: int  # the first of them: halves, or pairs of neighbours
    paired: bool
    cos_dims: int  # of a row of cos and sin; as many as are rotated, or half of them
    q_rounding: int  # when the norm of q rounds; 0: there is none
    k_rounding: int
    dtype: tl.dtype


class Turned(NamedTuple):
    """Norms of heads, cos and sin [rows, cos_dims], contiguous, and what is done with them."""

    q_norm: Weights | None
    k_norm: Weights | None
    cos: Tensor
    sin: Tensor
    turn: Turn


@triton.jit(do_not_specialize=["num_rows"])
def place_kernel(
    q,
    k,
    v,
    queries,
    keys,
    values,
    places,
    worst,
    of_k,
    of_v,
    inverse_scales,
    q_norm,
    k_norm,
    cos,
    sin,
    num_rows,
    TURN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    TOKENS: tl.constexpr,
    R: tl.constexpr,
):
    """Rows of one head, of one sub-block of its format: q, k, v `places.Rows`; of_k, of_v: signs of their rotations.

    queries [rows, q_heads, dim]; keys, values: `Stored`; places: `Places`; `worst` as in `store_kernel`.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    head, part = tl.program_id(1), tl.program_id(2)
    is_row = r < num_rows
    if head < TURN.q_heads:
        if part * K.size < K.dim:
            d = part * K.size + tl.arange(0, K.size)
            x = _turned(q, r, is_row, head, d, cos, sin, q_norm, TURN.q_rounding, TURN)
            store_query(x, r[:, None], head, d, queries, of_k, num_rows, TURN.q_heads, K, R)
    elif head < TURN.q_heads + TURN.kv_heads:
        head -= TURN.q_heads
        if part * K.size < K.dim:
            d = part * K.size + tl.arange(0, K.size)
            x = _turned(k, r, is_row, head, d, cos, sin, k_norm, TURN.k_rounding, TURN)
            store_rows(x, r, is_row, head, part, keys, places, worst, of_k, inverse_scales, K, TOKENS, R)
    else:
        head -= TURN.q_heads + TURN.kv_heads
        if part * V.size < V.dim:
            d = part * V.size + tl.arange(0, V.size)[None, :]
            wanted = is_row[:, None] & (d < V.dim)
            x = tl.load(v.data + r[:, None].to(tl.int64) * v.row + head * v.head + d, mask=wanted, other=0.0)
            store_rows(x, r, is_row, head, part, values, places, worst, of_v, inverse_scales, V, TOKENS, R)


@triton.jit
def _turned(x, r, is_row, head, d, cos, sin, norm, ROUNDING: tl.constexpr, TURN: tl.constexpr):
    """Dimensions d of a head of rows r, after its norm and rotary embedding, rounded: [rows, dimensions]."""
    HALF: tl.constexpr = TURN.rotated // 2
    d = d[None, :]
    if TURN.paired:
        other, number, is_first = d ^ 1, d // 2, d % 2 == 0
    else:
        is_first = d < HALF
        other, number = tl.where(is_first, d + HALF, d - HALF), d
        if TURN.cos_dims == HALF:  # both halves have the same
            number = d % HALF
    row = r[:, None].to(tl.int64)
    at, is_row = x.data + row * x.row + head * x.head, is_row[:, None]
    is_value, is_rotated = is_row & (d < TURN.dim), is_row & (d < TURN.rotated)
    own = tl.load(at + d, mask=is_value, other=0.0).to(tl.float32)
    opposite = tl.load(at + other, mask=is_rotated, other=0.0).to(tl.float32)
    if ROUNDING > 0:
        i = tl.arange(0, TURN.whole)[None, :]
        every = tl.load(at + i, mask=is_row & (i < TURN.dim), other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(every * every, 1, keep_dims=True) / TURN.dim + norm.epsilon)
        own = weighted(own * scale, tl.load(norm.weight + d, mask=d < TURN.dim, other=0.0), ROUNDING, TURN)
        of_other = tl.load(norm.weight + other, mask=d < TURN.rotated, other=0.0)
        opposite = weighted(opposite * scale, of_other, ROUNDING, TURN)
    along = _product(own, cos + row * TURN.cos_dims + number, is_rotated, TURN)
    across = _product(opposite, sin + row * TURN.cos_dims + number, is_rotated, TURN)
    turned = tl.where(is_first, along - across, along + across)
    return tl.where(is_rotated, turned, own).to(TURN.dtype)


@triton.jit
def _product(x, factors, wanted, TURN: tl.constexpr):
    """x times what lies at these places, rounded."""
    return (x * tl.load(factors, mask=wanted, other=0.0).to(tl.float32)).to(TURN.dtype).to(tl.float32)
