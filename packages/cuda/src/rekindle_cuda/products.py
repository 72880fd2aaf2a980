"""Products of rows in 8 bits and packed weights in Triton: `multiply_kernel`, by tiles for few rows or for many.

Sums are whole numbers and exact, so that a row's bits depend on neither tiles nor company: they are those of the
processor's kernels for the same row. TILE: a `packing.Tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP: tl.constexpr = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_kernel(rows, weights, bias, out, num_rows, TILE: tl.constexpr, BIASED: tl.constexpr):
    """One tile of out `Matrix` [num_rows, columns]: rows `Rounded` times `Held`, plus a bias, rounded once."""
    n = tl.program_id(1) * TILE.columns + tl.arange(0, TILE.columns)
    m = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    n_at = tl.minimum(n, weights.columns - 1).to(tl.int64)[:, None]  # what is beyond is computed and not stored
    m_at = tl.minimum(m, num_rows - 1).to(tl.int64)[None, :]
    x = rows.numbers + m_at * weights.padded
    held = weights.numbers + n_at * weights.stride
    sums = tl.full([TILE.columns, TILE.rows], 0, tl.int32)
    if TILE.in_4_bits:
        multipliers = weights.multipliers + n_at * weights.groups
        j = tl.arange(0, TILE.depth // 2)
        of_low = ((j // 64) * 128 + j % 64)[:, None]
        for k in range(weights.padded // TILE.depth):
            codes = tl.load(held + k * (TILE.depth // 2) + j[None, :])
            low, high = _multipliers(multipliers + k * (TILE.depth // _GROUP), TILE)
            first = tl.load(x + k * TILE.depth + of_low)
            second = tl.load(x + k * TILE.depth + 64 + of_low)
            sums = tl.dot(((codes << 4) >> 4) * low, first, sums, out_dtype=tl.int32)
            sums = tl.dot((codes >> 4) * high, second, sums, out_dtype=tl.int32)
    else:
        j = tl.arange(0, TILE.depth)
        for k in range(0, weights.padded, TILE.depth):
            sums = tl.dot(tl.load(held + k + j[None, :]), tl.load(x + k + j[:, None]), sums, out_dtype=tl.int32)
    value = sums.to(tl.float32) * tl.load(rows.scales + m_at) * tl.load(weights.scales + n_at)
    if BIASED:
        value += tl.load(bias + n_at).to(tl.float32)
    at = out.data + m_at * out.stride + n[:, None]
    tl.store(at, value.to(out.data.dtype.element_ty), mask=(n < weights.columns)[:, None] & (m < num_rows)[None, :])


@triton.jit
def _multipliers(at, TILE: tl.constexpr):
    """Those of a tile's low and high codes, from each place of `at` [columns, 1] on: int8 [columns, depth / 2] each."""
    BLOCKS: tl.constexpr = TILE.depth // 128
    each = tl.load(at + tl.arange(0, BLOCKS * 4)[None, :])
    of_halves = tl.permute(tl.reshape(each, (TILE.columns, BLOCKS, 2, 2)), (0, 1, 3, 2))
    low, high = tl.split(of_halves)  # [columns, BLOCKS, 2]
    return _spread(low, TILE.columns, BLOCKS), _spread(high, TILE.columns, BLOCKS)


@triton.jit
def _spread(multipliers, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    wide = tl.broadcast_to(multipliers[:, :, :, None], (COLUMNS, BLOCKS, 2, _GROUP))
    return tl.reshape(wide, (COLUMNS, BLOCKS * 2 * _GROUP))
