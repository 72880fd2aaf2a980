"""The KV formats inside Triton's kernels: vectors are rotated, encoded and stored; stored values are read back.

Owns no format: bytes are those of `kv.q4h` and `kv.q8h`, bit for bit, which holds only without fused multiplications
(`enable_fp_fusion=False`). A vector is handled in two halves, so that no nibble has to move: of Q4H in *byte order*,
where byte j of a token's codes has one dimension in its low nibble and the dimension 2 further in its high one; of the
others the first and the second half of the dimensions. FORM: a `places.Form`. Nothing is compiled again for a number of
rows or tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rekindle_cuda import places

_NATIVE: tl.constexpr = tl.constexpr(places.NATIVE)
_Q4H: tl.constexpr = tl.constexpr(places.Q4H)
_Q8H: tl.constexpr = tl.constexpr(places.Q8H)


@triton.jit
def rotated(x, signs, R: tl.constexpr, FORM: tl.constexpr):
    """`q4h.rotate` of x fp32 [R, size], one sub-block: butterflies over distances 1, 2, 4, ..."""
    x = x * tl.load(signs + tl.arange(0, FORM.size))[None, :]
    return butterflies(x, R, FORM.size, FORM.log) * FORM.factor


@triton.jit
def butterflies(x, R: tl.constexpr, SIZE: tl.constexpr, LOG: tl.constexpr):
    """The Walsh-Hadamard transform of the rows of x [R, SIZE], SIZE = 2^LOG."""
    for stage in tl.static_range(LOG):
        pairs = tl.reshape(x, (R, SIZE // (2 << stage), 2, 1 << stage))
        first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), (R, SIZE))
    return x


@triton.jit
def place_of(dim, FORM: tl.constexpr):
    """Where a dimension stands in a vector of two halves."""
    if FORM.format == _Q4H:
        i = dim % 8
        place = 4 * (dim // 8) + 2 * (i & 1) + (i >> 2) + (FORM.dim // 2) * ((i >> 1) & 1)
    else:
        place = dim
    return place


@triton.jit(do_not_specialize=["num_rows"])
def store_kernel(
    x, to, places, worst, signs, inverse_scales, num_rows, FORM: tl.constexpr, TOKENS: tl.constexpr, R: tl.constexpr
):
    """Rows of one head, and of one sub-block of a rotated format, into their places: x `Rows` [rows, heads, dim].

    `to`: `Stored`; `places`: `Places`. `worst` of a row that is not finite becomes infinite.
    """
    r = tl.program_id(0) * R + tl.arange(0, R)
    head, part = tl.program_id(1), tl.program_id(2)
    d = part * FORM.size + tl.arange(0, FORM.size)
    is_row = r < num_rows
    wanted = is_row[:, None] & (d < FORM.dim)[None, :]
    value = tl.load(x.data + r[:, None].to(tl.int64) * x.row + head * x.head + d[None, :], mask=wanted, other=0.0)
    store_rows(value, r, is_row, head, part, to, places, worst, signs, inverse_scales, FORM, TOKENS, R)


@triton.jit
def store_rows(
    value,
    r,
    is_row,
    head,
    part,
    to,
    places,
    worst,
    signs,
    inverse_scales,
    FORM: tl.constexpr,
    TOKENS: tl.constexpr,
    R: tl.constexpr,
):
    """Encode and store the values [R, size] of a head's sub-block of rows r [R]."""
    d = part * FORM.size + tl.arange(0, FORM.size)
    wanted = is_row[:, None] & (d < FORM.dim)[None, :]
    block = tl.load(places.blocks + r, mask=is_row, other=-1).to(tl.int64)[:, None]
    token = (head * TOKENS + tl.load(places.offsets + r, mask=is_row, other=0))[:, None]
    y = value.to(tl.float32)
    if FORM.format != _NATIVE:
        y = rotated(y, signs, R, FORM)
    is_finite = tl.abs(y) < float("inf")
    tl.store(worst + r, float("inf"), mask=is_row & (tl.min(is_finite.to(tl.int32), 1) == 0))
    codes, scales = to.codes + block * to.codes_block, to.scales + block * to.scales_block
    if FORM.format == _NATIVE:
        at = codes + token * FORM.dim + d[None, :]
        tl.store(at, tl.where(is_finite, value, 0.0), mask=wanted & (block >= 0))
    else:
        groups = tl.reshape(tl.where(is_finite, y, 0.0), (R, FORM.size // FORM.group, FORM.group))
        largest = tl.max(tl.abs(groups), 2)
        if FORM.format == _Q4H:
            scale = _store_q4h(codes + token * (FORM.dim // 8), groups, largest, inverse_scales, part, block, R, FORM)
        else:
            scale = _store_q8h(codes + token * FORM.dim + d[None, :], groups, largest, block, R, FORM)
        g = part * (FORM.size // FORM.group) + tl.arange(0, FORM.size // FORM.group)
        tl.store(scales + token * (FORM.dim // FORM.group) + g[None, :], scale.to(tl.uint8), mask=block >= 0)


@triton.jit
def _store_q4h(at, groups, largest, inverse_scales, part, block, R: tl.constexpr, FORM: tl.constexpr):
    """Store the words of `groups` [R, groups, group] from the places `at` int32 [R, 1] on; their scale bytes."""
    half = largest.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32) & 0x7FFF
    scale = tl.minimum(tl.maximum((half + 127) >> 7, 8), 0xF7)
    level = tl.floor(groups * tl.load(inverse_scales + scale)[:, :, None]) + 8.0
    eight = tl.reshape(tl.minimum(tl.maximum(level, 0.0), 15.0).to(tl.int32), (R, FORM.size // 8, 8))
    i = tl.arange(0, 8)
    shift = 4 * ((i >> 1) & 1) + 16 * (i & 1) + 8 * (i >> 2)
    words = tl.sum(eight << shift[None, None, :], 2)
    w = part * (FORM.size // 8) + tl.arange(0, FORM.size // 8)
    tl.store(at + w[None, :], words, mask=block >= 0)
    return tl.where(largest == 0.0, 0, scale)


@triton.jit
def _store_q8h(at, groups, largest, block, R: tl.constexpr, FORM: tl.constexpr):
    """Store the codes of `groups` [R, groups, group] to the places `at` int8 [R, size]; their scale bytes."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    scale = tl.minimum(tl.maximum(exponent, 7), 254)
    inverse = ((260 - scale) << 23).to(tl.float32, bitcast=True)
    level = groups * inverse[:, :, None]
    level = (level + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to whole numbers, half to even
    level = tl.reshape(tl.minimum(tl.maximum(level, -127.0), 127.0), (R, FORM.size))
    tl.store(at, level.to(tl.int8), mask=block >= 0)
    return scale


@triton.jit(do_not_specialize=["num_rows"])
def rotate_kernel(q, out, signs, num_rows, HEADS: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr):
    """Queries `Rows` [rows, HEADS, dim], one sub-block of one head, as the keys of a rotated format are stored."""
    r = (tl.program_id(0) * R + tl.arange(0, R))[:, None]
    head = tl.program_id(1)
    d = tl.program_id(2) * FORM.size + tl.arange(0, FORM.size)
    x = tl.load(q.data + r.to(tl.int64) * q.row + head * q.head + d[None, :], mask=r < num_rows, other=0.0)
    store_query(x, r, head, d, out, signs, num_rows, HEADS, FORM, R)


@triton.jit
def store_query(x, r, head, d, out, signs, num_rows, HEADS: tl.constexpr, FORM: tl.constexpr, R: tl.constexpr):
    """Store the values x [R, size] of rows r [R, 1] and dimensions d of a query as keys of this form are stored."""
    y = x.to(tl.float32)
    if FORM.format != _NATIVE:
        y = rotated(y, signs, R, FORM)
    at = out + (r.to(tl.int64) * HEADS + head) * FORM.dim + place_of(d, FORM)[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(r < num_rows) & (d < FORM.dim)[None, :])


@triton.jit
def halves(values, block, token, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """Values of tokens of a block as two [tokens, padded] in `DTYPE`, exact; columns from dim / 2 on are 0.

    `values`: `Stored`; `token`: head * TOKENS + token in the block.
    """
    HALF: tl.constexpr = FORM.dim // 2
    codes = values.codes + block * values.codes_block
    scales = values.scales + block * values.scales_block + token[:, None] * (FORM.dim // FORM.group)
    if FORM.format == _Q4H:
        # The bytes of a word's codes, in the order in which they lie there.
        packed = _row(codes + token[:, None] * HALF, HALF, FORM.padded).to(tl.int32)
        step = _spread(scales, FORM.dim // FORM.group, FORM.group // 2, FORM.padded).to(tl.int32)
        # A scale's byte has four bits of fp16's exponent and three of its mantissa: moved to fp32, less 2^4.
        step = tl.where((step == 0) | (step > 0xF7), 0, (step << 20) + (108 << 23)).to(tl.float32, bitcast=True)
        low, high = _level(packed & 15, DTYPE), _level(packed >> 4, DTYPE)
        first, second = low * step.to(DTYPE), high * step.to(DTYPE)
    elif FORM.format == _Q8H:
        at = codes + token[:, None] * FORM.dim
        first = _half_8(at, scales, 0, FORM, DTYPE)
        second = _half_8(at, scales, HALF, FORM, DTYPE)
    else:
        at = codes + token[:, None] * FORM.dim
        first, second = _row(at, HALF, FORM.padded).to(DTYPE), _row(at + HALF, HALF, FORM.padded).to(DTYPE)
    return first, second


@triton.jit
def _level(code, DTYPE: tl.constexpr):
    """2 * code - 15: a whole number in the last bits of 2^23 (of 2^7 in bf16) is that power plus the number."""
    if tl.bfloat16 == DTYPE:
        level = ((code << 1) | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 143.0
    else:
        level = ((code << 1) | 0x4B000000).to(tl.float32, bitcast=True) - 8388623.0
    return level.to(DTYPE)


@triton.jit
def _row(at, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """WIDTH numbers from each place of `at` [rows, 1] on, [rows, PADDED]: loads as wide as the hardware has."""
    j = tl.arange(0, PADDED)[None, :]
    if WIDTH == PADDED:
        found = tl.load(at + j)
    else:
        found = tl.load(at + j, mask=j < WIDTH, other=0)
    return found


@triton.jit
def _spread(at, GROUPS: tl.constexpr, EACH: tl.constexpr, PADDED: tl.constexpr):
    """GROUPS numbers from each place of `at` [rows, 1] on, EACH times one after the other: [rows, PADDED]."""
    found = _row(at, GROUPS, PADDED // EACH)
    ROWS: tl.constexpr = found.shape[0]
    return tl.reshape(tl.broadcast_to(found[:, :, None], (ROWS, PADDED // EACH, EACH)), (ROWS, PADDED))


@triton.jit
def _half_8(codes, scales, first, FORM: tl.constexpr, DTYPE: tl.constexpr):
    """One half of Q8H's values."""
    HALF: tl.constexpr = FORM.dim // 2
    if HALF % FORM.group == 0:
        scale = _spread(scales + first // FORM.group, HALF // FORM.group, FORM.group, FORM.padded).to(tl.int32)
    else:
        d = tl.minimum(first + tl.arange(0, FORM.padded), FORM.dim - 1)
        scale = tl.load(scales + (d // FORM.group)[None, :]).to(tl.int32)
    # 2^(byte - 133) in fp32; 0 for bytes that no encoder writes.
    step = tl.where((scale < 7) | (scale > 254), 0, (scale - 6) << 23).to(tl.float32, bitcast=True)
    return (_row(codes + first, HALF, FORM.padded).to(tl.float32) * step).to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def widen_kernel(
    values, table, out, num_tokens, FORM: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr
):
    """TILE tokens of one head as numbers, in two halves: out [heads, num_tokens, dim], of the blocks in `table`."""
    start, head = tl.program_id(0) * TILE, tl.program_id(1)
    block = tl.load(table + start // TOKENS).to(tl.int64)
    t, j = tl.arange(0, TILE), tl.arange(0, FORM.padded)
    first, second = halves(values, block, head * TOKENS + start % TOKENS + t, FORM, DTYPE)
    at = out + (head.to(tl.int64) * num_tokens + start + t)[:, None] * FORM.dim + j[None, :]
    is_value = (start + t < num_tokens)[:, None] & (j < FORM.dim // 2)[None, :]
    tl.store(at, first, mask=is_value)
    tl.store(at + FORM.dim // 2, second, mask=is_value)
