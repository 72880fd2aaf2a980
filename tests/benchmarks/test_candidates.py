"""Simulated ways to keep KV: attention is that of the formula, and served formats cost what they cost served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.candidates import BLOCK, Candidate, StoredStep, candidates_of, measured_candidates, scored_candidates
from benchmarks.fidelity import Served, scored
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.kv.coded import round_trip
from rekindle.model.adapter import AttentionCall
from rekindle.spec import LayerSpec
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.eval.bench import windows_of
from rekindle_pocket import MODEL_DIR

TOKENS, HEADS, KV_HEADS, DIM, SCALING = 600, 4, 2, 32, 0.2


@pytest.mark.parametrize("window", [None, 300, 100])
@pytest.mark.parametrize(("first", "recent"), [(0, 0), (64, 0), (0, 128), (64, 1)])
def test_queries_see_stored_keys_and_recent_ones_as_they_were(window: int | None, first: int, recent: int) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM).bfloat16().float()
    q = torch.randn(TOKENS, HEADS, DIM) * 3
    step = StoredStep(Candidate((LayerSpec(0, KV_HEADS, DIM, DIM, window, "q4h", "q8h"),), first, recent))
    step.write(0, k, v)
    stored = [round_trip(k, "k", "q4h"), round_trip(v, "v", "q8h")]
    for kept, exact in zip(stored, (k, v), strict=True):
        kept[:first] = exact[:first]
    k, v, stored_k, stored_v = (
        each.double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for each in (k, v, *stored)
    )
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    is_recent, queries = distance < recent, q.double().transpose(0, 1)
    scores = torch.where(is_recent, queries @ k.mT, queries @ stored_k.mT) * SCALING
    weights = scores.masked_fill((distance < 0) | (distance >= (window or TOKENS)), -torch.inf).softmax(-1)
    expected = (weights * is_recent) @ v + (weights * ~is_recent) @ stored_v
    found = step.attend(AttentionCall(0, 0, q, SCALING, window, None, None, None))
    torch.testing.assert_close(found, expected.transpose(0, 1).float(), rtol=0, atol=3e-5)


def test_formats_cost_what_they_cost_where_they_are_served() -> None:
    settings = ModelSettings(model=str(MODEL_DIR), dtype="fp32", kv="fp32", threads=1)
    model = load_model(settings, block_tokens=64, max_context=512, format_map_dir=None)
    windows = windows_of(PromptEncoder.from_dir(MODEL_DIR), (), context=320, num_tokens=640, seed=1)
    layout = model.spec.layout
    candidates = candidates_of(layout.layers)
    served = {
        name: Served(model, replace(layout, layers=candidates[name].layers))
        for name in ("bf16", "q4h", "q8h/q4h", "q8h")
    }
    begun: list[str] = []
    found = scored_candidates(model, candidates, windows, begun.append)
    for name, score in scored(served["bf16"], served, windows).items():
        assert found[name].num_tokens == score.num_tokens == 2 * 319
        assert found[name].mean_kl == pytest.approx(score.mean_kl, rel=0.2), name
        assert found[name].perplexity == pytest.approx(score.perplexity, rel=0.005), name
    assert found["bf16"].mean_kl == 0 and len(begun) == 2 * len(candidates)
    assert found["q4h, last 128 tokens bf16"].mean_kl < found["q4h"].mean_kl
    rows = [each for each in measured_candidates("prose", candidates, found, 320) if each.unit == "bytes"]
    assert [each.median for each in rows] == sorted(each.median for each in rows)


def test_bytes_count_what_stays_in_16_bits() -> None:
    layers = (LayerSpec(0, KV_HEADS, DIM, DIM, None, "q8h", "q4h"),)
    coded, native = Candidate(layers).bytes_per_token(1024), 2 * KV_HEADS * DIM * 2
    assert coded == KV_HEADS * (DIM + DIM // 2 + 2)
    assert Candidate(layers, BLOCK, 128).bytes_per_token(1024) == coded + (native - coded) * 192 / 1024
    assert Candidate(layers, recent=np.iinfo(np.int32).max).bytes_per_token(1024) == native
