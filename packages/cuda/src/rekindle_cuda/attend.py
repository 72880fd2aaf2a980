"""Attention over blocks in Triton: pieces of a context each by themselves, then joined in order.

A *work item* is some rows of one sequence against one piece of its context. A row's pieces are cut by its own position
alone, and masked tokens change no sum, so that it sums the same numbers in the same order in any company and however
the context was split into steps. SHAPE: a `work.Shape`; K, V: `places.Form`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rekindle_cuda import work
from rekindle_cuda.formats import butterflies, halves, place_of

_FIELDS: tl.constexpr = tl.constexpr(work.FIELDS)
_MASKED: tl.constexpr = tl.constexpr(-1.0e30)
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_kernel(q, keys, values, todo, out, scaling, softcap, SHAPE: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Weighted sums of V over each item's tokens, before they are divided by the sum of weights.

    Rows of the queries q, `Rows`, are folded: (row, query head of the K/V head), `folded` of them. `todo`: `Work`;
    `out`: `Partial`.
    """
    m = tl.arange(0, SHAPE.folded)
    for each in range(tl.program_id(0), tl.load(todo.num_items) * SHAPE.kv_heads, tl.num_programs(0)):
        index, head = each // SHAPE.kv_heads, each % SHAPE.kv_heads
        item = todo.items + index * _FIELDS
        table, row, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        position, sees = tl.load(item + 3), tl.load(item + 4)
        begin, end = tl.load(item + 5), tl.load(item + 6)
        is_live = m < count * SHAPE.shared
        q_first, q_second = _queries(q, row, head, is_live, SHAPE, K)
        own = position + m // SHAPE.shared
        last = tl.maximum(own, sees - 1)  # the last token that a row attends to
        top = tl.full([SHAPE.folded], _MASKED, tl.float32)
        weight = tl.full([SHAPE.folded], 0.0, tl.float32)
        first = tl.full([SHAPE.folded, V.padded], 0.0, tl.float32)
        second = tl.full([SHAPE.folded, V.padded], 0.0, tl.float32)
        for start in range(begin, end, SHAPE.tile):
            block = tl.load(todo.tables + table + start // SHAPE.tokens).to(tl.int64)
            token = head * SHAPE.tokens + start % SHAPE.tokens + tl.arange(0, SHAPE.tile)
            k_first, k_second = halves(keys, block, token, K, SHAPE.dtype)
            scores = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
            scores = tl.dot(q_second, tl.trans(k_second), scores, input_precision="ieee") * scaling
            p, fade, top = _weights(scores, start, end, own, last, top, softcap, SHAPE)
            weight = weight * fade + tl.sum(p, 1)
            v_first, v_second = halves(values, block, token, V, SHAPE.dtype)
            p = p.to(SHAPE.dtype)
            first = tl.dot(p, v_first, first * fade[:, None], input_precision="ieee")
            second = tl.dot(p, v_second, second * fade[:, None], input_precision="ieee")
        _store_partial(out, tl.cast(each, tl.int64) * SHAPE.folded + m, is_live, first, second, top, weight, V)


@triton.jit
def _queries(q, row, head, is_live, SHAPE: tl.constexpr, K: tl.constexpr):
    """Folded rows of the queries in two halves, [folded, padded] each."""
    HALF: tl.constexpr = K.dim // 2
    m = tl.arange(0, SHAPE.folded)[:, None]
    j = tl.arange(0, K.padded)[None, :]
    at = q.data + (row + m // SHAPE.shared).to(tl.int64) * q.row + (head * SHAPE.shared + m % SHAPE.shared) * q.head + j
    is_query = is_live[:, None] & (j < HALF)
    first = tl.load(at, mask=is_query, other=0.0)
    return first.to(SHAPE.dtype), tl.load(at + HALF, mask=is_query, other=0.0).to(SHAPE.dtype)


@triton.jit
def _weights(scores, start, end, own, last, top, softcap, SHAPE: tl.constexpr):
    """Weights of a tile of tokens against the largest score so far, what older sums fade by, and the largest score."""
    if SHAPE.softcap:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    where = (start + tl.arange(0, SHAPE.tile))[None, :]
    is_seen = (where <= last[:, None]) & (where < end)
    if SHAPE.window > 0:
        is_seen = is_seen & (where > own[:, None] - SHAPE.window)
    scores = tl.where(is_seen, scores, _MASKED)
    highest = tl.maximum(top, tl.max(scores, 1))
    p = tl.where(is_seen, tl.exp2((scores - highest[:, None]) * _LOG2E), 0.0)
    return p, tl.exp2((top - highest) * _LOG2E), highest


@triton.jit
def _store_partial(out, place, is_live, first, second, top, weight, V: tl.constexpr):
    j = tl.arange(0, V.padded)[None, :]
    is_value = is_live[:, None] & (j < V.dim // 2)
    tl.store(out.sums + place[:, None] * V.dim + j, first, mask=is_value)
    tl.store(out.sums + place[:, None] * V.dim + V.dim // 2 + j, second, mask=is_value)
    tl.store(out.extremes + place * 2, top, mask=is_live)
    tl.store(out.extremes + place * 2 + 1, weight, mask=is_live)


@triton.jit
def join_kernel(
    partial, pieces, sinks, signs, out, SHAPE: tl.constexpr, V: tl.constexpr, SINKS: tl.constexpr, CODED: tl.constexpr
):
    """Join a row's pieces in their order, divide, and rotate back: one sub-block of one head of out [rows, heads, dim].

    `pieces` int32 [rows, 4]: a row's first item, the number of its items, its place among their rows, and its place in
    the step, -1: there is no such row. A row without items becomes zeros.
    """
    head = tl.program_id(1)
    d = tl.program_id(2) * V.size + tl.arange(0, V.size)
    own_pieces = pieces + tl.program_id(0) * 4
    item, count, inside = tl.load(own_pieces), tl.load(own_pieces + 1), tl.load(own_pieces + 2)
    top = tl.full([], _MASKED, tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    value = tl.full([V.size], 0.0, tl.float32)
    for each in range(count):
        at = ((item + each) * SHAPE.kv_heads + head // SHAPE.shared).to(tl.int64) * SHAPE.folded
        at += inside * SHAPE.shared + head % SHAPE.shared
        own = tl.load(partial.extremes + at * 2)
        highest = tl.maximum(top, own)
        fade, share = tl.exp2((top - highest) * _LOG2E), tl.exp2((own - highest) * _LOG2E)
        weight = weight * fade + tl.load(partial.extremes + at * 2 + 1) * share
        piece = tl.load(partial.sums + at * V.dim + place_of(d, V), mask=d < V.dim, other=0.0)
        value, top = value * fade + piece * share, highest
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(top, sink)
        fade = tl.exp2((top - highest) * _LOG2E)
        weight, value = weight * fade + tl.exp2((sink - highest) * _LOG2E), value * fade
    value = tl.where(count > 0, value / weight, 0.0)
    if CODED:
        value = tl.reshape(butterflies(tl.reshape(value, (1, V.size)), 1, V.size, V.log), (V.size,))
        value = value * V.factor * tl.load(signs + tl.arange(0, V.size))
    row = tl.load(own_pieces + 3).to(tl.int64)
    at = out.data + row * out.row + head * out.head + d
    tl.store(at, value.to(out.data.dtype.element_ty), mask=(d < V.dim) & (row >= 0))
