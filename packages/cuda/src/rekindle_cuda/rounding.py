"""Vectors as whole numbers inside Triton's kernels: rows and weights in 8 bits, weights in 4.

Owns no format: numbers, multipliers and scales are those of the processor's kernels (native/int8.hpp, native/int4.hpp),
bit for bit, which holds only without fused multiplications (`enable_fp_fusion=False`). ROTATION: a `packing.Rotation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rekindle_cuda.formats import butterflies

_GROUP: tl.constexpr = tl.constexpr(32)  # values that share a multiplier
_HALF: tl.constexpr = tl.constexpr(64)  # of a block of values whose codes share bytes: see `packing`
_MULTIPLES: tl.constexpr = tl.constexpr(16)
_HIGHEST: tl.constexpr = tl.constexpr(7.0)
_LEAST: tl.constexpr = tl.constexpr(2.0**-100)  # vectors below it count as 0
_WHOLE: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken away, it rounds, half to even


@triton.jit(do_not_specialize=["num_rows"])
def round_kernel(x, to, num_rows, depth, padded, signs, LARGEST: tl.constexpr, ROTATION: tl.constexpr):
    """Rows of x `Matrix` [num_rows, depth], rotated, in units of their scales: to `Rounded`, 0 from `depth` on.

    The largest value of a row is LARGEST units. Where `to` has whole numbers, values are rounded. A row of nearly
    nothing has scale 0, one that is not finite NaN, and only zeros.
    """
    CHUNK: tl.constexpr = ROTATION.pieces * ROTATION.size
    each = tl.arange(0, ROTATION.rows * ROTATION.pieces)[:, None]  # pieces of one row after the other
    row = tl.program_id(0) * ROTATION.rows + each // ROTATION.pieces
    row = tl.minimum(row, num_rows - 1).to(tl.int64)  # the last one several times, to the same numbers
    at = (each % ROTATION.pieces) * ROTATION.size + tl.arange(0, ROTATION.size)[None, :]
    values, out = x.data + row * x.stride, to.numbers + row * padded
    y = _rotated(values, at, depth, signs, ROTATION)  # of most layers whole rows
    most = _most(y, ROTATION)
    for first in range(CHUNK, depth, CHUNK):
        most = tl.maximum(most, _most(_rotated(values, first + at, depth, signs, ROTATION), ROTATION))
    largest = most.to(tl.float32, bitcast=True)
    is_plain = (largest > _LEAST) & (largest < float("inf"))
    some, units = tl.where(is_plain, largest, 1.0), tl.full(largest.shape, LARGEST, tl.float32)
    inverse = tl.div_rn(units, some)
    _store_units(out, at, y, padded, is_plain, inverse)
    for first in range(CHUNK, padded, CHUNK):
        _store_units(out, first + at, _rotated(values, first + at, depth, signs, ROTATION), padded, is_plain, inverse)
    scale = tl.where(largest <= _LEAST, 0.0, float("nan"))
    tl.store(to.scales + row, tl.where(is_plain, tl.div_rn(some, units), scale))


@triton.jit
def _rotated(values, at, depth, signs, ROTATION: tl.constexpr):
    """fp32 [rows * pieces, size]: those at the places `at` of rows that begin at `values`; 0 from `depth` on."""
    x = tl.load(values + at, mask=at < depth, other=0.0).to(tl.float32)
    x *= tl.load(signs + tl.arange(0, ROTATION.size))[None, :]
    return butterflies(x, ROTATION.rows * ROTATION.pieces, ROTATION.size, ROTATION.log) * ROTATION.factor


@triton.jit
def _most(y, ROTATION: tl.constexpr):
    """The largest magnitude of a row, for each of its pieces: bits, in which NaN is the largest of all."""
    of_pieces = tl.max(tl.abs(y).to(tl.int32, bitcast=True), 1)
    of_rows = tl.max(tl.reshape(of_pieces, (ROTATION.rows, ROTATION.pieces)), 1)
    wide = tl.broadcast_to(of_rows[:, None], (ROTATION.rows, ROTATION.pieces))
    return tl.reshape(wide, (ROTATION.rows * ROTATION.pieces, 1))


@triton.jit
def _store_units(out, at, y, padded, is_plain, inverse):
    units = tl.where(is_plain, y, 0.0) * inverse
    if out.dtype.element_ty == tl.int8:
        units = (units + _WHOLE) - _WHOLE
    tl.store(out + at, units.to(out.dtype.element_ty), mask=at < padded)


@triton.jit
def group_kernel(x, codes, multipliers, num_blocks, blocks, groups, BLOCKS: tl.constexpr):
    """Blocks of columns of units, x fp32 [num_blocks, 128], in 4 bits; a column has so many `blocks`.

    codes int8 [num_blocks, 64]: byte j of a block has the code of its value j in the low nibble, that of value 64 + j
    in the high one; multipliers int8 [columns, groups], four of each block.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    each = first * 4 + tl.arange(0, BLOCKS * 4)
    is_group, own = each < num_blocks * 4, each // 4
    best = _best_multipliers(x + each * _GROUP, is_group, BLOCKS * 4)
    tl.store(multipliers + own // blocks * groups + own % blocks * 4 + each % 4, best.to(tl.int8), mask=is_group)
    low, high = tl.split(tl.permute(tl.reshape(best, (BLOCKS, 2, 2)), (0, 2, 1)))  # groups of the nibbles [BLOCKS, 2]
    block = (first + tl.arange(0, BLOCKS))[:, None, None]
    j = (tl.arange(0, 2) * _GROUP)[None, :, None] + tl.arange(0, _GROUP)[None, None, :]
    is_value = (block < num_blocks) & (j < _HALF)
    at = x + block * (2 * _HALF) + j
    lower = _codes(tl.load(at, mask=is_value, other=0.0), low[:, :, None])
    higher = _codes(tl.load(at + _HALF, mask=is_value, other=0.0), high[:, :, None])
    both = (lower & 15) | ((higher & 15) << 4)
    tl.store(codes + block * _HALF + j, both.to(tl.int8), mask=is_value)


@triton.jit
def _best_multipliers(at, is_group, GROUPS: tl.constexpr):
    """For each group, from its place in `at` on, the multiplier with the least squared error: int32 [GROUPS].

    Errors are summed in the order of values; of several multipliers it is the smallest.
    """
    multiple = (tl.arange(0, _MULTIPLES) + 1).to(tl.float32)[None, :]
    error = tl.full([GROUPS, _MULTIPLES], 0.0, tl.float32)
    for k in range(_GROUP):
        value = tl.load(at + k, mask=is_group, other=0.0)[:, None]
        off = value - _levels(value, multiple) * multiple
        error += off * off
    return tl.argmin(error, 1) + 1


@triton.jit
def _levels(values, multiple):
    """Whole numbers of this multiple, the nearest ones from -7 to 7."""
    level = values * tl.div_rn(tl.full(multiple.shape, 1.0, tl.float32), multiple)
    level = (level + _WHOLE) - _WHOLE
    return tl.minimum(tl.maximum(level, -_HIGHEST), _HIGHEST)


@triton.jit
def _codes(values, multiplier):
    return _levels(values, multiplier.to(tl.float32)).to(tl.int32)
