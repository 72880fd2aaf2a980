"""`--kv auto`: the rule, the self-check behind it, and a decision that does not move once it is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rekindle.errors import ModelRefused
from rekindle.model import formats, geometry
from rekindle.model.adapter import AttentionCall, register_attention
from tests.model.helpers import Loader
from tests.tiny_models import tiny_model


def probed(model: torch.nn.Module) -> geometry.Geometry:
    register_attention()
    model.set_attn_implementation("rekindle")
    return geometry.probe(model)


def test_k_bias_and_sinks_keep_native_k(load: Loader) -> None:
    for kind, reason in (("qwen2", "the K projection has a bias"), ("gpt-oss", "the K projection has a bias")):
        loaded = load(kind, "bf16")
        assert [(x.k, x.v, x.reason) for x in loaded.formats] == [("bf16", "q4h", reason)] * 3
        assert {layer.k_format for layer in loaded.spec.layout.layers} == {"bf16"}
    model = tiny_model("gpt-oss", torch.float32, attention_bias=False)
    found = probed(model)
    assert not any(layer.k_bias for layer in found.layers)
    assert {x.reason for x in formats.auto_formats(found, dict, None)} == {"the layer has learned sinks"}


@pytest.mark.parametrize("kind", ["gpt-neox", "gpt2"])
def test_a_bias_of_a_joint_projection_counts(kind: str) -> None:
    assert all(layer.k_bias for layer in probed(tiny_model(kind, torch.float32)).layers)


def test_plain_layers_are_q4h_and_odd_head_sizes_native(load: Loader) -> None:
    loaded = load("llama")
    assert loaded.spec.layout.formats() == {"q4h/q4h": 3}
    assert all(x.kl is not None and 0 < x.kl < formats.MAX_KL / 2 for x in loaded.formats)
    found = probed(tiny_model("llama", torch.float32, head_dim=24))
    chosen = formats.auto_formats(found, dict, None)
    assert {(x.k, x.v, x.reason) for x in chosen} == {("fp32", "fp32", "head size 24 is not divisible by 16")}


def test_the_self_check_protects_a_hidden_bias() -> None:
    """A constant added to K where no projection shows it: the rule is blind, the self-check is not."""
    model = tiny_model("llama", torch.float32)
    projection = model.model.layers[1].self_attn.k_proj
    shift = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 100
    projection.register_forward_hook(lambda module, args, output: output + shift)
    found = probed(model)
    assert not any(layer.k_bias for layer in found.layers)
    chosen = formats.auto_formats(found, lambda: formats.measure_divergence(model, found, 1024), None)
    assert [x.k for x in chosen] == ["q4h", "fp32", "q4h"]
    assert "4-bit K moves attention" in chosen[1].reason and chosen[1].kl > 1


def test_a_decision_is_read_not_made_again(tmp_path: Path) -> None:
    found = probed(tiny_model("llama", torch.float32))
    path = tmp_path / "maps" / "formats.json"

    def borderline() -> Mapping[int, float]:
        return {0: 0.001, 1: formats.MAX_KL * 1.01, 2: 0.001}

    def flipped() -> Mapping[int, float]:
        raise AssertionError("measured again")

    first = formats.auto_formats(found, borderline, path)
    assert [x.k for x in first] == ["q4h", "fp32", "q4h"]
    assert formats.auto_formats(found, flipped, path) == first
    path.write_text("{", "utf-8")
    assert [x.k for x in formats.auto_formats(found, lambda: {0: 0, 1: 0, 2: 0}, path)] == ["q4h"] * 3
    stored = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**stored, "layers": stored["layers"][:2]}), "utf-8")
    assert len(formats.auto_formats(found, borderline, path)) == 3


def test_a_divergence_that_is_not_a_number_keeps_native_k() -> None:
    found = probed(tiny_model("llama", torch.float32))
    chosen = formats.auto_formats(found, lambda: {0: float("nan"), 1: float("inf"), 2: 0.0}, None)
    assert [x.k for x in chosen] == ["fp32", "fp32", "q4h"]


def test_the_map_stands_beside_the_store_and_is_keyed_by_the_model(load: Loader, tmp_path: Path) -> None:
    first, other = load("llama", maps=tmp_path), load("qwen3", maps=tmp_path)
    assert len(list(tmp_path.glob("formats-*.json"))) == 2
    assert load("llama", maps=tmp_path).spec == first.spec != other.spec


def test_forced_formats_hold_for_every_layer(load: Loader) -> None:
    for kv in ("q4h", "bf16", "fp32"):
        assert load("qwen2", kv=kv).spec.layout.formats() == {f"{kv}/{kv}": 3}


@pytest.mark.parametrize(("kv", "stored"), [("q8h", "q8h/q8h"), ("q8h/q4h", "q8h/q4h"), ("bf16/q8h", "bf16/q8h")])
def test_eight_bits_for_k_v_or_both_are_served_bitwise(load: Loader, kv: str, stored: str) -> None:
    loaded = load("llama", "bf16", kv=kv)
    assert loaded.spec.layout.formats() == {stored: 3}
    assert loaded.promise == "bitwise"


def test_a_head_that_cannot_be_cut_into_groups_is_refused_with_its_format() -> None:
    found = probed(tiny_model("llama", torch.float32, head_dim=24))
    with pytest.raises(ModelRefused, match="kv=bf16/q8h: q8h needs head sizes divisible by 16"):
        formats.forced_formats(found, "bf16/q8h")
    assert {(x.k, x.v) for x in formats.forced_formats(found, "bf16")} == {("bf16", "bf16")}


def test_windows_get_a_part_of_their_own(load: Loader) -> None:
    layout = load("gemma3").spec.layout
    assert [(part.name, [layer.index for layer in part.layers]) for part in layout.parts] == [
        ("full", [1]),
        ("window-24", [0, 2]),
    ]


def test_check_tokens_never_change() -> None:
    assert formats.check_tokens(384, 6).tolist() == [16, 166, 37, 289, 106, 239]
    assert formats.check_tokens(50, 1000).max() < 50


def test_dense_rows_respect_window_softcap_and_sinks() -> None:
    q = torch.randn(40, 4, 16, generator=torch.Generator().manual_seed(0))
    k = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(1))
    plain = AttentionCall(0, 0, q, 0.25, None, None, None, None)
    rows = formats.attention_rows(plain, k).exp()
    assert torch.allclose(rows.sum(-1), torch.ones(4, 40))
    assert torch.equal((rows > 0).sum(-1), torch.arange(1, 41).expand(4, 40))
    windowed = formats.attention_rows(replace(plain, window=24), k).exp()
    assert (windowed > 0).sum(-1).max() == 24 and torch.equal(windowed[:, :24], rows[:, :24])
    capped = formats.attention_rows(replace(plain, softcap=1.0), k)
    assert (capped[:, -1].amax(-1) - capped[:, -1].amin(-1)).max() <= 2.0001
    sunk = formats.attention_rows(replace(plain, sinks=torch.full((4,), 50.0)), k).exp()
    assert (sunk.sum(-1) < 1).all() and torch.allclose(sunk / sunk.sum(-1, keepdim=True), rows, atol=1e-4)
