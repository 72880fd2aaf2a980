"""Checkpoints as they are shipped: models that also see, quantised ones, and what they take in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from rekindle.compute.cpu import experts
from rekindle.compute.cpu.packed import packed_weights
from rekindle.compute.cpu.weights import loaded_bytes
from rekindle.compute.load import load_model, read_config
from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model import checkpoint
from rekindle.model.checkpoint_form import CheckpointForm
from rekindle.model.loaded import LoadedModel
from rekindle.model.loader import Weights
from rekindle.model.refusals import quantiser, refuse_by_config
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, Loader, random_ids, reference_logits
from tests.quantised_models import change_config, quantised_dir
from tests.tiny_models import SEEING_KINDS, tiny_config, tiny_model_dir


def loaded_from(directory: Path, **settings: Any) -> LoadedModel:
    settings = {"model": str(directory), "kv": "bf16", "threads": 1, **settings}
    return load_model(ModelSettings(**settings), block_tokens=16, max_context=None, format_map_dir=None)


def error(loaded: LoadedModel, model: Any = None) -> float:
    """How far the logits of some ids are from the own ones of a model, by default of the same, as a share of them."""
    ids = random_ids(40)
    ours, theirs = Bench(loaded).forward(("a", ids))[0].float(), reference_logits(model or loaded.model, ids).float()
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("kind", SEEING_KINDS)
def test_models_that_also_see_are_served_for_text(load: Loader, kind: str) -> None:
    loaded = load(kind, "fp64", kv="fp32")
    assert loaded.promise == ("close" if loaded.spec.layout.states else "bitwise")
    ids = random_ids(60)
    bench = Bench(loaded)
    ours = torch.cat([bench.forward(("a", part))[0] for part in (ids[:23], ids[23:24], ids[24:])])
    theirs = reference_logits(loaded.model, ids)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def said_to_be_widened(loaded: LoadedModel) -> bool:
    """Whether a note says that its weights take more memory than their files."""
    return any(note.startswith("weights: ") and " is widened here, on cpu" in note for note in loaded.notes)


@needs_kernels
@pytest.mark.parametrize(
    ("form", "share", "least"),
    [("fp8", 1.1, 1.5), ("compressed-tensors", 1.9, 1.5), ("compressed-tensors-8", 1.1, 1.5), ("mxfp4", 1.7, 1.3)],
)
def test_what_is_widened_is_packed_in_8_bits(tmp_path: Path, form: str, share: float, least: float) -> None:
    """So that it takes about a byte a value, in place of two, and says what."""
    directory = quantised_dir(form, tmp_path)
    loaded, plain = loaded_from(directory), loaded_from(directory, kernels="torch")
    assert (loaded.promise, plain.promise) == ("bitwise", "bitwise")
    took, held, wide = loaded_bytes(loaded.model), loaded.spec.facts.file_bytes, loaded_bytes(plain.model)
    assert took < share * held and wide > least * took
    assert [each.spec.facts.weight_bytes for each in (loaded, plain)] == [took, wide]
    assert said_to_be_widened(loaded) and said_to_be_widened(plain)
    held_in = {*packed_weights(loaded.model), *experts.packed_weights(loaded.model)}
    assert {each.format for each in held_in} == {"int8"} and not list(packed_weights(plain.model))
    assert error(loaded) < 0.1 and error(loaded, plain.model) < 0.2
    assert loaded.spec.fingerprint != plain.spec.fingerprint


@needs_kernels
def test_experts_in_fp8_are_packed_too(tmp_path: Path) -> None:
    loaded = loaded_from(quantised_dir("fp8", tmp_path, "qwen3-moe", moe_intermediate_size=64))
    assert {each.format for each in experts.packed_weights(loaded.model)} == {"int8"} and loaded.promise == "bitwise"
    assert said_to_be_widened(loaded)
    assert loaded_bytes(loaded.model) < 1.05 * loaded.spec.facts.file_bytes


@needs_kernels
def test_weights_that_are_asked_for_are_what_it_is_packed_in(tmp_path: Path) -> None:
    directory = quantised_dir("mxfp4", tmp_path)
    loaded = loaded_from(directory, weights="int4")
    assert {each.format for each in experts.packed_weights(loaded.model)} == {"int4"}
    assert loaded_bytes(loaded.model) < 1.2 * loaded.spec.facts.file_bytes


@pytest.mark.parametrize(("form", "worst"), [("bnb-4bit", 0.8), ("bnb-8bit", 0.2), ("torchao", 0.2)])
def test_what_stays_small_takes_what_its_files_hold(tmp_path: Path, form: str, worst: float) -> None:
    directory = quantised_dir(form, tmp_path)
    loaded = loaded_from(directory)
    original = loaded_from(next(path for path in tmp_path.iterdir() if path.name.endswith("bf16-0")))
    assert loaded.promise == "bitwise" and not any("bytes" in note for note in loaded.notes[:-1])
    held = checkpoint.expected_bytes(checkpoint.weight_files(directory), None)
    assert 0.95 * held < loaded_bytes(loaded.model) < 1.05 * held < 0.65 * loaded_bytes(original.model)
    assert error(loaded) < 0.1 and 0.01 < error(loaded, original.model) < worst
    assert any("threshold" in note for note in loaded.notes) == (form == "bnb-8bit")


@pytest.mark.parametrize(
    ("form", "worst"), [("fp8", 0.3), ("mxfp4", 0.5), ("compressed-tensors", 0.8), ("compressed-tensors-8", 0.3)]
)
def test_values_are_those_of_the_form(tmp_path: Path, form: str, worst: float) -> None:
    """Nearer to the original than any mistake in scales or order would leave them."""
    directory = quantised_dir(form, tmp_path)
    loaded = loaded_from(directory, kernels="torch")
    original = loaded_from(next(path for path in tmp_path.iterdir() if path.name.endswith("bf16-0")), kernels="torch")
    assert error(loaded) < 0.2 and 0.001 < error(loaded, original.model) < worst


def test_the_dtype_of_what_is_widened_may_be_chosen(tmp_path: Path) -> None:
    for form in ("fp8", "compressed-tensors"):
        loaded = loaded_from(quantised_dir(form, tmp_path / form), dtype="fp32", kv="fp32")
        assert loaded.dtype == torch.float32 and not any("dtype is ignored" in note for note in loaded.notes)
        assert error(loaded) < 1e-3
    change_config(tmp_path / "fp8" / "llama-fp8", dtype="float16")
    loaded = loaded_from(tmp_path / "fp8" / "llama-fp8")
    assert loaded.dtype == torch.bfloat16 and any("fp16: loaded as bf16" in note for note in loaded.notes)


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "compressed-tensors", "compressed-tensors-8"])
def test_memory_is_judged_by_what_is_taken_once_it_is_wide(tmp_path: Path, form: str) -> None:
    directory = quantised_dir(form, tmp_path)
    files, config = checkpoint.weight_files(directory), read_config(directory)
    took = loaded_bytes(loaded_from(directory, kernels="torch").model)
    assert 0.97 * took < CheckpointForm.of(files, config, ModelSettings()).needed_bytes("auto") <= 1.01 * took
    on_gpu = CheckpointForm.of(files, config, ModelSettings(device="cuda")).needed_bytes("auto")
    assert (on_gpu < 0.7 * took) == (form in ("fp8", "mxfp4"))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_needs_kernels_compiled_at_load_is_refused_on_the_cpu(tmp_path: Path, method: str) -> None:
    directory = tiny_model_dir("llama", "bf16", tmp_path)
    change_config(directory, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=f"quantised by {method}; .*gptqmodel, compiles .* with weights=int8"):
        loaded_from(directory)
    refuse_by_config(read_config(directory), "cuda:1")


def test_a_config_that_nests_its_quantisation_is_read(tmp_path: Path) -> None:
    config = tiny_config("mistral3")
    config.text_config.quantization_config = {"quant_method": "gptq"}
    assert quantiser(config) == "gptq" and quantiser(tiny_config("mistral3")) is None


def test_a_library_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = tiny_model_dir("llama", "bf16", tmp_path)
    change_config(directory, quantization_config={"quant_method": "hqq", "bits": 4, "group_size": 32})
    with pytest.raises(ModelRefused, match="quantised by hqq, and a library that reads this is missing: install"):
        loaded_from(directory)


class Holder(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.again = self.weight


def test_bytes_of_tensors_inside_a_subclass_are_counted() -> None:
    """As torchao's: what is asked for its storage has none, and raises."""
    assert loaded_bytes(Holder(torch.zeros(3, 5))) == 60
    assert loaded_bytes(Holder(TwoTensor(torch.zeros(3, 5), torch.zeros(3, 5)))) == 120


def test_weights_that_are_larger_than_memory_once_they_are_loaded_are_refused() -> None:
    model = nn.Linear(1 << 20, 1 << 21, bias=False, device="meta")
    assert Weights(model, (), 8 << 40, 8 << 40).size_notes("cpu", "native", 8 << 40, 1 << 40) == []
    with pytest.raises(ModelRefused, match=r"take 8,796,093,022,208 bytes, .* by fp8 is widened here, on cpu"):
        Weights(model, (), 1 << 40, 8 << 40, "what is quantised by fp8").size_notes("cpu", "native", 8 << 40, 1 << 40)


def test_a_checkpoint_that_is_only_wider_says_so() -> None:
    model = nn.Linear(4, 4, bias=False)
    notes = Weights(model, (), 32, 64).size_notes("cpu", "native", 64, 1 << 40)
    assert notes == ["weights: some weights were loaded wider than stored"]
