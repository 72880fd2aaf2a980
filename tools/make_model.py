"""Write a model directory of realistic size with random weights: as fast and large as a trained model.

    python tools/make_model.py 24-layer /tmp/model          # 387M parameters, bf16, 774 MB
    python tools/make_model.py tiny /tmp/tiny --layers 2

Llama architecture (no bias on K, so that 4-bit KV applies), bf16 safetensors, a byte-level BPE tokenizer trained on
the fly, the ChatML template. Its answers are noise.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pocket.tokenizer import train_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `tied` shares input and output embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    context: int
    tied: bool


SHAPES = {
    "tiny": Shape(2, 128, 2, 1, 64, 256, 2048, 4096, True),
    "24-layer": Shape(24, 896, 14, 2, 64, 4864, 32_000, 32_768, True),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 32_000, 32_768, True),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, 32_768, False),
}


def make_model(directory: Path, shape: Shape, *, seed: int = 0) -> int:
    """Write the directory; return the number of parameters."""
    tokenizer = train_tokenizer(vocab_size=shape.vocab, context=shape.context, num_files=2000)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.context,
        rope_theta=500_000.0,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
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
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if given.layers is not None:
        shape = Shape(**{**vars(shape), "layers": given.layers})
    count = make_model(given.directory, shape, seed=given.seed)
    print(f"{given.directory}: {count / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main()
