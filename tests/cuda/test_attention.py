"""Attention by Triton's kernels: against the definitions, and the bytes of the torch path.

Triton's interpreter changes the bits of a product of matrices with the number of rows: that no company does so is for a
card to show (tests/cuda/test_card.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kv.arena import KVArena
from rekindle.kv.attention import PagedAttention
from rekindle.kv.plan import AttentionPlan
from rekindle.kv.reference import attention_reference, relative_error
from rekindle.kv.step_layout import SequenceSpan, StepLayout
from rekindle.spec import Format
from rekindle_cuda.attention import TritonAttention
from rekindle_cuda.compute import TritonCompute, first_difference, triton_compute
from tests.kv.steps import Layer, Rows, block_bytes, in_chunks, scattered_blocks, step
from tests.model.helpers import Bench, in_memory, random_ids
from tests.tiny_models import tiny_model

FP32 = torch.float32
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
BOUND = 3e-6
LAYERS = {
    "q4h": Layer(FP32),
    "a head for each": Layer(FP32, k_dim=16, v_dim=16, heads=2, block_tokens=16),
    "window, softcap, odd sizes": Layer(FP32, k_dim=80, v_dim=112, window=33, softcap=1.5),
    "sinks": Layer(FP32, k_dim=128, v_dim=128, kv_heads=1, heads=5, sinks=True),
    "q8h and q4h, another window beside": Layer(FP32, "q8h", "q4h", k_dim=96, v_dim=64, beside=(33, None)),
    "q4h and q8h, window, sinks": Layer(FP32, "q4h", "q8h", window=70, sinks=True, block_tokens=16),
    "native and q8h, many heads": Layer(FP32, "fp32", "q8h", k_dim=40, v_dim=256, kv_heads=1, heads=20),
    "native, a window of one": Layer(FP32, "fp32", "fp32", k_dim=72, v_dim=48, window=1),
    "latent": Layer(FP32, "q4h", "fp32", k_dim=64, v_dim=32, kv_heads=1, heads=5, latent=True),
}


def stored(layer: Layer, rows: Rows, num_blocks: int, sequences: Sequence[tuple[list[int], int]]) -> TritonAttention:
    """Our attention over an arena in which torch's has written the first rows of each sequence."""
    ours = TritonAttention(KVArena(layer.layout, num_blocks, DEVICE))
    theirs = PagedAttention(ours.arena)
    for blocks, count in sequences:
        if count:
            in_chunks(theirs, layer, rows, blocks, [count])
    return ours


def agree(layer: Layer, ours: TritonAttention, rows: Rows, spans: Sequence[SequenceSpan], spare: int = 0) -> None:
    """A step's rows are what the definitions say of the bytes in the arena."""
    outputs, _ = step(ours, layer, spans, [rows] * len(spans), spare)
    for span, got in zip(spans, outputs, strict=True):
        queries = rows.q[span.start : span.start + span.num_rows]
        wanted = attention_reference(ours.arena, 5, queries, [span], **layer.scoring)
        assert relative_error(got, wanted) < BOUND
    ours.check()


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_kernels_agree_with_the_definitions(layer: Layer) -> None:
    rows = Rows.random(layer, 150)
    first, second = (scattered_blocks(150, 14, seed, block_tokens=layer.block_tokens) for seed in (0, 1))
    half = 150 // layer.block_tokens + 1
    blocks, others = first[:half], [14 + block for block in second[:half]]
    ours = stored(layer, rows, 28, [(blocks, 149), (others, 70)])
    agree(layer, ours, rows, [SequenceSpan(blocks, 149, 1, 149), SequenceSpan(others, 70, 7, 70)], spare=1)


@pytest.mark.parametrize("name", ["q4h", "q4h and q8h, window, sinks", "native, a window of one"])
def test_rows_that_see_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and where the first of them are stored."""
    monkeypatch.setattr("rekindle_cuda.attention.MOST_ROWS", 8)
    layer = LAYERS[name]
    rows = Rows.random(layer, 96)
    first, second = (scattered_blocks(96, 7, seed, block_tokens=layer.block_tokens) for seed in (0, 1))
    blocks, others = first, [7 + block for block in second]
    ours = stored(layer, rows, 14, [(blocks, 96), (others, 55)])
    mutual = SequenceSpan(others, 55, 19, 55, ((57, 70), (71, 73)))
    agree(layer, ours, rows, [SequenceSpan(blocks, 60, 9, 96, ((60, 68),)), mutual], spare=1)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_kernels_write_the_bytes_that_torch_writes(layer: Layer) -> None:
    scale = torch.logspace(-9, 4, 40, dtype=torch.float64)[:, None, None]
    rows = Rows.random(layer, 40)
    rows = Rows(rows.q, (rows.k * scale).to(FP32), (rows.v * scale.flip(0)).to(FP32))
    rows.k[3], rows.v[5, 0], rows.k[6, :, 1:] = 0, 0, 0
    ours, theirs = TritonAttention(KVArena(layer.layout, 5, DEVICE)), PagedAttention(KVArena(layer.layout, 5))
    layout = StepLayout([SequenceSpan([2, 0, 4, 1, 3], 0, 40, 0)], layer.block_tokens, 40)
    ours.write(5, rows.k.to(DEVICE), rows.v.to(DEVICE), AttentionPlan(layout, DEVICE))
    theirs.write(5, rows.k, rows.v, AttentionPlan(layout, "cpu"))
    assert torch.equal(block_bytes(ours.arena, range(5)), block_bytes(theirs.arena, range(5)))
    assert block_bytes(ours.arena, [2]).any()


@settings(max_examples=12)
@given(st.data())
def test_any_step_agrees_with_the_definitions(data: st.DataObject) -> None:
    """Drafts, extensions and decoded rows of several sequences, whatever a layer's window, formats and heads."""
    formats = st.sampled_from(["q4h", "q8h", "fp32"])
    window = data.draw(st.none() | st.integers(1, 60), "window")
    heads = data.draw(st.integers(1, 5), "heads")
    layer = Layer(
        FP32,
        data.draw(formats, "K"),
        data.draw(formats, "V"),
        k_dim=16,
        v_dim=data.draw(st.sampled_from([16, 48]), "size of V"),
        kv_heads=1,
        heads=heads,
        window=window,
        softcap=data.draw(st.none() | st.just(2.0), "softcap"),
        sinks=data.draw(st.booleans(), "sinks"),
        block_tokens=16,
    )
    rows = Rows.random(layer, 80, seed=data.draw(st.integers(0, 99), "seed"))
    sequences, spans = [], []
    for index in range(data.draw(st.integers(1, 3), "sequences")):
        blocks = [5 * index + block for block in scattered_blocks(80, 5, index, block_tokens=16)]
        start, count = data.draw(st.integers(0, 68), "start"), data.draw(st.integers(1, 11), "rows")
        sequences.append((blocks, start))
        spans.append(SequenceSpan(blocks, start, count, start))
    agree(layer, stored(layer, rows, 15, sequences), rows, spans, spare=data.draw(st.integers(0, 1), "spare"))


@pytest.mark.parametrize("layer", [LAYERS["q4h"], LAYERS["q8h and q4h, another window beside"]], ids=["q4h", "q8h"])
def test_prompts_of_many_rows_are_attended_to_at_once(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle_cuda.attention.MOST_ROWS", 8)
    rows = Rows.random(layer, 100)
    blocks, others = scattered_blocks(100, 4, seed=1), [4, 5, 6, 7]
    ours = stored(layer, rows, 8, [(blocks, 70), (others, 50)])
    spans = [SequenceSpan(others, 50, 3, 50), SequenceSpan(blocks, 70, 30, 70)]
    agree(layer, ours, rows, spans, spare=1)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("fmt", ["q4h", "q8h", "fp32"])
def test_rows_that_are_not_finite_fail_and_leave_finite_bytes(bad: float, fmt: Format) -> None:
    layer = Layer(FP32, fmt, fmt, k_dim=16, v_dim=16, heads=2)
    rows, ours = Rows.random(layer, 12), TritonAttention(KVArena(layer.layout, 3, DEVICE))
    rows.k[5, 1, 3] = bad
    rows.v[9, 0, 0] = bad
    _, plan = step(ours, layer, [SequenceSpan([0], start, 4, start) for start in (0, 4, 8)], [rows] * 3)
    assert plan.failed_spans() == [1, 2]
    ours.check()


def test_hard_vectors_are_stored_as_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_difference(DEVICE) is None
    monkeypatch.setattr("rekindle.kv.q4h.sign_values", np.ones)  # the processor has its signs already
    wrong = first_difference(DEVICE)
    assert wrong is not None and "bytes of 64 vectors are stored differently there" in wrong


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_computes_what_torch_computes(kind: str) -> None:
    theirs = in_memory(tiny_model(kind, FP32, **MODELS[kind]), kv="q4h")
    ours = in_memory(tiny_model(kind, FP32, **MODELS[kind]).to(DEVICE), kv="q4h")
    ours = replace(ours, compute=TritonCompute("triton", "a card or the interpreter"), device=DEVICE.type)
    benches, ids = [Bench(theirs), Bench(ours)], random_ids(24)
    for steps in ([("a", ids[:14])], [("a", ids[14:17]), ("b", ids[20:])], [("a", ids[17:18])]):
        wanted, got = (torch.cat(bench.forward(*steps)).cpu() for bench in benches)
        assert relative_error(got, wanted) < 2e-5
    wanted, got = (np.frombuffer(b"".join(bench.stored_bytes("a")), np.uint8) for bench in benches)
    assert (wanted != got).mean() < 1e-3, "sums in another order move few values over the border of a code"


def test_a_card_whose_driver_fails_without_a_word_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError

    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr("rekindle_cuda.compute.first_difference", fails)
    assert triton_compute(DEVICE) == "the kernels do not run there (RuntimeError: RuntimeError)"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert triton_compute(DEVICE) == "it has compute capability 7.5, and the kernels need 8.0"
