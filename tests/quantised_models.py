"""Tiny checkpoints in the forms in which quantised models are shipped.

`quantised_dir(form, parent)` writes one. Where a library makes them on a CPU in little time it is used; FP8 in blocks
and MXFP4 are written as their files are laid out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from tests.tiny_models import tiny_model_dir, write_tokenizer

# Wide enough that linear layers are most of the model, and that columns fill whole panels.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
BLOCK = 32  # of FP8's scales, in both directions
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KINDS = {"mxfp4": "gpt-oss"}  # of others llama


def quantised_dir(form: str, parent: Path, kind: str | None = None, **changes: Any) -> Path:
    """Write a tiny model in one of `FORMS`; returns its directory, next to which the original stays."""
    kind = kind or KINDS.get(form, "llama")
    widths = WIDE if kind == "llama" else {"hidden_size": 128, "intermediate_size": 128}
    original = tiny_model_dir(kind, "bf16", parent, **{**widths, **changes})
    target = parent / f"{kind}-{form}"
    FORMS[form](original, target)
    if not (target / "tokenizer.json").exists():
        write_tokenizer(target)
    return target


def change_config(directory: Path, **changes: Any) -> None:
    """Change keys of a model's config."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def _rewritten(original: Path, target: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Copy a model, with what `change` returns in place of each tensor."""
    shutil.copytree(original, target)
    path, made = target / "model.safetensors", {}
    for name, weight in load_file(path).items():
        made |= change(name, weight)
    save_file(made, path, {"format": "pt"})


def in_fp8(original: Path, target: Path) -> None:
    """Linear layers as DeepSeek and Qwen ship them: 8 bits, and a scale for every square."""

    def change(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if weight.dim() != 2 or "proj" not in name:
            return {name: weight}
        rows, columns = (size // BLOCK for size in weight.shape)
        squares = weight.float().reshape(rows, BLOCK, columns, BLOCK)
        scales = squares.abs().amax((1, 3), keepdim=True) / 448
        codes = (squares / scales).reshape(weight.shape).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scales.reshape(rows, columns)}

    _rewritten(original, target, change)
    described = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    change_config(target, quantization_config=described)


def in_mxfp4(original: Path, target: Path) -> None:
    """Experts as gpt-oss is shipped: 4 bits, and an exponent for every 32 values of an output's inputs."""

    def change(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight}
        groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
        scaled = groups / 2**exponents
        codes = (scaled.abs().unsqueeze(-1) - FP4).abs().argmin(-1) + 8 * (scaled < 0)
        return {
            f"{name}_blocks": (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8),
            f"{name}_scales": (exponents.squeeze(-1) + 127).to(torch.uint8),
        }

    _rewritten(original, target, change)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    change_config(target, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": left})


def in_4_bits(original: Path, target: Path) -> None:
    """4 bits in groups of 32, as compressed-tensors packs them into integers."""
    _compressed(original, target, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, most=7)


def in_8_bits(original: Path, target: Path) -> None:
    """8 bits with a scale for each output, and inputs in 8 bits as well, as compressed-tensors has it."""
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    _compressed(original, target, {"num_bits": 8, "type": "int", "strategy": "channel"}, most=127, inputs=inputs)


def _compressed(
    original: Path, target: Path, weights: dict[str, Any], *, most: int, inputs: dict[str, Any] | None = None
) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(symmetric=True, **weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="initialized")
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            groups = module.weight.data.float().unflatten(1, (-1, weights.get("group_size", module.weight.shape[1])))
            module.weight_scale.data.copy_(groups.abs().amax(-1) / most)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)


def in_bnb_4_bits(original: Path, target: Path) -> None:
    """nf4 of bitsandbytes, scales quantised again."""
    wanted = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    _loaded_and_saved(original, target, wanted)


def in_bnb_8_bits(original: Path, target: Path) -> None:
    """8 bits of bitsandbytes, with the threshold that its checkpoints have."""
    _loaded_and_saved(original, target, BitsAndBytesConfig(load_in_8bit=True))


def in_torchao(original: Path, target: Path) -> None:
    """8 bits of torchao, weights alone."""
    from torchao.quantization import Int8WeightOnlyConfig

    _loaded_and_saved(original, target, TorchAoConfig(Int8WeightOnlyConfig()))


def _loaded_and_saved(original: Path, target: Path, wanted: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        original, dtype=torch.bfloat16, quantization_config=wanted, device_map={"": "cpu"}
    )
    model.save_pretrained(target)


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "fp8": in_fp8,
    "mxfp4": in_mxfp4,
    "compressed-tensors": in_4_bits,
    "compressed-tensors-8": in_8_bits,
    "bnb-4bit": in_bnb_4_bits,
    "bnb-8bit": in_bnb_8_bits,
    "torchao": in_torchao,
}
