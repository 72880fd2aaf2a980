"""Weights in int8 and int4: near the checkpoint's own, the same bits on every path, left where they do not suit.

`auto` takes int8 only where it costs nothing, and int4 never.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from rekindle import pocket
from rekindle.compute.cpu.experts import packed_weights as packed_expert_weights
from rekindle.compute.cpu.kernels.linear import MOST_INT8_DEPTH
from rekindle.compute.cpu.packed import (
    PackedLinear,
    observed_linears,
    pack_linears,
    packed_weights,
)
from rekindle.compute.cpu.packer import KernelPacker, Packer
from rekindle.compute.cpu.weights import Linears, Weights, WeightsChoice, check_ids, verdict
from rekindle.compute.devices import choose_kernels, named_device
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError
from rekindle.layer_forms import WeightFormat
from rekindle.model.check_text import OWN_TEXT
from rekindle.model.compare import checked_rows, same_products
from rekindle.model.divergence import Divergence, divergence
from rekindle.model.geometry import probe
from rekindle.model.loaded import LoadedModel
from rekindle.model.padded_experts import padded_experts
from rekindle.model.selftest import self_test
from rekindle.model.trial import row_errors
from rekindle_pocket.conversations import conversation
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, in_memory, random_ids, reference_logits
from tests.tiny_models import tiny_model, write_tokenizer

BF16 = torch.bfloat16


def load(model: Path | None, weights: Any, decisions: Path | None = None, **changes: Any) -> LoadedModel:
    settings = ModelSettings(model=str(model) if model else None, weights=weights, **changes)
    return load_model(settings, block_tokens=16, max_context=None, format_map_dir=decisions)


def notes_of(loaded: LoadedModel) -> list[str]:
    return [note for note in loaded.notes if note.startswith("weights: ")]


@pytest.fixture
def packer() -> KernelPacker:
    library = choose_kernels(ModelSettings(), "cpu").library
    assert library is not None
    return KernelPacker.of(library)


def linears_of(model: Any, packer: Packer) -> Linears:
    """A tiny bf16 model in memory, and which of its layers a pass calls."""
    in_memory(model)
    with observed_linears(model) as called:
        probe(model)
    return Linears(model, called, packer)


@needs_kernels
def test_the_bundled_model_in_int8_is_near_its_own_precision() -> None:
    own, rounded = load(None, "native"), load(None, "int8")
    assert {each.format for each in packed_weights(own.model)} == {"bf16"} and notes_of(own) == []
    assert {each.format for each in packed_weights(rounded.model)} == {"int8"}
    assert notes_of(rounded) == ["weights: 57 of 57 packed layers in int8, 7,536,640 bytes where bf16 takes 14,680,064"]
    assert rounded.promise == "bitwise"
    ids = random_ids(200)
    (before,), (after,) = (Bench(each).forward(("a", ids)) for each in (own, rounded))
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    assert 0 < float((p.exp() * (p - q)).sum(-1).mean()) < 0.005


@needs_kernels
def test_the_bundled_model_in_int4_says_mostly_the_same() -> None:
    own, rounded = load(None, "native"), load(None, "int4")
    assert rounded.model.lm_head.packed.format == "int8"
    assert [each.format for each in packed_weights(rounded.model)].count("int4") == 56
    (note,) = notes_of(rounded)
    assert note == (
        "weights: 56 of 57 packed layers in int4, 1 in int8 (the head, and what int4 does not suit), "
        "4,489,216 bytes where bf16 takes 14,680,064"
    )
    assert rounded.promise == "bitwise"
    chat = conversation(random.Random(7), 700)
    tokenizer = AutoTokenizer.from_pretrained(pocket.model_dir())
    ids = tokenizer.apply_chat_template(chat["messages"], tools=chat.get("tools"), return_dict=False)[:512]
    found = divergence(*(Bench(each).forward(("a", ids))[0] for each in (own, rounded)))
    assert 0 < found.kl < 0.006 and found.agreement > 0.96


@needs_kernels
def test_kv_of_rounded_weights_is_never_mixed_with_that_of_others(model_dir: Callable[..., Path]) -> None:
    directory = model_dir("llama", "bf16")
    assert len({load(directory, weights).spec.fingerprint for weights in get_args(Weights)}) == 5


@needs_kernels
@pytest.mark.parametrize(("weights", "error"), [("int8", 0.2), ("int4", 0.7)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "gpt2", "phi3"])
def test_every_path_gives_the_same_bits(kind: str, weights: Weights, error: float, packer: KernelPacker) -> None:
    model = tiny_model(kind, BF16)
    linears = linears_of(model, packer)
    native = reference_logits(model, random_ids(50))
    linears.pack(WeightsChoice(weights, "forced"))
    assert self_test(in_memory(model, kv="q4h")).promise == "bitwise"
    assert float(row_errors(reference_logits(model, random_ids(50)), native).mean()) < error


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_tied_embedding_keeps_its_values(weights: Weights, packer: KernelPacker) -> None:
    expected = tiny_model("llama", BF16, tie_word_embeddings=True).get_input_embeddings().weight
    model = tiny_model("llama", BF16, tie_word_embeddings=True)
    linears_of(model, packer).pack(WeightsChoice(weights, "forced"))
    embedding = model.get_input_embeddings()
    assert type(embedding) is nn.Embedding and torch.equal(embedding.weight, expected)
    assert isinstance(model.lm_head, PackedLinear) and model.lm_head.packed.format == "int8"


@needs_kernels
@pytest.mark.parametrize(("weights", "error"), [("int8", 0.05), ("int4", 0.3)])
def test_experts_are_rounded_too(weights: Weights, error: float, packer: KernelPacker) -> None:
    model = tiny_model("mixtral", BF16)
    rows, chosen = torch.randn(9, 64).to(BF16), torch.randint(4, (9, 2))
    shares = torch.rand(9, 2).to(BF16)
    linears = linears_of(model, packer)
    layer = next(module for module in model.modules() if hasattr(module, "has_post_expert_norm"))
    with torch.inference_mode():
        before = padded_experts(layer, rows, chosen, shares)
        (note,) = linears.pack(WeightsChoice(weights, "forced"))
        after = padded_experts(layer, rows, chosen, shares)
        alone = padded_experts(layer, rows[3:4], chosen[3:4], shares[3:4])
    held = list(packed_expert_weights(model))
    assert len(held) == 3 * 2 * 4 and {each.format for each in held} == {weights}
    assert f" of {3 * 4 + 1 + len(held)} packed layers in {weights}" in note
    assert 0 < float((after - before).float().norm() / before.float().norm()) < error
    assert torch.equal(alone[0], after[3])


@needs_kernels
def test_a_layer_that_int4_does_not_suit_is_in_int8(packer: KernelPacker) -> None:
    uneven = nn.Linear(63, 64, dtype=BF16)  # of an odd depth, so not rotated
    with torch.no_grad():
        uneven.weight.uniform_(-0.07, 0.07)
        uneven.weight[:, ::32] = 1.0  # beside it, a code of 4 bits is 0 for all others
    model = nn.Sequential(uneven, nn.Linear(64, 64, dtype=BF16))
    with observed_linears(model) as called:
        model(torch.zeros(1, 63, dtype=BF16))
    assert pack_linears(model, packer, called, "int4") == []
    assert [each.format for each in packed_weights(model)] == ["int8", "int4"]


@needs_kernels
def test_a_layer_that_int8_does_not_suit_stays_in_bf16(packer: KernelPacker) -> None:
    tiny = nn.Linear(64, 64, bias=False, dtype=BF16)
    with torch.no_grad():
        tiny.weight *= 2.0**-110  # int8 takes them for zeros
    model = nn.Sequential(tiny, nn.Linear(64, 64, dtype=BF16))
    with observed_linears(model) as called:
        model(torch.zeros(1, 64, dtype=BF16))
    assert pack_linears(model, packer, called, "int8") == []
    assert [each.format for each in packed_weights(model)] == ["bf16", "int8"]


@pytest.mark.parametrize(
    ("kl", "agreement", "weights"),
    [
        (0.0019, 0.991, "int8"),
        (0.0021, 0.999, "native"),
        (0.0001, 0.989, "native"),
        (float("nan"), 1.0, "native"),
        (0.0, float("nan"), "native"),
    ],
)
def test_int8_is_taken_within_both_bounds_only(kl: float, agreement: float, weights: str) -> None:
    chosen = verdict(Divergence(kl, agreement))
    assert chosen.weights == weights
    assert ("passed the self-check" in chosen.reason) == (weights == "int8")


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_the_self_check_leaves_the_model_as_it_was(
    kind: str, packer: KernelPacker, model_dir: Callable[..., Path]
) -> None:
    model = tiny_model(kind, BF16)
    linears, ids = linears_of(model, packer), random_ids(50)
    modules, called, logits = list(model.modules()), set(linears.called), reference_logits(model, ids)
    chosen = linears.choose("auto", model_dir("llama"), 1024, None)
    assert "KL 0.0" in chosen.reason and "KL 0," not in chosen.reason  # something was measured
    assert list(model.modules()) == modules and linears.called == called
    assert torch.equal(reference_logits(model, ids), logits)


@needs_kernels
def test_the_decision_is_saved_and_followed(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    first = load(directory, "auto", tmp_path)
    (saved,) = tmp_path.glob("weights-*.json")
    decided = json.loads(saved.read_text())["weights"]
    assert first.spec.fingerprint == load(directory, decided).spec.fingerprint
    other = "native" if decided == "int8" else "int8"
    saved.write_text(json.dumps({"version": 1, "weights": other, "reason": "an earlier start"}))
    again = load(directory, "auto", tmp_path)
    assert again.spec.fingerprint == load(directory, other).spec.fingerprint
    assert "an earlier start" in "".join(notes_of(again))


@needs_kernels
@pytest.mark.parametrize(
    "content", ["{", "[]", "null", '{"version": 1}', '{"version": 0, "weights": "int8", "reason": ""}']
)
def test_a_damaged_decision_is_made_again(content: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = model_dir("llama", "bf16")
    expected = notes_of(load(directory, "auto", tmp_path))
    (saved,) = tmp_path.glob("weights-*.json")
    saved.write_text(content)
    assert notes_of(load(directory, "auto", tmp_path)) == expected
    assert json.loads(saved.read_text())["version"] == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_without_kernels_are_refused(weights: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"weights={weights} needs the kernels for the CPU, and what computes is torch"
    ):
        choose_kernels(ModelSettings(weights=weights, kernels="torch"), "cpu")
    with pytest.raises(
        ConfigError, match=f"weights={weights} needs kernels of ours, and what computes on mps is torch"
    ):
        named_device(ModelSettings(weights=weights, device="mps"))


def test_auto_does_without_kernels() -> None:
    loaded = load(None, "auto", kernels="torch")
    assert notes_of(loaded) == ["weights: native (int8 needs the kernels for the CPU)"]
    assert list(packed_weights(loaded.model)) == []


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_of_a_model_without_bf16_layers_are_refused(
    weights: Weights, model_dir: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=rf"weights={weights} has no effect on this model.*dtype=bf16"):
        load(model_dir("llama"), weights)
    load(model_dir("llama"), weights, dtype="bf16")


def test_the_text_of_the_self_check_fills_its_ids_unless_a_model_has_its_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert len(check_ids(tmp_path, 4096)) == 512
    assert len(check_ids(tmp_path, 103)) == 100 and len(check_ids(tmp_path, 2)) == 1
    (tmp_path / OWN_TEXT).write_text("The red box holds 4711 screws.", "utf-8")
    assert 4 <= len(check_ids(tmp_path, 4096)) < 30


@needs_kernels
def test_auto_leaves_a_model_without_bf16_layers_as_it_is(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    loaded = load(model_dir("llama"), "auto", tmp_path)
    assert notes_of(loaded) == ["weights: native (no linear layer is in bf16)"]
    assert list(tmp_path.glob("weights-*.json")) == []


@needs_kernels
def test_a_layer_that_is_too_deep_for_int8_stays_in_bf16(packer: KernelPacker) -> None:
    model = nn.Sequential(nn.Linear(MOST_INT8_DEPTH + 1, 2, dtype=BF16), nn.Linear(2, 64, dtype=BF16))
    with observed_linears(model) as called:
        model(torch.zeros(1, MOST_INT8_DEPTH + 1, dtype=BF16))
    assert pack_linears(model, packer, called, "int8") == []
    assert [each.format for each in packed_weights(model)] == ["bf16", "int8"]


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_one_wrong_column_of_many_is_seen(weight_format: WeightFormat) -> None:
    rows, weight = checked_rows(256), torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    right = rows @ weight.T
    assert same_products(right, right, rows, weight, weight_format=weight_format)
    wrong = right.clone()
    wrong[:, 77] = right[:, 78]
    assert not same_products(wrong, right, rows, weight, weight_format=weight_format)


def test_divergence_is_the_mean_over_rows_and_ignores_what_cannot_come() -> None:
    own, other = torch.randn(130, 40), torch.randn(130, 40)
    own[:, 7] = other[:, 7] = -torch.inf
    other[0] = own[0]
    p, q = (each.double()[:, [*range(7), *range(8, 40)]].log_softmax(-1) for each in (own, other))
    found = divergence(own, other)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-5)
    assert found.agreement == float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert divergence(own, own) == Divergence(0.0, 1.0)
