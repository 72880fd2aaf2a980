"""Attention of many rows of one sequence: its context is widened once, and torch's fused attention reads it.

For full attention without softcap and sinks. Unlike that of `attend`, a row's result depends in its last bits on the
chunk that it is computed in.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from rekindle.kv import q4h
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle_cuda.formats import widen_kernel
from rekindle_cuda.places import DTYPES, MOST_TILE, NATIVE, Form, Values, order_of

MOST_ROWS = 256  # of a sequence in a step that are cheaper to compute over its codes


def widened(values: Values, table: Tensor, num_tokens: int, tokens: int, dtype: torch.dtype) -> Tensor:
    """K or V of a sequence's first tokens, as stored but for their type: [heads, num_tokens, dim], in two halves."""
    stored, form = values
    heads, tile = stored.codes.shape[1], min(tokens, MOST_TILE)
    out = torch.empty(heads, num_tokens, form.dim, dtype=dtype, device=table.device)
    grid = (-(-num_tokens // tile), heads)
    widen_kernel[grid](stored, table, out, num_tokens, FORM=form, TOKENS=tokens, TILE=tile, DTYPE=DTYPES[dtype])
    return out


def attend_prompt(
    queries: Tensor, span: SequenceSpan, layout: StepLayout, keys: Values, values: Values, *, scaling: float
) -> Tensor:
    """Attend with the rows of one span, prepared as for `attend_kernel`: [rows, heads, dim] of V."""
    num_tokens = span.start + span.num_rows
    table = torch.from_numpy(layout.context(None, span)).to(queries.device, non_blocking=True)
    k, v = (widened(each, table, num_tokens, layout.block_tokens, queries.dtype) for each in (keys, values))
    out = scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=causal_lower_right(span.num_rows, num_tokens),
        scale=scaling,
        enable_gqa=True,
    )[0].transpose(0, 1)
    if values.form.format == NATIVE:
        return out
    return out.float() @ _rotation_back(values.form, queries.device)


@lru_cache(maxsize=64)
def _rotation_back(form: Form, device: torch.device) -> Tensor:
    """fp32 [dim, dim]: from a rotated vector in two halves to the model's dimensions, multiplied from the right."""
    return q4h.constant(q4h.rotation_matrix(form.dim)[:, order_of(form)].T, torch.float32, device)
