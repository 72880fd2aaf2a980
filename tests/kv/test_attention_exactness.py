"""A row's bytes and its output are the same bits, however its context was cut and whatever was computed beside it."""

from __future__ import annotations

import random

import pytest
import torch

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import TILE, AttentionPlan, ScoreShape
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from tests.kv.steps import Layer, Rows, block_bytes, in_chunks, scattered_blocks, step

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LAYERS = [
    *(Layer(dtype) for dtype in (BF16, FP32, FP64)),
    *(Layer(dtype, window=200) for dtype in (BF16, FP32, FP64)),
    Layer(BF16, "q4h", "bf16", k_dim=128, v_dim=32, kv_heads=1, heads=5, latent=True),
    Layer(BF16, "q8h", "q4h"),
    Layer(BF16, "bf16", "bf16"),
    Layer(FP64, "fp64", "fp64"),
    Layer(FP32, "fp32", "q4h", k_dim=80, v_dim=96, heads=14),
    Layer(BF16, kv_heads=1, heads=7, softcap=3.0),
    Layer(BF16, heads=2, sinks=True, window=520),
    Layer(FP32, heads=2, sinks=True),
]
NUM_TOKENS = 1100


def odd_cuts(seed: int, start: int = 0, end: int = NUM_TOKENS) -> list[int]:
    rng, cuts = random.Random(seed), []
    while start < end:
        start = min(end, start + rng.randint(1, 64))
        cuts.append(start)
    return cuts


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_chunks_do_not_matter(layer):
    rows = Rows.random(layer, NUM_TOKENS)
    attention = PagedAttention(KVArena(layer.layout, 40))
    blocks = scattered_blocks(NUM_TOKENS, 40)
    whole = in_chunks(attention, layer, rows, blocks, [NUM_TOKENS])
    stored = block_bytes(attention.arena, blocks).clone()
    ones = list(range(480, 530))
    for cuts in (odd_cuts(1), odd_cuts(2), [TILE, 2 * TILE, NUM_TOKENS], [1, 1023, NUM_TOKENS], [*ones, NUM_TOKENS]):
        again = PagedAttention(KVArena(layer.layout, 36))
        elsewhere = scattered_blocks(NUM_TOKENS, 36, seed=cuts[0])
        assert torch.equal(in_chunks(again, layer, rows, elsewhere, cuts), whole)
        assert torch.equal(block_bytes(again.arena, elsewhere), stored)


@pytest.mark.parametrize("layer", LAYERS[:7], ids=str)
def test_one_token_at_a_time_does_not_matter(layer):
    rows = Rows.random(layer, NUM_TOKENS)
    whole_attention = PagedAttention(KVArena(layer.layout, 36))
    blocks = list(range(35))
    whole = in_chunks(whole_attention, layer, rows, blocks, [NUM_TOKENS])
    attention = PagedAttention(KVArena(layer.layout, 36))
    ends = [*range(1, 70), *range(TILE - 12, TILE + 70), *range(2 * TILE - 12, NUM_TOKENS + 1)]
    single = in_chunks(attention, layer, rows, blocks, ends)
    assert torch.equal(single, whole)
    assert torch.equal(block_bytes(attention.arena, blocks), block_bytes(whole_attention.arena, blocks))


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_neighbours_do_not_matter(layer):
    lengths = (700, 33, 513, 64, 1)
    rows = [Rows.random(layer, n, seed=n) for n in lengths]
    alone = []
    for n, each in zip(lengths, rows, strict=True):
        attention = PagedAttention(KVArena(layer.layout, 30))
        alone.append(in_chunks(attention, layer, each, scattered_blocks(n, 30, seed=n), [n]))
    attention = PagedAttention(KVArena(layer.layout, 60))
    free = iter(scattered_blocks(60 * 32, 60))
    tables = [[next(free) for _ in range(-(-n // 32))] for n in lengths]
    rng, done = random.Random(3), [0] * len(lengths)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        chosen = [i for i in range(len(lengths)) if done[i] < lengths[i] and rng.random() < 0.7]
        rng.shuffle(chosen)
        counts = {i: min(lengths[i] - done[i], rng.choice((1, 1, 3, 17, 250))) for i in chosen}
        if not counts:
            continue
        spans = [SequenceSpan(tables[i], done[i], count, done[i]) for i, count in counts.items()]
        results, _ = step(attention, layer, spans, [rows[i] for i in counts], spare=rng.randint(0, 2))
        for i, result in zip(counts, results, strict=True):
            outputs[i].append(result)
            done[i] += counts[i]
    for got, wanted in zip(outputs, alone, strict=True):
        assert torch.equal(torch.cat(got), wanted)


@pytest.mark.parametrize("layer", [Layer(BF16, heads=14), Layer(FP32, heads=14), Layer(FP64, heads=4)], ids=str)
def test_long_contexts_and_threads_do_not_matter(layer):
    num_tokens = 9000
    rows = Rows.random(layer, num_tokens)
    attention = PagedAttention(KVArena(layer.layout, 290))
    blocks = scattered_blocks(num_tokens, 290)
    plan = AttentionPlan(
        StepLayout([SequenceSpan(blocks, 0, num_tokens, 0)], layer.layout.block_tokens, num_tokens), "cpu"
    )
    attention.write(5, rows.k, rows.v, plan)
    stored = num_tokens
    (chunk,), _ = step(attention, layer, [SequenceSpan(blocks, num_tokens - 70, 70, stored)], [rows])
    (late,), _ = step(attention, layer, [SequenceSpan(blocks, num_tokens - 9, 9, stored)], [rows])
    (one,), _ = step(attention, layer, [SequenceSpan(blocks, num_tokens - 1, 1, stored)], [rows])
    assert torch.equal(chunk[-9:], late) and torch.equal(late[-1:], one)
    torch.set_num_threads(2)
    (again,), _ = step(attention, layer, [SequenceSpan(blocks, num_tokens - 70, 70, stored)], [rows])
    (again_one,), _ = step(attention, layer, [SequenceSpan(blocks, num_tokens - 1, 1, stored)], [rows])
    assert torch.equal(again, chunk) and torch.equal(again_one, one)


@pytest.mark.parametrize("layer", [Layer(BF16), Layer(FP32, "fp32", "fp32")], ids=str)
def test_what_lies_behind_the_end_does_not_matter(layer):
    rows, other = Rows.random(layer, 75), Rows.random(layer, 96, seed=9)
    results = []
    for soiled in (False, True):
        attention = PagedAttention(KVArena(layer.layout, 20))
        if soiled:
            in_chunks(attention, layer, Rows.random(layer, 640, seed=8), range(20), [640])
            in_chunks(attention, layer, other, [1, 4, 7], [96])
        results.append(in_chunks(attention, layer, rows, [1, 4, 7], [40, 75]))
    assert torch.equal(*results)


def test_a_window_layer_touches_only_the_tiles_of_its_window():
    layout = Layer(BF16, window=100).layout
    blocks = range(100)
    shape = ScoreShape(3, 2, 100, BF16)
    for position, first, num_context in ((2000, 1536, 512), (1640, 1536, 512), (1600, 1024, 1024), (50, 0, 512)):
        plan = AttentionPlan(StepLayout([SequenceSpan(blocks, position, 1, 0)], layout.block_tokens, 4), "cpu")
        (only,) = plan.ranges(shape)
        assert (only.first, only.num_context) == (first, num_context)
        assert only.blocks[0] == first // 32 and only.blocks[-1] == position // 32


def test_ranges_end_at_tiles_and_pieces_cover_them():
    layout = Layer(BF16).layout
    plan = AttentionPlan(StepLayout([SequenceSpan(range(200), 300, 1500, 0)], layout.block_tokens, 1500), "cpu")
    ranges = plan.ranges(ScoreShape(7, 2, None, BF16))
    assert [(r.first, r.num_context) for r in ranges] == [(0, 512), (0, 1024), (0, 1536), (0, 2048)]
    row = 0
    for each in ranges:
        for piece in each.pieces:
            assert piece.row == row and piece.mask.shape[0] % 4 == 0
            row += piece.num_rows
    assert row == 1500 and len(ranges[-1].pieces) > 1


def test_pieces_are_small_where_they_stay_in_a_cpus_cache_alone():
    shape, layout = ScoreShape(4, 8, None, BF16), Layer(BF16).layout
    step = StepLayout([SequenceSpan(range(1024), 32_256, 512, 0)], layout.block_tokens, 512)
    pieces = {}
    for device in ("cpu", "meta"):
        (only,) = AttentionPlan(step, device).ranges(shape)
        pieces[device] = len(only.pieces)
    assert pieces == {"cpu": 128, "meta": 8}
