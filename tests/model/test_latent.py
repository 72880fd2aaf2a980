"""Multi-head latent attention in its absorbed form: every family's own logits, from 416 bytes a token and layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.compute.cpu.weights import loaded_bytes
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model import formats, geometry
from rekindle.model.adapter import ATTENTION_NAME, register_attention
from rekindle.model.auto_formats import auto_formats
from rekindle.model.formats import LayerFormats
from rekindle.model.latent import LatentMap, absorb_latents
from rekindle.model.loaded import LoadedModel
from rekindle.spec import KVLayout, LayerSpec
from rekindle_lab.bench.eval.kv import layouts_of
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, Loader, in_memory, random_ids, reference_logits
from tests.quantised_models import quantised_dir
from tests.tiny_models import LATENT_KINDS, tiny_model, tiny_model_dir

SIZES = {"kv_lora_rank": 128, "qk_rope_head_dim": 32}  # so that 4 bits are blocks of several words


def of(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A tiny model in memory."""
    register_attention()
    model = tiny_model(kind, dtype, **changes)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def loaded_from(directory: Path, **settings: Any) -> LoadedModel:
    chosen = ModelSettings(model=str(directory), **settings)
    return load_model(chosen, block_tokens=16, max_context=None, format_map_dir=None)


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_logits_are_the_model_s_own(kind: str) -> None:
    """In fp64, in pieces, alongside another sequence."""
    model = of(kind, torch.float64)
    bench, ids, others = Bench(in_memory(model)), random_ids(70), random_ids(50, seed=2)
    pieces = [bench.forward(("a", ids[:23]))[0]]
    pieces += [bench.forward(("a", ids[23:24]), ("b", others[:30]))[0]]
    pieces += [bench.forward(("b", others[30:]), ("a", ids[24:]))[1]]
    theirs = reference_logits(model, ids)
    assert (torch.cat(pieces) - theirs).abs().max() < 1e-6 * theirs.abs().max()  # routers choose and weigh in fp32


@pytest.mark.parametrize("kind", ["deepseek-v3", "minicpm3"])
def test_bits_depend_neither_on_cuts_nor_on_company(kind: str) -> None:
    loaded = in_memory(of(kind, torch.bfloat16, **SIZES), kv="q4h")
    bench, ids, others = Bench(loaded), random_ids(90), random_ids(40, seed=2)
    (whole,) = bench.forward(("whole", ids))
    pieces = [bench.forward(("a", ids[:5]), ("b", others[:11]))[0]]
    pieces += [bench.forward(("b", others[11:12]), ("a", ids[5:6]))[1]]
    pieces += [bench.forward(("a", ids[6:]), ("b", others[12:]))[0]]
    assert torch.equal(torch.cat(pieces), whole)
    assert bench.stored_bytes("a") == bench.stored_bytes("whole")


def test_what_is_kept_are_a_latent_in_4_bits_and_a_rotary_key(load: Loader) -> None:
    layout = load("deepseek-v3", "bf16", kv="q4h").spec.layout
    assert {(x.num_kv_heads, x.k_dim, x.v_dim, x.k_format, x.v_format, x.latent) for x in layout.layers} == {
        (1, 32, 16, "q4h", "bf16", True)
    }
    of_glm = KVLayout(64, (LayerSpec(0, 1, 512, 64, None, "q4h", "bf16", latent=True),))
    assert (of_glm.token_bytes, of_glm.token_bytes_16bit) == (416, 1152)


def test_digests_tell_latents_apart_and_leave_others_as_they_were() -> None:
    plain = LayerSpec(0, 2, 64, 64, None, "q4h", "q4h")
    digest = KVLayout(64, (plain,)).digest
    assert digest.hex() == "e752756225c50ccab2f3e9cbdea49d0518606dc493012e98b2a7ac58ba829e70", "stores become cold"
    native = replace(plain, v_format="bf16")
    assert KVLayout(64, (native,)).digest != KVLayout(64, (replace(native, latent=True),)).digest


def test_only_latents_can_be_in_4_bits() -> None:
    found = geometry.probe(absorbed(of("deepseek-v3", torch.float32)))
    assert {(x.k, x.v) for x in formats.forced_formats(found, "q4h")} == {("q4h", "fp32")}
    assert {(x.k, x.v) for x in formats.forced_formats(found, "bf16")} == {("bf16", "bf16")}
    with pytest.raises(ValueError, match="a rotary key are not rotated"):
        LayerSpec(0, 1, 64, 32, None, "q4h", "q4h", latent=True)
    odd = geometry.probe(absorbed(of("deepseek-v3", torch.float32, kv_lora_rank=24)))
    assert {(x.k, x.v) for x in auto_of("deepseek-v3", kv_lora_rank=24)} == {("fp32", "fp32")}
    with pytest.raises(ModelRefused, match="layer 0 has 24/16: use kv=auto"):
        formats.forced_formats(odd, "q4h")


def absorbed(model: Any) -> Any:
    """The same model, whose latent attention is ours."""
    assert absorb_latents(model, ATTENTION_NAME) > 0
    return model


def test_a_bias_before_the_norm_does_not_keep_latents_native() -> None:
    model = absorbed(of("deepseek-v3", torch.float32, attention_bias=True))
    assert not any(layer.k_bias for layer in geometry.probe(model).layers)


def auto_of(kind: str, **changes: Any) -> tuple[LayerFormats, ...]:
    """What `auto` takes for a tiny model in fp32, whose random weights are not as sharp as they come."""
    model = of(kind, torch.float32, **changes)
    model.lm_head.weight.data *= 0.1
    loaded = in_memory(model)
    return auto_formats(loaded, geometry.probe(loaded.model), None).layers


def test_auto_keeps_latents_in_4_bits_and_rotary_keys_native() -> None:
    assert [(x.k, x.v) for x in auto_of("deepseek-v3")] == [("q4h", "fp32")] * 3


def test_weights_of_maps_are_in_memory_once_and_counted() -> None:
    model = of("deepseek-v3", torch.bfloat16)
    before = loaded_bytes(model)
    expand = absorbed(model).model.layers[0].self_attn.expand_kv
    assert isinstance(expand, LatentMap) and (expand.keys.shape, expand.values.shape) == ((4, 32, 16), (4, 32, 32))
    assert loaded_bytes(model) == before


class Widened(torch.nn.Module):
    """A linear layer whose weight is not kept as numbers that can be taken."""

    def __init__(self, own: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.halves = own.in_features, own.weight.data / 2
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.halves * 2).T


def test_quantised_weights_are_widened_for_the_map() -> None:
    model = of("deepseek-v3", torch.float64)
    ids = random_ids(40)
    (theirs,) = Bench(in_memory(of("deepseek-v3", torch.float64))).forward(("a", ids))
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Widened(layer.self_attn.kv_b_proj)
    (ours,) = Bench(in_memory(model)).forward(("a", ids))
    assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max()


def test_maps_of_another_form_are_refused() -> None:
    def changed(change: Any) -> None:
        model = of("deepseek-v3", torch.float32)
        attention = model.model.layers[1].self_attn
        attention.expand_kv = change(attention, attention.expand_kv)
        absorb_latents(model, ATTENTION_NAME)

    otherwise = "otherwise than by a product of its weights"
    with pytest.raises(ModelRefused, match=otherwise):
        changed(lambda module, own: lambda latent, rotary: own(latent.tanh(), rotary))
    with pytest.raises(ModelRefused, match=otherwise):
        changed(lambda module, own: lambda latent, rotary: own(latent, rotary * 2))
    with pytest.raises(ModelRefused, match=otherwise):
        changed(lambda module, own: lambda latent, rotary: own(latent, rotary)[::-1])
    model = of("deepseek-v3", torch.float32)
    linear = model.model.layers[0].self_attn.kv_b_proj
    linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    with pytest.raises(ModelRefused, match="adds a bias to K and V of each head"):
        absorb_latents(model, ATTENTION_NAME)


@pytest.mark.parametrize("form", ["bnb-4bit", "torchao", "compressed-tensors", "fp8"])
def test_quantised_checkpoints_are_served(form: str, tmp_path: Path) -> None:
    directory = quantised_dir(form, tmp_path, "minicpm3", kv_lora_rank=128, q_lora_rank=128, qk_rope_head_dim=32)
    loaded = loaded_from(directory, kv="bf16")
    assert loaded.promise == "bitwise" and all(layer.latent for layer in loaded.spec.layout.layers)
    ids = random_ids(40)
    ours = Bench(loaded).forward(("a", ids))[0].float()
    theirs = reference_logits(loaded.model, ids).float()
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


@needs_kernels
def test_int8_says_what_the_maps_take(tmp_path: Path) -> None:
    directory = tiny_model_dir("deepseek-v3", "bf16", tmp_path)
    note = "weights: the maps of latent attention stay as they are, in 36,864 bytes"
    assert note in loaded_from(directory, weights="int8").notes
    assert note not in loaded_from(directory).notes


def test_formats_that_an_evaluation_compares(load: Loader) -> None:
    layouts = layouts_of(load("deepseek-v3", "bf16", kv="q4h"))
    assert {name: next(iter(layout.formats())) for name, layout in layouts.items()} == {
        "native": "bf16/bf16",
        "auto": "q4h/bf16",
        "q8h": "q8h/bf16",
        "q8h/q4h": "q8h/bf16",
        "q4h": "q4h/bf16",
    }


def test_latents_that_are_too_long_to_rotate_stay_native() -> None:
    found = geometry.probe(absorbed(of("deepseek-v3", torch.float32, kv_lora_rank=1024)))
    reasons = {(x.k, x.reason) for x in auto_of("deepseek-v3", kv_lora_rank=1024)}
    assert reasons == {("fp32", "head size 1024 is divisible by 1024")}
    with pytest.raises(ModelRefused, match="not by 1024; layer 0 has 1024/16"):
        formats.forced_formats(found, "q4h")


def test_latents_without_a_rotary_key_are_refused() -> None:
    with pytest.raises(ModelRefused, match="without a rotary key is not implemented"):
        absorbed(of("kimi-linear", torch.float32, qk_rope_head_dim=0))


def test_plain_models_have_no_latents() -> None:
    assert absorb_latents(of("llama", torch.float32), ATTENTION_NAME) == 0
