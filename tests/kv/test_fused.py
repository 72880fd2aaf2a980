"""Attention by our kernels, at every level that this processor runs: against the definitions, the bytes of the torch
path, and itself in other steps, company and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.fused_attention import FusedAttention
from rekindle.compute.cpu.kernels import library
from rekindle.compute.cpu.kernels.attention import fits
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import attention_reference, relative_error
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.spec import Format, LayerSpec
from tests.kernels.native import needs_kernels, runnable
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

BF16 = torch.bfloat16
BOUND = 0.012
LAYERS = [
    Layer(BF16),
    Layer(BF16, heads=2),
    Layer(BF16, k_dim=16, v_dim=16, block_tokens=16),
    Layer(BF16, k_dim=32, v_dim=48, block_tokens=64, beside=(33, None)),
    Layer(BF16, k_dim=80, v_dim=80, window=33),
    Layer(BF16, k_dim=96, v_dim=112, kv_heads=1, heads=5),
    Layer(BF16, k_dim=128, v_dim=128, heads=14),
    Layer(BF16, k_dim=192, v_dim=128, kv_heads=4, heads=4),
    Layer(BF16, k_dim=256, v_dim=256, kv_heads=1, heads=8, softcap=1.5, window=200, beside=(200, None, 33)),
    Layer(BF16, k_dim=512, v_dim=512, kv_heads=1, heads=3),
    Layer(BF16, k_dim=240, v_dim=240, kv_heads=1, heads=3),
    Layer(BF16, "bf16", "bf16"),
    Layer(BF16, "bf16", "bf16", k_dim=40, v_dim=72, window=70, block_tokens=16, beside=(None, 70)),
    Layer(BF16, "bf16", "q4h", k_dim=48, v_dim=96, sinks=True, window=128, block_tokens=64, beside=(None,)),
    Layer(BF16, "bf16", "q4h", k_dim=80, v_dim=80, softcap=2.0, block_tokens=256),
    Layer(BF16, "q4h", "bf16", k_dim=80, v_dim=112, sinks=True, softcap=2.0, block_tokens=128, beside=(None, 9)),
    Layer(BF16, "q4h", "bf16", sinks=True, softcap=1.5, window=33, block_tokens=16, beside=(33, 32)),
    Layer(BF16, softcap=1.5),
    Layer(BF16, sinks=True),
    Layer(BF16, window=1),
    Layer(BF16, window=600, block_tokens=256, beside=(None, 600, 601)),
    Layer(BF16, window=4096, block_tokens=128),
    Layer(BF16, sinks=True, window=512, block_tokens=128),
    Layer(BF16, block_tokens=16, beside=(512,)),
    Layer(BF16, heads=18),  # more queries of a K/V head than a piece has with 64 rows: 5 heads in one, 4 in the other
    Layer(BF16, "q4h", "bf16", k_dim=512, v_dim=64, kv_heads=1, heads=20, block_tokens=64, latent=True),
    Layer(BF16, "q4h", "bf16", k_dim=32, v_dim=16, kv_heads=1, heads=4, block_tokens=16, beside=(None,), latent=True),
    Layer(BF16, "q4h", "bf16", k_dim=240, v_dim=48, kv_heads=2, heads=6, window=70, beside=(9, 70), latent=True),
    Layer(BF16, "bf16", "bf16", k_dim=72, v_dim=32, kv_heads=1, heads=7, block_tokens=128, latent=True),
    Layer(BF16, "q8h", "q8h"),
    Layer(BF16, "q8h", "q4h", k_dim=80, v_dim=96, window=33, block_tokens=16, beside=(33, None)),
    Layer(BF16, "q4h", "q8h", k_dim=128, v_dim=112, kv_heads=1, heads=5, softcap=1.5),
    Layer(BF16, "bf16", "q8h", k_dim=40, v_dim=16, sinks=True, block_tokens=64),
    Layer(BF16, "q8h", "bf16", k_dim=512, v_dim=72, sinks=True, window=200, block_tokens=256, beside=(200, None)),
    Layer(BF16, "q8h", "q8h", k_dim=256, v_dim=512, kv_heads=1, heads=8, block_tokens=128),
    Layer(BF16, "q8h", "bf16", k_dim=240, v_dim=48, kv_heads=1, heads=6, window=70, latent=True),
]

pytestmark = needs_kernels


@pytest.fixture(scope="module", params=runnable())
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    found = library.load(request.param).library
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def fused(kernels: KernelLibrary, layer: Layer, num_blocks: int) -> FusedAttention:
    return FusedAttention(KVArena(layer.layout, num_blocks), kernels)


def stored_apart(kernels: KernelLibrary, layer: Layer, num_tokens: int) -> tuple[FusedAttention, list[int]]:
    """Attention with room for a sequence and a few blocks more, and blocks of the sequence in no order."""
    num_blocks = -(-num_tokens // layer.block_tokens) + 5
    blocks = scattered_blocks(num_tokens, num_blocks, block_tokens=layer.block_tokens)
    return fused(kernels, layer, num_blocks), blocks


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_kernels_agree_with_the_definitions(kernels: KernelLibrary, layer: Layer) -> None:
    num_tokens, last = 1060, 8
    attention, blocks = stored_apart(kernels, layer, num_tokens)
    rows = Rows.random(layer, num_tokens)
    got = in_chunks(attention, layer, rows, blocks, [1000, num_tokens])
    for start in (0, 508, num_tokens - last):
        spans = [SequenceSpan(blocks, start, last, 0)]
        wanted = attention_reference(attention.arena, 5, rows.q[start : start + last], spans, **layer.scoring)
        assert relative_error(got[start : start + last], wanted) < BOUND
    attention.check()


@pytest.mark.parametrize("layer", [each for each in LAYERS if each.block_tokens == BLOCK_TOKENS], ids=str)
def test_rows_that_see_each_other(kernels: KernelLibrary, layer: Layer) -> None:
    agrees_where_rows_see_each_other(fused(kernels, layer, 24), layer, BOUND)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_kernels_write_the_bytes_that_torch_writes(kernels: KernelLibrary, layer: Layer) -> None:
    scale = torch.logspace(-9, 4, 70, dtype=torch.float64)[:, None, None]
    rows = Rows.random(layer, 70)
    rows = Rows(rows.q, (rows.k * scale).to(BF16), (rows.v * scale.flip(0)).to(BF16))
    rows.k[3], rows.v[5, 0], rows.k[6, :, 1:] = 0, 0, 0
    ours, theirs = fused(kernels, layer, 5), PagedAttention(KVArena(layer.layout, 5))
    for attention in (ours, theirs):
        in_chunks(attention, layer, rows, [2, 0, 4, 1, 3], [9, 70])
    assert torch.equal(block_bytes(ours.arena, range(5)), block_bytes(theirs.arena, range(5)))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_bits_depend_on_no_cut_no_company_and_no_threads(kernels: KernelLibrary, layer: Layer) -> None:
    num_tokens = 1100
    rows, other = Rows.random(layer, num_tokens), Rows.random(layer, 580, seed=7)
    torch.set_num_threads(1)
    attention, blocks = stored_apart(kernels, layer, num_tokens)
    whole = in_chunks(attention, layer, rows, blocks, [num_tokens])
    stored = block_bytes(attention.arena, blocks).clone()
    for number, cuts in ((1, [512, 1024]), (2, [1, 8, 77, 300, 511, 513]), (3, [1023, 1025, 1026, 1027])):
        torch.set_num_threads(number)
        again = fused(kernels, layer, attention.arena.num_blocks)
        assert torch.equal(in_chunks(again, layer, rows, blocks, [*cuts, num_tokens]), whole)
        assert torch.equal(block_bytes(again.arena, blocks), stored)
    alone, others = stored_apart(kernels, layer, 580)
    wanted = in_chunks(alone, layer, other, others, [580])
    company = fused(kernels, layer, attention.arena.num_blocks + alone.arena.num_blocks)
    others = [attention.arena.num_blocks + block for block in others]
    in_chunks(company, layer, rows, blocks, [1085])
    in_chunks(company, layer, other, others, [519])
    spans = [SequenceSpan(others, 519, 61, 519), SequenceSpan(blocks, 1085, 15, 1085)]  # in the middle of blocks
    (first, second), _ = step(company, layer, spans, [other, rows], spare=1)
    assert torch.equal(first, wanted[519:]) and torch.equal(second, whole[1085:])


@pytest.mark.parametrize(
    "layer",
    [Layer(BF16), Layer(BF16, "bf16", "bf16"), Layer(BF16, "bf16", "q4h"), Layer(BF16, "q8h", "q8h")],
    ids=str,
)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_row_that_is_not_finite_fails_alone(kernels: KernelLibrary, layer: Layer, bad: float, which: str) -> None:
    attention = fused(kernels, layer, 8)
    rows = [Rows.random(layer, 45, seed=seed) for seed in range(3)]
    spans = [SequenceSpan([2 * i, 2 * i + 1], 0, 45, 0) for i in range(3)]
    good, plan = step(attention, layer, spans, rows)
    assert plan.failed_spans() == []
    getattr(rows[1], which)[33, 1, 7] = bad
    outputs, plan = step(attention, layer, spans, rows)
    assert plan.failed_spans() == [1]
    assert torch.equal(outputs[0], good[0]) and torch.equal(outputs[2], good[2])
    attention.check()
    zeros = torch.zeros(plan.layout.num_rows, 2, 64, dtype=BF16)
    attention.write(5, zeros, zeros, plan)  # as another layer of the step
    assert plan.failed_spans() == [1]


def test_a_row_of_queries_that_is_not_finite_stays_alone(kernels: KernelLibrary) -> None:
    layer = Layer(BF16)
    rows, attention = Rows.random(layer, 40), fused(kernels, layer, 2)
    good = in_chunks(attention, layer, rows, [0, 1], [40])
    rows.q[20, 3] = math.nan
    outputs = in_chunks(attention, layer, rows, [0, 1], [40])
    assert outputs[20, 3].isnan().all()
    outputs[20, 3] = good[20, 3]
    assert torch.equal(outputs, good)


@pytest.mark.parametrize("score", [-1e39, -1.5e38], ids=["-inf", "finite"])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(BF16),
        Layer(BF16, "bf16", "bf16"),
        Layer(BF16, "bf16", "q4h", k_dim=48, v_dim=96, window=30),
        Layer(BF16, window=600, kv_heads=1, heads=40),
        Layer(BF16, sinks=True),
        Layer(BF16, "q4h", "bf16", sinks=True, window=30),
        Layer(BF16, "q8h", "q8h"),
        Layer(BF16, softcap=2.0),
    ],
    ids=str,
)
def test_the_lowest_scores_weigh_as_with_torch(kernels: KernelLibrary, layer: Layer, score: float) -> None:
    num_tokens, blocks = 1100, scattered_blocks(1100, 36)
    rows = Rows.random(layer, num_tokens)
    q, k = torch.full_like(rows.q, 1e36), torch.zeros_like(rows.k)
    k[:512] = k[1024:1060] = score / (1e36 * 1.5 * layer.k_dim**0.5)  # a segment, and a beginning; others score 0
    rows = Rows(q, k, rows.v)
    wanted = in_chunks(PagedAttention(KVArena(layer.layout, 36)), layer, rows, blocks, [num_tokens])
    torch.set_num_threads(1)
    attention = fused(kernels, layer, 36)
    got = in_chunks(attention, layer, rows, blocks, [num_tokens])
    assert torch.equal(got.isnan(), wanted.isnan())
    known = ~wanted.isnan()
    assert relative_error(got[known], wanted[known]) < 0.02
    torch.set_num_threads(3)
    for row in (511, 512, 1023, 1030, 1059, 1070):  # the segments of one row, by several threads
        (one,), _ = step(attention, layer, [SequenceSpan(blocks, row, 1, num_tokens)], [rows])
        assert torch.equal(one.view(torch.int16), got[row : row + 1].view(torch.int16))


def test_sinks_far_from_the_scores_take_nothing_or_all(kernels: KernelLibrary) -> None:
    layer, blocks = Layer(BF16), [1, 0]
    rows = Rows.random(layer, 40)
    plan = AttentionPlan(StepLayout([SequenceSpan(blocks, 0, 40, 0)], layer.layout.block_tokens, 40), "cpu")
    sinks = torch.tensor([-400.0, -3.0, 0.0, 3.0, 400.0, 1e38], dtype=BF16)
    outputs = []
    for attention in (fused(kernels, layer, 2), PagedAttention(KVArena(layer.layout, 2))):
        attention.write(5, rows.k, rows.v, plan)
        outputs.append(attention.attend(5, rows.q, plan, scaling=0.125, sinks=sinks))
    ours, theirs = outputs
    assert not ours[:, 4:].any() and not theirs[:, 4:].any()
    assert relative_error(ours, theirs) < 0.02


def test_stored_rows_are_read_and_not_written(kernels: KernelLibrary) -> None:
    layer = Layer(BF16)
    attention = fused(kernels, layer, 4)
    rows = Rows.random(layer, 70)
    blocks = [3, 0, 2]
    first = in_chunks(attention, layer, rows, blocks, [70])
    before = attention.arena.parts[0].clone()
    other = Rows(rows.q, rows.k + 1, rows.v + 1)
    (again,), _ = step(attention, layer, [SequenceSpan(blocks, 69, 1, 70)], [other])
    assert torch.equal(again, first[69:]) and torch.equal(attention.arena.parts[0], before)
    other.k[69, 0, 0] = math.inf
    assert step(attention, layer, [SequenceSpan(blocks, 69, 1, 70)], [other])[1].failed_spans() == [0]


def test_strided_rows_are_read_where_they_are(kernels: KernelLibrary) -> None:
    layer = Layer(BF16)
    plain = Rows.random(layer, 12)
    wanted = in_chunks(fused(kernels, layer, 1), layer, plain, [0], [12])
    attention = fused(kernels, layer, 1)
    plan = AttentionPlan(StepLayout([SequenceSpan([0], 0, 12, 0)], layer.layout.block_tokens, 12), "cpu")
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (plain.q, plain.k)]
    every_other = torch.stack([plain.v, plain.v], -1).flatten(-2)[..., ::2]
    attention.write(5, by_head[1], every_other, plan)
    assert torch.equal(attention.attend(5, by_head[0], plan, **layer.scoring), wanted)


@pytest.mark.parametrize("layer", [Layer(torch.float32), Layer(torch.float64, "fp64", "fp64")], ids=str)
def test_other_dtypes_are_computed_by_torch(kernels: KernelLibrary, layer: Layer) -> None:
    rows, blocks = Rows.random(layer, 90), [2, 0, 1]
    ours = in_chunks(fused(kernels, layer, 3), layer, rows, blocks, [33, 90])
    theirs = in_chunks(PagedAttention(KVArena(layer.layout, 3)), layer, rows, blocks, [33, 90])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("dims", "formats", "latent", "fit"),
    [
        ((64, 64), ("q4h", "q4h"), False, True),
        ((256, 272), ("q8h", "q8h"), False, True),
        ((576, 512), ("q4h", "q4h"), False, False),
        ((256, 272), ("q4h", "q4h"), False, False),  # 17 scales
        ((41, 64), ("bf16", "bf16"), False, False),
        ((64, 64), ("fp32", "q4h"), False, False),
        ((512, 128), ("q4h", "bf16"), True, True),
        ((512, 144), ("q4h", "bf16"), True, False),
        ((512, 40), ("q4h", "bf16"), True, False),
    ],
)
def test_layers_that_do_not_fit_are_left_to_torch(
    kernels: KernelLibrary, dims: tuple[int, int], formats: tuple[Format, Format], latent: bool, fit: bool
) -> None:
    assert fits(LayerSpec(0, 2, *dims, None, *formats, latent)) is fit
    layer = Layer(BF16, *formats, *dims, latent=latent)
    rows, num_tokens = Rows.random(layer, BLOCK_TOKENS + 5), BLOCK_TOKENS + 5
    attention = fused(kernels, layer, 2)
    got = in_chunks(attention, layer, rows, [1, 0], [num_tokens])
    wanted = attention_reference(attention.arena, 5, rows.q, [SequenceSpan([1, 0], 0, num_tokens, 0)], **layer.scoring)
    assert relative_error(got, wanted) < 0.02


def test_misfits_are_refused(kernels: KernelLibrary) -> None:
    layer = Layer(BF16)
    attention = fused(kernels, layer, 1)
    plan = AttentionPlan(StepLayout([SequenceSpan([0], 0, 8, 0)], layer.layout.block_tokens, 8), "cpu")
    q = torch.zeros(8, 6, 64, dtype=BF16)
    with pytest.raises(ValueError, match="for 8 rows"):
        attention.attend(5, q[:4], plan, scaling=1.0)
    with pytest.raises(ValueError, match="for 8 rows"):
        attention.write(5, q[:4, :2], q[:4, :2], plan)
    with pytest.raises(ValueError, match="window of None"):
        attention.attend(5, q, plan, scaling=1.0, window=8)


def test_no_kernels_no_fused_attention(kernels: KernelLibrary) -> None:
    arena = KVArena(Layer(BF16).layout, 1)
    assert type(KernelCompute(None).attention(arena)) is PagedAttention
    assert type(KernelCompute(kernels).attention(arena)) is FusedAttention
