"""What only a card can show: bits that depend on no company, bf16 by its matrix units, layers in CUDA graphs, and draws
that do not wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rekindle.compute.cpu.kernels.linear import LinearKernel
from rekindle.compute.cpu.packed import packed_weights
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.kv.arena import KVArena
from rekindle.kv.reference import attention_reference, relative_error
from rekindle.kv.step_layout import SequenceSpan
from rekindle.model.drawing import Drawing
from rekindle.model.observation import observed
from rekindle.model.trial import row_errors
from rekindle_cuda.attention import TritonAttention
from rekindle_cuda.graphs import CudaGraphs
from rekindle_cuda.packing import RoundFormat, multiply, pack
from tests.cuda.test_attention import DEVICE, LAYERS
from tests.cuda.test_decoder import KINDS, fused_of, model_of, on_card, packed_model, paths
from tests.cuda.test_products import FORMATS, kernel, on_device
from tests.kernels.test_int8 import product
from tests.kernels.test_linear import matrix, random_bf16
from tests.kv.steps import Layer, Rows, in_chunks, scattered_blocks, step
from tests.model.helpers import Bench, random_ids
from tests.model.row_sampler import row_tokens
from tests.model.test_drawing import every_kind

__all__ = ["kernel"]
BF16 = torch.bfloat16
IN_BF16 = {
    name: replace(layer, dtype=BF16, **{at: "bf16" for at in ("k_format", "v_format") if getattr(layer, at) == "fp32"})
    for name, layer in LAYERS.items()
}
BOUND = 0.012


def attention(layer: Layer) -> TritonAttention:
    return TritonAttention(KVArena(layer.layout, 26, DEVICE))


@pytest.mark.parametrize("layer", IN_BF16.values(), ids=IN_BF16)
def test_bits_depend_on_no_cut_and_no_company(layer: Layer) -> None:
    num_tokens = 250
    rows, other = Rows.random(layer, num_tokens), Rows.random(layer, 90, seed=7)
    blocks = scattered_blocks(num_tokens, 16, block_tokens=layer.block_tokens)
    others = [16 + block for block in scattered_blocks(90, 6, block_tokens=layer.block_tokens)]
    whole = in_chunks(attention(layer), layer, rows, blocks, [num_tokens])
    alone = in_chunks(attention(layer), layer, other, others, [90])
    assert torch.equal(in_chunks(attention(layer), layer, rows, blocks, [1, 8, 77, 149, num_tokens]), whole)
    company = attention(layer)
    in_chunks(company, layer, rows, blocks, [235])
    in_chunks(company, layer, other, others, [29])
    spans = [SequenceSpan(others, 29, 61, 29), SequenceSpan(blocks, 235, 15, 235)]
    (first, second), _ = step(company, layer, spans, [other, rows], spare=1)
    assert torch.equal(first, alone[29:])
    assert torch.equal(second, whole[235:])


@pytest.mark.parametrize("count", [5, 400])
@pytest.mark.parametrize("layer", IN_BF16.values(), ids=IN_BF16)
def test_bf16_agrees_with_the_definitions(layer: Layer, count: int) -> None:
    """Few rows over the codes, and as many as are attended to at once after their context is widened."""
    num_tokens = 500
    rows, blocks = Rows.random(layer, num_tokens), scattered_blocks(num_tokens, 40, block_tokens=layer.block_tokens)
    ours = TritonAttention(KVArena(layer.layout, 40, DEVICE))
    got = in_chunks(ours, layer, rows, blocks, [num_tokens - count, num_tokens])[-5:]
    spans = [SequenceSpan(blocks, num_tokens - 5, 5, num_tokens)]
    assert relative_error(got, attention_reference(ours.arena, 5, rows.q[-5:], spans, **layer.scoring)) < BOUND
    ours.check()


@pytest.mark.parametrize("kv", ["bf16", "q4h"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_in_bf16_give_what_their_own_code_gives(kind: str, kv: str) -> None:
    theirs, ours = (on_card(model_of(kind, BF16), kv) for _ in range(2))
    assert ours.compute.fuse(ours) == fused_of(ours)[0] == 2
    errors = [row_errors(*each) for each in zip(paths(ours), paths(theirs), strict=True)]
    # The median: a rounding sends single rows of a mixture to another expert.
    assert float(torch.cat(errors).median()) < 0.04


@pytest.mark.parametrize("weight_format", FORMATS)
def test_layers_over_packed_weights_in_bf16_give_what_their_own_code_gives(weight_format: RoundFormat) -> None:
    theirs, ours = (packed_model("qwen2", weight_format, BF16) for _ in range(2))
    assert ours.compute.fuse(ours) == fused_of(ours)[0] == 2
    errors = [row_errors(*each) for each in zip(paths(ours), paths(theirs), strict=True)]
    assert float(torch.cat(errors).median()) < 0.05


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_layer_can_be_captured_and_replayed(kind: str) -> None:
    """It neither waits for the card nor copies from the host once the tables of its step are there."""
    ours = on_card(model_of(kind, BF16), "q4h")
    layers = list(ours.model.model.layers)
    with torch.inference_mode():
        seen = observed(ours, layers)
        assert ours.compute.fuse(ours) == 2
        for layer in layers:
            one = seen[layer][0]
            eager = layer.forward(one.hidden, **one.keywords).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layer.forward(one.hidden, **one.keywords)
            captured.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, eager)


@pytest.mark.parametrize("weights", FORMATS)
def test_rounded_weights_of_a_model_are_those_of_the_processor(weights: RoundFormat) -> None:
    """They are sent to the card layer by layer; KV has the same identity, and replies are near."""
    ours, theirs = (
        load_model(
            ModelSettings(device=device, weights=weights, kv="q4h"),
            block_tokens=64,
            max_context=None,
            format_map_dir=None,
        )
        for device in ("cuda", "cpu")
    )
    assert ours.spec.fingerprint == theirs.spec.fingerprint
    assert {each.device.type for each in (*ours.model.parameters(), *ours.model.buffers())} == {"cuda"}
    formats = [[each.format for each in packed_weights(loaded.model)] for loaded in (ours, theirs)]
    assert formats[0] == formats[1]
    (got,), (wanted,) = (Bench(loaded).forward(("a", random_ids(200))) for loaded in (ours, theirs))
    p, q = wanted.log_softmax(-1), got.cpu().log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.01


@pytest.mark.parametrize("weight_format", FORMATS)
def test_products_of_bf16_are_the_processors_to_the_bit(kernel: LinearKernel, weight_format: RoundFormat) -> None:
    weights, bias, rows = random_bf16(1000, 4096, seed=0), random_bf16(1000, seed=1), random_bf16(300, 4096, seed=2)
    packed = kernel.pack(matrix(weights), weight_format=weight_format, threads=4)
    theirs = product(kernel, packed, rows, bias, output="bf16", threads=4)
    weight, added, x = (on_device(each).bfloat16() for each in (weights, bias, rows))
    ours = pack(weight, weight_format)
    for count in (300, 64, 17, 1):
        got = multiply(ours, x[:count], added).cpu().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(got, theirs[:count])


@pytest.mark.parametrize("are_rounded", [False, True])
@pytest.mark.parametrize("vocab", [40, 50_000])
def test_draws_do_not_wait_and_are_those_of_the_definition(vocab: int, are_rounded: bool) -> None:
    """At 40 ids all are candidates, at 50,000 draws by rank are from the 1,024 likeliest; rounded, many tie."""
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.round() if are_rounded else logits
    draws, there = every_kind(), logits.to(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawing = Drawing(there, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    together = drawing.results()
    for draw, drawn in zip(draws, together, strict=True):
        (alone,) = Drawing(there, [draw]).results()
        assert drawn is not None and alone is not None and drawn.token == alone.token
        assert drawn.token in row_tokens(logits, draw, within=3e-6)


def test_what_no_graph_can_hold_leaves_the_card_as_it_was() -> None:
    """The thread's stream, and the memory that others are recorded in."""
    recorder, stream = CudaGraphs(), torch.cuda.current_stream()
    x = torch.ones(8, device=DEVICE)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            recorder.record(lambda: (x + x.sum().item(), x))
        assert torch.cuda.current_stream() == stream
    launch, (found, _) = recorder.record(lambda: (x + 1, x))
    x.fill_(2)
    launch()
    assert found.tolist() == [3] * 8 and torch.cuda.current_stream() == stream
