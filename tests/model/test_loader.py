"""Checkpoints as they are shipped: models that also see, quantised ones, and what they take in memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

from rekindle.config import ModelSettings
from rekindle.errors import ModelRefused
from rekindle.model.load import load_model
from rekindle.model.loaded import LoadedModel
from rekindle.model.loader import Weights, loaded_bytes
from tests.model.helpers import Bench, Loader, random_ids, reference_logits
from tests.tiny_models import SEEING_KINDS, tiny_model, tiny_model_dir, write_tokenizer

BLOCK = 32  # of FP8's scales, in both directions


def loaded_from(directory: Path) -> LoadedModel:
    settings = ModelSettings(model=str(directory), kv="bf16")
    return load_model(settings, block_tokens=16, max_context=None, format_map_dir=None)


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


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def in_fp8(directory: Path) -> Path:
    """Rewrite a model's linear layers as DeepSeek and Qwen ship them: 8 bits, and a scale for every square."""
    path, made = directory / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if weight.dim() != 2 or "proj" not in name:
            made[name] = weight
            continue
        rows, columns = (size // BLOCK for size in weight.shape)
        squares = weight.float().reshape(rows, BLOCK, columns, BLOCK)
        scales = squares.abs().amax((1, 3), keepdim=True) / 448
        made[name] = (squares / scales).reshape(weight.shape).to(torch.float8_e4m3fn)
        made[f"{name}_scale_inv"] = scales.reshape(rows, columns)
    save_file(made, path, {"format": "pt"})
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    change_config(directory, quantization_config=described)
    return directory


def test_fp8_is_served_and_said_to_be_dequantised(tmp_path: Path) -> None:
    directory = in_fp8(tiny_model_dir("llama", "bf16", tmp_path, head_dim=64))
    loaded = loaded_from(directory)
    assert loaded.promise == ("close" if loaded.spec.layout.states else "bitwise")
    (note,) = [note for note in loaded.notes if "where the files hold" in note]
    assert note.endswith("what is quantised by fp8 is dequantised here, on cpu"), note
    assert error(loaded) < 0.03
    assert error(loaded, tiny_model("llama", torch.bfloat16, head_dim=64)) < 0.3


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_mxfp4(directory: Path) -> Path:
    """Rewrite the experts as gpt-oss is shipped: 4 bits, and an exponent for every 32 values of an output's inputs."""
    path, made = directory / "model.safetensors", {}
    for name, weight in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made[name] = weight
            continue
        groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        scaled = groups / 2**exponents
        codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1) + 8 * (scaled < 0)
        made[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        made[f"{name}_scales"] = (exponents.squeeze(-1) + 127).to(torch.uint8)
    save_file(made, path, {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    change_config(directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})
    return directory


def test_mxfp4_is_served_and_said_to_be_dequantised(tmp_path: Path) -> None:
    loaded = loaded_from(in_mxfp4(tiny_model_dir("gpt-oss", "bf16", tmp_path)))
    assert loaded.promise == ("close" if loaded.spec.layout.states else "bitwise")
    (note,) = [note for note in loaded.notes if "where the files hold" in note]
    assert note.endswith("what is quantised by mxfp4 is dequantised here, on cpu"), note
    assert error(loaded, tiny_model("gpt-oss", torch.bfloat16)) < 0.5


def in_4_bits(original: Path, target: Path) -> None:
    """Write a model in 4 bits, groups of 32, as compressed-tensors packs them."""
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], format="pack-quantized", quantization_status="initialized"
    )
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.float().unflatten(1, (-1, 32))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / 7)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)
    write_tokenizer(target)


def test_what_is_widened_by_the_first_pass_is_counted_after_it(tmp_path: Path) -> None:
    original = tiny_model_dir("llama", "bf16", tmp_path)
    in_4_bits(original, tmp_path / "packed")
    loaded = loaded_from(tmp_path / "packed")
    assert loaded.promise == ("close" if loaded.spec.layout.states else "bitwise")
    (note,) = [note for note in loaded.notes if "where the files hold" in note]
    took, held = (int(number.replace(",", "")) for number in re.findall(r"[\d,]{5,}", note))
    assert took > 1.5 * held and note.endswith("what is quantised by compressed-tensors is dequantised here, on cpu")
    assert error(loaded) < 0.03 and error(loaded, tiny_model("llama", torch.bfloat16)) < 0.8


@pytest.mark.parametrize("method", ["awq", "gptq", "hqq"])
def test_a_library_that_is_missing_is_named(tmp_path: Path, method: str) -> None:
    directory = tiny_model_dir("llama", "bf16", tmp_path)
    change_config(directory, quantization_config={"quant_method": method, "bits": 4, "group_size": 32})
    with pytest.raises(ModelRefused, match=f"quantised by {method}, and a library that reads this is missing: install"):
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
    assert Weights(model, (), 8 << 40, None).size_notes("cpu") == []
    with pytest.raises(ModelRefused, match=r"take 8,796,093,022,208 bytes, .* quantised by fp8 is dequantised here"):
        Weights(model, (), 1 << 40, "fp8").size_notes("cpu")


def test_a_checkpoint_that_is_only_wider_says_so() -> None:
    model = nn.Linear(4, 4, bias=False)
    assert Weights(model, (), 32, None).size_notes("cpu") == [
        "weights take 64 bytes where the files hold 32: some weights were loaded wider than stored"
    ]
