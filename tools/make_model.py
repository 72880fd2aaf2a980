"""Write a model directory of realistic size with random weights: as fast and large as a trained model.

    python tools/make_model.py 24-layer /tmp/model          # Llama: 387M parameters, bf16, 774 MB
    python tools/make_model.py qwen3-moe /tmp/mixture       # 64 experts, of which a token uses 8
    python tools/make_model.py tiny /tmp/tiny --layers 2
    python tools/make_model.py 8b /tmp/8b --context 131072 --device cuda

bf16 safetensors, a byte-level BPE tokenizer trained on the fly, the ChatML template. Answers are noise. Llama's shapes
have names of their own; of other families there is one with the proportions of its real models at 350M to 390M
parameters, and a tiny one. None has a bias on K, so that 4-bit KV applies, but gpt-oss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pocket.tokenizer import train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `tied` shares input and output embeddings, `others` are settings of its family."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    context: int
    tied: bool
    family: str = "llama"
    others: Mapping[str, Any] = field(default_factory=dict)


ROPE = {"rope_theta": 500_000.0}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _qwen3_moe(experts: int, chosen: int, inner: int) -> dict[str, Any]:
    mixture = {"num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}
    return {**mixture, "norm_topk_prob": True, "decoder_sparse_step": 1, "rope_parameters": ROPE}


def _gemma3(window: int, head_size: int, period: int) -> dict[str, Any]:
    """Every `period`-th layer sees everything, the others a window."""
    return {"sliding_window": window, "query_pre_attn_scalar": head_size, "sliding_window_pattern": period}


def _gpt_oss(experts: int, chosen: int, window: int) -> dict[str, Any]:
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "sliding_window": window,
        "rope_parameters": YARN,
    }


def _lfm2(period: int, layers: int) -> dict[str, Any]:
    """Every `period`-th layer attends, the others are short convolutions."""
    kinds = ["full_attention" if (at + 1) % period == 0 else "conv" for at in range(layers)]
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return {"layer_types": kinds, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "rope_parameters": rope}


def _qwen3_5(key_heads: int, value_heads: int, dim: int, layers: int) -> dict[str, Any]:
    """Every fourth layer attends, or the last of fewer; the others are Gated DeltaNet with heads of `dim`."""
    kinds = ["full_attention" if (at + 1) % min(4, layers) == 0 else "linear_attention" for at in range(layers)]
    sizes = {"linear_key_head_dim": dim, "linear_value_head_dim": dim}
    heads = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    return {"layer_types": kinds, **sizes, **heads}


def _latent(latent: int, rotary: int, nope: int, value: int) -> dict[str, Any]:
    """Multi-head latent attention; queries come of a latent of their own."""
    sizes = {"kv_lora_rank": latent, "qk_rope_head_dim": rotary, "qk_nope_head_dim": nope, "v_head_dim": value}
    return {**sizes, "q_lora_rank": 3 * latent // 2, "rope_parameters": ROPE}


SHAPES = {
    "tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True, others={"rope_parameters": ROPE}),
    "24-layer": Shape(24, 896, 14, 2, 64, 4864, 32_000, 32_768, True, others={"rope_parameters": ROPE}),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 32_000, 32_768, True, others={"rope_parameters": ROPE}),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, 32_768, False, others={"rope_parameters": ROPE}),
    "qwen3-tiny-64k": Shape(2, 128, 2, 1, 64, 256, 16_384, 65_536, True, "qwen3", {"rope_parameters": ROPE}),
    "qwen3-moe": Shape(12, 768, 8, 2, 128, 2304, 32_000, 32_768, True, "qwen3_moe", _qwen3_moe(64, 8, 192)),
    "qwen3-moe-tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True, "qwen3_moe", _qwen3_moe(8, 2, 64)),
    "gemma3": Shape(12, 1152, 4, 1, 256, 6912, 32_000, 32_768, True, "gemma3_text", _gemma3(512, 256, 6)),
    "gemma3-tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True, "gemma3_text", _gemma3(64, 64, 2)),
    "gpt-oss": Shape(10, 576, 16, 2, 64, 576, 32_000, 32_768, False, "gpt_oss", _gpt_oss(32, 4, 128)),
    "gpt-oss-tiny": Shape(2, 128, 2, 1, 64, 128, 2048, 4096, False, "gpt_oss", _gpt_oss(8, 2, 64)),
    "lfm2": Shape(16, 1024, 16, 8, 64, 4608, 32_000, 32_768, True, "lfm2", _lfm2(3, 16)),
    "lfm2-tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True, "lfm2", _lfm2(2, 2)),
    "minicpm3": Shape(20, 1024, 16, 16, 64, 3072, 32_000, 32_768, True, "minicpm3", _latent(512, 64, 64, 64)),
    "minicpm3-tiny": Shape(2, 128, 4, 4, 32, 256, 2048, 4096, True, "minicpm3", _latent(64, 32, 32, 32)),
    "qwen3.5": Shape(16, 1024, 8, 2, 256, 3584, 32_000, 32_768, True, "qwen3_5_text", _qwen3_5(16, 16, 128, 16)),
    "qwen3.5-tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True, "qwen3_5_text", _qwen3_5(2, 4, 32, 2)),
}


def make_model(directory: Path, shape: Shape, *, seed: int = 0, device: str = "cpu") -> int:
    """Write the directory, with weights drawn on a device; return the number of parameters."""
    tokenizer = train_tokenizer(vocab_size=shape.vocab, context=shape.context, num_files=2000)
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        **({} if shape.family == "lfm2" else {"head_dim": shape.head_size}),  # its heads divide the hidden size
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
        **shape.others,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if "rope_theta" in config.rope_parameters:
        _add_rope_theta(directory / "config.json", config.rope_parameters["rope_theta"])
    return sum(parameter.numel() for parameter in model.parameters())


def _add_rope_theta(path: Path, theta: float) -> None:
    """Add `rope_theta` at the top level, where other engines read it but transformers no longer writes it."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": theta}, indent=2) + "\n")


def main() -> None:
    """Parse arguments and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--context", type=int, help="instead of the shape's")
    parser.add_argument("--device", default="cpu", help="where weights are drawn")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = replace(shape, layers=given.layers)
    if given.context is not None:
        shape = replace(shape, context=given.context)
    count = make_model(given.directory, shape, seed=given.seed, device=given.device)
    print(f"{given.directory}: {count / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main()
