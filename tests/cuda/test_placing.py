"""q, k and v on their way from products to blocks, against torch and the bytes that it writes.

In fp32 by the interpreter, which cuts bf16; on a card in bf16, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.model.layer_parts import ROUNDINGS
from rekindle_cuda.attention import Scoring, TritonAttention
from rekindle_cuda.rows import turned
from tests.cuda.test_attention import DEVICE
from tests.cuda.test_rows import DTYPES, norms, rows, same
from tests.kv.steps import Layer, block_bytes

NATIVE = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, paired: bool) -> Tensor:
    """Rotary embedding as models of transformers write it, x [rows, heads, dim]."""
    dims, cos, sin = cos.shape[-1], cos[:, None], sin[:, None]
    part, rest = x[..., :dims], x[..., dims:]
    if paired:
        cos, sin = (each[..., : dims // 2].repeat_interleave(2, dim=-1) for each in (cos, sin))
        other = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    return torch.cat((part * cos + other * sin, rest), -1)


def attention_of(kind: Any, layer: Layer, num_rows: int, device: Any) -> tuple[Any, AttentionPlan]:
    """Over a new arena, and a step of all rows but a spare one."""
    layout = StepLayout([SequenceSpan([2, 0], 0, num_rows - 1, 0)], layer.block_tokens, num_rows)
    return kind(KVArena(layer.layout, 3, device)), AttentionPlan(layout, device)


@settings(max_examples=12)
@given(st.data())
def test_heads_are_normed_rotated_and_stored(data: st.DataObject) -> None:
    dtype, dim = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([16, 48, 64, 80]), "dim")
    formats = st.sampled_from(["q4h", "q8h", NATIVE[dtype]])
    k_format, v_format = data.draw(formats, "K"), data.draw(formats, "V")
    kv_heads, heads = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 4)]), "heads")
    layer = Layer(dtype, k_format, v_format, k_dim=dim, v_dim=dim, kv_heads=kv_heads, heads=heads, block_tokens=16)
    rotated = data.draw(st.sampled_from([dim, dim // 2, 8]), "rotated")
    paired, is_shared = data.draw(st.booleans(), "pairs of neighbours"), data.draw(st.booleans(), "cos of one half")
    num_rows = data.draw(st.integers(2, 18), "rows")
    angles = torch.randn(num_rows, rotated // 2, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    cos, sin = (each(torch.cat((angles, angles), -1)).to(dtype) for each in (torch.cos, torch.sin))
    positions = tuple(each[:, : rotated // 2] if is_shared and not paired else each for each in (cos, sin))
    qkv = rows(num_rows, (heads + 2 * kv_heads) * dim, dtype, 6).unflatten(-1, (-1, dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    (q_parts, q_norm), (k_parts, k_norm) = (
        norms(dim, data.draw(st.sampled_from([None, *ROUNDINGS]), "norm"), seed) for seed in (7, 8)
    )
    wanted_q, wanted_k = (
        rotary(x if parts is None else parts.computed(x), cos, sin, paired=paired)
        for x, parts in ((q, q_parts), (k, k_parts))
    )
    ours, plan = attention_of(TritonAttention, layer, num_rows, DEVICE)
    theirs, their_plan = attention_of(PagedAttention, layer, num_rows, "cpu")
    queries = ours.place(
        5, q, k, v, plan, turned((heads, kv_heads), (q_norm, k_norm), positions, dim, rotated, paired=paired)
    )
    theirs.write(5, wanted_k.cpu(), v.cpu(), their_plan)
    different = block_bytes(ours.arena, range(3)) != block_bytes(theirs.arena, range(3))
    if k_norm is None or k_format != NATIVE[dtype]:  # a norm's sum in another order moves few codes
        assert different.float().mean() <= (0 if k_norm is None else 0.01)
    assert plan.failed_spans() == []
    # Attention is what reads queries that are rotated as keys are: that of a few rows, among all of them.
    first = data.draw(st.integers(0, num_rows - 2), "first row that attends")
    num_some, scoring = min(3, num_rows - 1 - first), layer.scoring
    some = AttentionPlan(StepLayout([SequenceSpan([2, 0], first, num_some, first)], 16, num_some), DEVICE)
    same(
        ours.attend_placed(5, queries[first:][:num_some], some, Scoring(scoring["scaling"], None, None, None)),
        ours.attend(5, wanted_q[first:][:num_some], some, **scoring),
    )


@pytest.mark.parametrize("at", [1, 2])
def test_rows_that_are_not_finite_fail(at: int) -> None:
    layer = Layer(DTYPES[0], k_dim=16, v_dim=16, heads=2)
    ours, plan = attention_of(TritonAttention, layer, 5, DEVICE)
    qkv = [torch.ones(5, heads, 16, dtype=DTYPES[0], device=DEVICE) for heads in (2, 2, 2)]
    qkv[at][3, 1, 7] = torch.nan
    ones = torch.ones(5, 16, dtype=DTYPES[0], device=DEVICE)
    ours.place(5, *qkv, plan, turned((2, 2), (None, None), (ones, ones), 16, 16, paired=False))
    assert plan.failed_spans() == [0]
    ours.check()
