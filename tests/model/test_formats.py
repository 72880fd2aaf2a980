"""`--kv auto`: where it begins, the search by the whole model, and a decision that does not move once it is made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.errors import ModelRefused
from rekindle.model import formats, geometry
from rekindle.model.adapter import AttentionCall, register_attention
from rekindle.model.auto_formats import MAX_KL, AutoFormats, auto_formats
from rekindle.model.check_text import check_tokens
from rekindle.model.dense_attention import attention_rows
from rekindle.model.divergence import Reference, divergence
from rekindle.model.loaded import LoadedModel
from tests.model.helpers import Loader, in_memory
from tests.tiny_models import tiny_model


def probed(model: torch.nn.Module) -> geometry.Geometry:
    register_attention()
    model.set_attn_implementation("rekindle")
    return geometry.probe(model)


def calm(kind: str, shift: float = 0.0, *, context: int = 128, **changes: Any) -> LoadedModel:
    """A model whose random weights are not as sharp as they come; `shift` is added to K of the middle layer."""
    model = tiny_model(kind, torch.float32, **changes)
    model.lm_head.weight.data *= 0.2
    if shift:
        constant = torch.randn(64, generator=torch.Generator().manual_seed(3)) * shift
        model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, args, output: output + constant)
    loaded = in_memory(model)
    return replace(loaded, spec=replace(loaded.spec, max_context=context))


def found_for(loaded: LoadedModel, path: Path | None = None) -> AutoFormats:
    return auto_formats(loaded, geometry.probe(loaded.model), path)


def named(found: AutoFormats) -> list[tuple[str, str]]:
    return [(x.k, x.v) for x in found.layers]


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("qwen2", {}, "the K projection has a bias"),
        ("gpt-oss", {}, "the K projection has a bias"),
        ("gpt-oss", {"attention_bias": False}, "the layer has learned sinks"),
    ],
)
def test_k_with_a_bias_and_layers_with_sinks_begin_with_8_bits(kind: str, changes: dict[str, Any], reason: str) -> None:
    found = found_for(calm(kind, **changes))
    assert named(found) == [("q8h", "q4h")] * 3 and {x.reason for x in found.layers} == {reason}
    assert 0 < found.kl <= MAX_KL


@pytest.mark.parametrize("family", ["gemma4_text", "gpt_oss"])
def test_families_that_break_at_4_bits_begin_with_8_for_both(family: str) -> None:
    loaded = calm("llama")
    facts = replace(loaded.spec.facts, family=family)
    assert named(found_for(replace(loaded, spec=replace(loaded.spec, facts=facts)))) == [("q8h", "q8h")] * 3


@pytest.mark.parametrize("kind", ["gpt-neox", "gpt2"])
def test_a_bias_of_a_joint_projection_counts(kind: str) -> None:
    assert all(layer.k_bias for layer in probed(tiny_model(kind, torch.float32)).layers)


def test_plain_layers_are_q4h_and_odd_head_sizes_native() -> None:
    found = found_for(calm("llama"))
    assert named(found) == [("q4h", "q4h")] * 3 and {x.reason for x in found.layers} == {""}
    assert 0 < found.kl <= MAX_KL and found.num_tokens == 128 and "KL 0.00" in str(found)
    odd = found_for(calm("llama", head_dim=24))
    assert {(x.k, x.v, x.reason) for x in odd.layers} == {("fp32", "fp32", "head size 24 is not divisible by 16")}
    assert str(odd) == "more than 4 bits on 3 of 3 layers: head size 24 is not divisible by 16"


def test_the_layer_that_4_and_8_bits_harm_is_native_and_as_few_others_as_the_bound_needs() -> None:
    """A constant added to K where no projection shows it: the rule is blind, the whole model is not."""
    loaded = calm("llama", shift=1000.0)
    assert not any(layer.k_bias for layer in geometry.probe(loaded.model).layers)
    found = found_for(loaded)
    assert found.layers[1].k == "fp32" and "q4h" in {x.k for x in found.layers}
    assert found.layers[1].reason == "4 bits change too much"
    assert 0 < found.kl <= MAX_KL
    mild = found_for(calm("llama", shift=100.0))
    assert mild.layers[1].k == "q8h" and mild.kl <= MAX_KL


def test_what_the_model_rounds_is_not_held_against_its_formats(load: Loader) -> None:
    """In bf16 the least change of the embeddings moves the logits; in fp32 it does not."""
    exact, rounded = found_for(calm("llama")), found_for(load("llama", "bf16", kv="bf16"))
    assert exact.rounding < 1e-7 < 1e-6 < rounded.rounding
    assert rounded.kl <= MAX_KL


def test_values_that_4_bits_cannot_hold_are_promoted() -> None:
    loaded = calm("llama")
    loaded.model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda module, args, output: output * 1e30)
    found = found_for(loaded)
    assert found.layers[1].v == "fp32" and found.kl <= MAX_KL


def test_a_reference_knows_the_likeliest_tokens_and_all_others_as_one() -> None:
    own, other = torch.randn(2, 3, 6000, generator=torch.Generator().manual_seed(1)) * 3
    whole = divergence(own, other).kl * len(own)
    assert 0.9 * whole < Reference(own).sum_of_kl(other) <= whole
    assert Reference(own[:, :500]).sum_of_kl(other[:, :500]) == pytest.approx(
        divergence(own[:, :500], other[:, :500]).kl * len(own), rel=1e-4
    )
    assert Reference(own).sum_of_kl(own) == 0
    assert Reference(own).sum_of_kl(torch.full_like(other, torch.nan)) == torch.inf


def test_a_decision_is_read_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "maps" / "formats.json"
    first = found_for(calm("llama", shift=1000.0), path)
    other = calm("llama")
    assert found_for(other, path) == first != found_for(other)
    path.write_text("{", "utf-8")
    assert found_for(other, path) == found_for(other)
    stored = json.loads(path.read_text("utf-8"))
    for spoilt in ({"layers": stored["layers"][:2]}, {"version": 1}):
        path.write_text(json.dumps({**stored, **spoilt, "kl": 7.0}), "utf-8")
        assert found_for(other, path).kl < 7


def test_the_map_stands_beside_the_store_and_is_keyed_by_the_model(load: Loader, tmp_path: Path) -> None:
    first, other = load("llama", maps=tmp_path), load("qwen3", maps=tmp_path)
    assert len(list(tmp_path.glob("formats-*.json"))) == 2
    assert load("llama", maps=tmp_path).spec == first.spec != other.spec
    (note,) = (note for note in first.notes if note.startswith("KV: "))
    assert note.startswith("KV: KL 0.00")


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
    assert [(part.kind.name, [layer.index for layer in part.layers]) for part in layout.parts] == [
        ("full", [1]),
        ("window-24", [0, 2]),
    ]


def test_check_tokens_never_change() -> None:
    assert check_tokens(384, 6).tolist() == [16, 166, 37, 289, 106, 239]
    assert check_tokens(50, 1000).max() < 50


def test_dense_rows_respect_window_softcap_and_sinks() -> None:
    q = torch.randn(40, 4, 16, generator=torch.Generator().manual_seed(0))
    k = torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(1))
    plain = AttentionCall(0, 0, q, 0.25, None, None, None, None)
    rows = attention_rows(plain, k).exp()
    assert torch.allclose(rows.sum(-1), torch.ones(4, 40))
    assert torch.equal((rows > 0).sum(-1), torch.arange(1, 41).expand(4, 40))
    windowed = attention_rows(replace(plain, window=24), k).exp()
    assert (windowed > 0).sum(-1).max() == 24 and torch.equal(windowed[:, :24], rows[:, :24])
    capped = attention_rows(replace(plain, softcap=1.0), k)
    assert (capped[:, -1].amax(-1) - capped[:, -1].amin(-1)).max() <= 2.0001
    sunk = attention_rows(replace(plain, sinks=torch.full((4,), 50.0)), k).exp()
    assert (sunk.sum(-1) < 1).all() and torch.allclose(sunk / sunk.sum(-1, keepdim=True), rows, atol=1e-4)
