"""Linear layers of bitsandbytes on request, experts packed next to them, and what is said of both."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit

from rekindle.compute.cpu import experts
from rekindle.compute.cpu.packed import PackedLinear, packed_weights
from rekindle.compute.cpu.weights import loaded_bytes
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.errors import ConfigError
from rekindle.model import bnb_linears
from rekindle.model.loaded import LoadedModel
from rekindle.model.trial import row_errors
from rekindle_lab.bench.engine.gguf_model import write_gguf
from tests.kernels.native import needs_kernels
from tests.model.helpers import Bench, random_ids
from tests.quantised_models import WIDE, quantised_dir

Bnb = Literal["bnb-4bit", "bnb-8bit"]
BOTH: list[tuple[Bnb, float]] = [("bnb-4bit", 0.7), ("bnb-8bit", 0.2)]


def load(directory: Path, weights: Any, **changes: Any) -> LoadedModel:
    settings = {"model": str(directory), "weights": weights, "kv": "bf16", "threads": 1, **changes}
    return load_model(ModelSettings(**settings), block_tokens=16, max_context=None, format_map_dir=None)


def numbers(note: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]{5,}", note)]


def logits(loaded: LoadedModel) -> torch.Tensor:
    return Bench(loaded).forward(("a", random_ids(60)))[0]


@pytest.mark.parametrize(("weights", "worst"), BOTH)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_linear_layers_take_as_many_bits_and_are_near_their_own(
    weights: Bnb, worst: float, dtype: Any, model_dir: Callable[..., Path]
) -> None:
    directory = model_dir("llama", "bf16", **WIDE)
    own, loaded = load(directory, "native", dtype=dtype), load(directory, weights, dtype=dtype)
    assert loaded.dtype == own.dtype and loaded.spec.fingerprint != own.spec.fingerprint
    (note,) = [note for note in loaded.notes if note.startswith("weights: ")]
    assert note.startswith(f"weights: 14 linear layers in {weights}, ")
    took, in_bf16 = numbers(note)
    computed = bnb_linears.num_bytes(bnb_linears.layers(loaded.model))
    assert 0 <= took - computed <= 2 * 14  # the kernel for AVX512-BF16 halves one number of each layer when it computes
    bits = bnb_linears.BITS[weights]
    assert bits / 16 < took / in_bf16 < 1.07 * bits / 16
    left = loaded_bytes(own.model) - in_bf16 * (2 if dtype == "fp32" else 1)
    assert left + took - 100 < loaded_bytes(loaded.model) <= left + took
    assert 0 < float(row_errors(logits(loaded), logits(own)).mean()) < worst
    assert loaded.promise == "bitwise"


@needs_kernels
def test_what_is_left_is_computed_by_the_kernels(model_dir: Callable[..., Path]) -> None:
    loaded = load(model_dir("llama", "bf16", **WIDE), "bnb-4bit")
    assert isinstance(loaded.model.lm_head, PackedLinear) and loaded.model.lm_head.packed.format == "bf16"
    assert len(list(packed_weights(loaded.model))) == 1
    assert "forward" in loaded.model.model.norm.__dict__  # fused


@needs_kernels
@pytest.mark.parametrize(("weights", "packed", "worst"), [("bnb-4bit", "int4", 0.9), ("bnb-8bit", "int8", 0.4)])
@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_experts_are_packed_by_the_kernels(
    kind: str, weights: Bnb, packed: str, worst: float, model_dir: Callable[..., Path]
) -> None:
    directory = model_dir(kind, "bf16", hidden_size=128, intermediate_size=128)
    own, loaded = load(directory, "native"), load(directory, weights)
    _, matrices = [note for note in loaded.notes if note.startswith("weights: ")]
    held = list(experts.packed_weights(loaded.model))
    assert {each.format for each in held} == {packed}
    assert matrices.startswith(f"weights: {len(held)} matrices of experts, ") and f" in {packed}, " in matrices
    took, in_bf16 = numbers(matrices)
    assert took == sum(each.num_bytes for each in held) and took < 1.2 * in_bf16 * bnb_linears.BITS[weights] / 16
    assert loaded_bytes(loaded.model) < loaded_bytes(own.model) - (in_bf16 - took)
    assert float(row_errors(logits(loaded), logits(own)).median()) < worst
    assert loaded.promise == "bitwise"


@needs_kernels
def test_a_later_start_maps_what_the_kernels_had_packed(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    settings = ModelSettings(model=str(model_dir("mixtral", "bf16")), weights="bnb-4bit", map_weights="on", threads=1)
    first = load_model(settings, block_tokens=16, max_context=None, format_map_dir=tmp_path)
    assert first.unsaved is not None
    first.unsaved.save()
    second = load_model(settings, block_tokens=16, max_context=None, format_map_dir=tmp_path)
    assert second.unsaved is None
    assert torch.equal(logits(first), logits(second)) and first.spec == second.spec


@pytest.mark.parametrize("kind", ["llama", "qwen3.5"])
def test_shapes_that_its_fastest_kernel_does_not_take_are_computed(kind: str, model_dir: Callable[..., Path]) -> None:
    """Inputs that are no multiples of 64 and outputs that are none of 32, which fail otherwise on some processors."""
    loaded = load(model_dir(kind, "bf16"), "bnb-4bit")
    shapes = [(each.in_features % 64, each.out_features % 32) for each in bnb_linears.layers(loaded.model)]
    assert any(sum(shape) for shape in shapes) and loaded.promise in ("bitwise", "close")


def test_products_in_fp32_are_not_rounded_to_16_bits(model_dir: Callable[..., Path]) -> None:
    layer: Any = bnb_linears.layers(load(model_dir("llama", "bf16", **WIDE), "bnb-4bit", dtype="fp32").model)[0]
    rows, codes = torch.randn(9, layer.in_features), layer.weight
    with torch.inference_mode():
        wanted = rows @ dequantize_4bit(codes.data, codes.quant_state).float().T
        assert float((layer(rows) - wanted).norm() / wanted.norm()) < 1e-5


def test_experts_that_stay_wide_are_said_to(model_dir: Callable[..., Path]) -> None:
    loaded = load(model_dir("mixtral", "bf16"), "bnb-4bit", kernels="torch")
    _, note = [note for note in loaded.notes if note.startswith("weights: ")]
    weights = [each for name, each in loaded.model.named_parameters() if each.dim() == 3]
    assert (
        numbers(note) == [sum(each.nbytes for each in weights)]
        and "which are not for bitsandbytes, stay as they are" in note
    )


def test_a_missing_library_is_named(model_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes: pip install 'rekindle\[bnb\]'; .*int4"):
        load(model_dir("llama", "bf16"), "bnb-4bit")


def test_it_is_for_bf16_checkpoints_and_some_devices(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="this one is quantised by fp8: leave weights at native"):
        load(quantised_dir("fp8", tmp_path), "bnb-4bit")
    write_gguf(model_dir("llama", "bf16"), tmp_path / "tiny.gguf", "q8_0")
    with pytest.raises(ConfigError, match="this one is a GGUF file: leave weights at native"):
        load(tmp_path / "tiny.gguf", "bnb-8bit")
    with pytest.raises(ConfigError, match="weights=bnb-8bit is for the CPU and CUDA, not for mps"):
        bnb_linears.check("bnb-8bit", "mps")
    with pytest.raises(ConfigError, match="computes in bf16 or fp32, not in fp64"):
        bnb_linears.quantization_config("bnb-4bit", torch.float64)
