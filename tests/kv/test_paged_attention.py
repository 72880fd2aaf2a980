"""The vectorised path against the definitions, and what it must leave alone or refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import attention_reference, relative_error, stored_vectors
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from tests.kv.steps import (
    BLOCK_TOKENS,
    Layer,
    Rows,
    agrees_where_rows_see_each_other,
    block_bytes,
    in_chunks,
    scattered_blocks,
    step,
)

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
BOUNDS = {BF16: 0.02, FP32: 3e-6, FP64: 1e-13}
LAYERS = [
    Layer(FP64),
    Layer(FP32),
    Layer(BF16),
    Layer(FP64, "fp64", "fp64"),
    Layer(FP32, "fp32", "fp32", window=70),
    Layer(BF16, "bf16", "bf16"),
    Layer(FP32, "fp32", "q4h", k_dim=48, v_dim=96),
    Layer(FP32, "q4h", "bf16", k_dim=80, v_dim=112),
    Layer(FP64, k_dim=80, v_dim=80, window=33),
    Layer(FP64, k_dim=96, v_dim=112, kv_heads=1, heads=5),
    Layer(FP64, k_dim=192, v_dim=128, kv_heads=4, heads=4),
    Layer(FP64, "q8h", "q8h", k_dim=80, v_dim=96),
    Layer(BF16, "q8h", "q4h"),
    Layer(FP32, "q4h", "q8h", window=70),
    Layer(BF16, "q8h", "bf16", k_dim=64, v_dim=32, kv_heads=1, heads=5, latent=True),
    Layer(FP64, softcap=1.5),
    Layer(BF16, softcap=1.5, window=200),
    Layer(FP64, sinks=True),
    Layer(FP32, "fp32", "q4h", sinks=True, window=128, softcap=2.0),
    Layer(BF16, "bf16", "q4h", sinks=True),
    Layer(FP64, window=1),
    Layer(FP64, window=4096),
    Layer(FP64, "q4h", "fp64", k_dim=128, v_dim=16, kv_heads=1, heads=5, latent=True),
    Layer(BF16, "q4h", "bf16", k_dim=512, v_dim=64, kv_heads=1, heads=8, latent=True),
    Layer(FP32, "fp32", "fp32", k_dim=32, v_dim=16, kv_heads=1, heads=4, window=70, latent=True),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_vectorised_agrees_with_the_definitions(layer):
    num_tokens, last = 1060, 8
    arena = KVArena(layer.layout, 40)
    attention = PagedAttention(arena)
    rows = Rows.random(layer, num_tokens)
    blocks = scattered_blocks(num_tokens, 40)
    got = in_chunks(attention, layer, rows, blocks, [1000, num_tokens])
    for start in (0, 508, num_tokens - last):
        spans = [SequenceSpan(blocks, start, last, 0)]
        wanted = attention_reference(arena, 5, rows.q[start : start + last], spans, **layer.scoring)
        assert relative_error(got[start : start + last], wanted) < BOUNDS[layer.dtype]
    attention.check()


@pytest.mark.parametrize("layer", LAYERS[:10], ids=str)
def test_rows_that_see_each_other(layer):
    agrees_where_rows_see_each_other(PagedAttention(KVArena(layer.layout, 24)), layer, BOUNDS[layer.dtype])


@pytest.mark.parametrize("layer", [Layer(FP64), Layer(FP64, "q8h", "q4h"), Layer(FP64, "fp64", "fp64")], ids=str)
def test_what_is_stored_is_what_was_given(layer):
    attention = PagedAttention(KVArena(layer.layout, 3))
    rows = Rows.random(layer, 50)
    in_chunks(attention, layer, rows, [2, 0], [50])
    view = attention.arena.layer(5)
    formats = (layer.k_format, layer.v_format)
    for sections, fmt, given in zip((view.k, view.v), formats, (rows.k, rows.v), strict=True):
        stored = stored_vectors(sections, fmt, [2, 0])[:, :50].transpose(0, 1)
        squared = float((stored - given).square().sum() / given.square().sum())
        bound = {"q4h": 0.0085, "q8h": 0.00008}.get(fmt, 0.0)
        assert bound / 2 <= squared <= bound


@pytest.mark.parametrize("scale", ["softcap", "sinks"])
def test_softcap_and_sinks_matter(scale):
    layer = Layer(FP64, softcap=1.5, sinks=True)
    without = replace(layer, softcap=None) if scale == "softcap" else replace(layer, sinks=False)
    rows = Rows.random(layer, 40)
    results = []
    for each in (layer, without):
        results.append(in_chunks(PagedAttention(KVArena(each.layout, 2)), each, rows, [0, 1], [40]))
    assert relative_error(results[0], results[1]) > 0.01


def test_rows_are_written_to_their_places_and_nowhere_else():
    layer = Layer(BF16)
    attention = PagedAttention(KVArena(layer.layout, 8))
    arena = attention.arena
    for block in range(8):  # canaries
        in_chunks(attention, layer, Rows.random(layer, BLOCK_TOKENS, seed=block), [block], [BLOCK_TOKENS])
    before = [section.clone() for section in (*arena.layer(5).k, *arena.layer(5).v)]
    first, second = Rows.random(layer, 90, seed=20), Rows.random(layer, 40, seed=21)
    spans = [SequenceSpan([6, 1, 3], 60, 7, 62), SequenceSpan([5, 2], 31, 3, 0), SequenceSpan([4], 9, 1, 10)]
    step(attention, layer, spans, [first, second, second], spare=1)
    written = {(1, 30), (1, 31), (3, 0), (3, 1), (3, 2), (5, 31), (2, 0), (2, 1)}
    for section, old in zip((*arena.layer(5).k, *arena.layer(5).v), before, strict=True):
        changed = (section != old).flatten(3).any(3).any(1).nonzero().tolist()
        assert {tuple(place) for place in changed} <= written
        assert len(changed) >= len(written) - 1  # a scale byte may come out the same
    assert not arena.parts[0][[0, 7]].eq(0).all()


def test_a_stored_row_reads_what_is_stored():
    layer = Layer(FP32)
    attention = PagedAttention(KVArena(layer.layout, 4))
    rows = Rows.random(layer, 70)
    blocks = [3, 0, 2]
    first = in_chunks(attention, layer, rows, blocks, [70])
    before = block_bytes(attention.arena, blocks).clone()
    other = Rows(rows.q, rows.k + 1, rows.v + 1)
    (again,), _ = step(attention, layer, [SequenceSpan(blocks, 69, 1, 70)], [other])
    assert torch.equal(again, first[69:])
    assert torch.equal(block_bytes(attention.arena, blocks), before)


@pytest.mark.parametrize("layer", [Layer(FP32), Layer(BF16, "bf16", "bf16"), Layer(FP32, "fp32", "q4h")], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_row_that_is_not_finite_fails_alone(layer, bad, which):
    attention = PagedAttention(KVArena(layer.layout, 8))
    rows = [Rows.random(layer, 45, seed=seed) for seed in range(3)]
    spans = [SequenceSpan([2 * i, 2 * i + 1], 0, 45, 0) for i in range(3)]
    good, plan = step(attention, layer, spans, rows)
    assert plan.failed_spans() == []
    getattr(rows[1], which)[33, 1, 7] = bad
    outputs, plan = step(attention, layer, spans, rows)
    assert plan.failed_spans() == [1]
    assert torch.equal(outputs[0], good[0]) and torch.equal(outputs[2], good[2])
    attention.check()


def test_a_value_too_large_for_its_native_format_fails_its_request():
    layer = Layer(FP64, "fp32", "fp32")
    attention = PagedAttention(KVArena(layer.layout, 2))
    rows = Rows.random(layer, 5)
    rows.v[3] = 1e39
    _, plan = step(attention, layer, [SequenceSpan([0], 0, 5, 0)], [rows])
    assert plan.failed_spans() == [0]


def test_misfits_are_refused():
    layer = Layer(FP32, window=64)
    attention = PagedAttention(KVArena(layer.layout, 2))
    plan = AttentionPlan(StepLayout([SequenceSpan([0], 0, 4, 0)], layer.layout.block_tokens, 4), "cpu")
    q, k = torch.zeros(4, 6, 64), torch.zeros(4, 2, 64)
    with pytest.raises(ValueError, match="window of 64, attention asks for None"):
        attention.attend(5, q, plan, scaling=1.0, window=None)
    with pytest.raises(ValueError, match="bf16, fp32 or fp64"):
        attention.attend(5, q.half(), plan, scaling=1.0, window=64)
    with pytest.raises(ValueError, match="2 K/V heads"):
        attention.attend(5, torch.zeros(4, 5, 64), plan, scaling=1.0, window=64)
    with pytest.raises(ValueError, match=r"queries \(8, 6, 64\) for 4 rows"):
        attention.attend(5, torch.zeros(8, 6, 64), plan, scaling=1.0, window=64)
    with pytest.raises(ValueError, match="sinks for other heads"):
        attention.attend(5, q, plan, scaling=1.0, window=64, sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="for 4 rows"):
        attention.write(5, k[:3], k[:3], plan)
    with pytest.raises(ValueError, match="for 4 rows"):
        attention.write(5, k, k[..., :32], plan)
    with pytest.raises(KeyError):
        attention.write(0, k, k, plan)


@pytest.mark.parametrize(
    ("spans", "num_rows", "says"),
    [
        ([SequenceSpan([0], 0, 5, 0)], 4, "5 rows do not fit a step of 4"),
        ([SequenceSpan([0], 0, 0, 0)], 4, "at least one row"),
        ([SequenceSpan([0], -1, 2, 0)], 4, "from position 0"),
        ([SequenceSpan([0], 30, 3, 0)], 4, "do not hold position 32"),
    ],
)
def test_plans_that_cannot_be_are_refused(spans, num_rows, says):
    with pytest.raises(ValueError, match=says):
        AttentionPlan(StepLayout(spans, Layer(FP32).layout.block_tokens, num_rows), "cpu")


def test_inference_mode_may_come_and_go():
    layer = Layer(FP32)
    attention = PagedAttention(KVArena(layer.layout, 4))
    rows = Rows.random(layer, 60)
    with torch.inference_mode():
        inside = in_chunks(attention, layer, rows, [0, 1], [4, 60])
    outside = in_chunks(attention, layer, rows, [2, 3], [4, 60])
    assert torch.equal(inside, outside)
