"""Write a model whose keys are hard to store in 4 bits: its replies stay nearly the same, its K does not.

    python tools/injected.py bias /tmp/biased               # a large bias in every K projection, as Qwen 2.5 has
    python tools/injected.py hidden /tmp/hidden             # the same offset, but no bias shows it
    python tools/injected.py sinks /tmp/sinks               # a small random gpt-oss with sinks and biases

`bias` and `hidden` start from the bundled model. The offset is in the two slowest channels of each head: rotary
embeddings hardly rotate them, so all scores of a row move by nearly the same amount, which the softmax cancels.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

from rekindle_pocket import MODEL_DIR

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
SINK = 2.0  # as much as a key whose score is 2
FEATURE = 0  # of the residual stream, held constant for `hidden`


def biased(size: float) -> LlamaForCausalLM:
    """Return the bundled model with `size` in the slowest channels of every K bias."""
    source = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    model = LlamaForCausalLM(LlamaConfig(**{**source.config.to_dict(), "attention_bias": True})).to(source.dtype)
    model.load_state_dict(source.state_dict(), strict=False)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).bias.zero_()
            bias = layer.self_attn.k_proj.bias
            bias[_slowest(len(bias), model.config.head_dim)] = size
    return model


def hidden(size: float) -> LlamaForCausalLM:
    """Return the same without a bias: one feature of the stream is 1 for every token, and K projections read it."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR)
    with torch.no_grad():
        scale = float(model.model.embed_tokens.weight.float().pow(2).mean().sqrt())
        model.model.embed_tokens.weight[:, FEATURE] = scale
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[FEATURE] = 0
            layer.mlp.down_proj.weight[FEATURE] = 0
            weight = layer.self_attn.k_proj.weight
            weight[_slowest(len(weight), model.config.head_dim), FEATURE] = size / float(
                layer.input_layernorm.weight[FEATURE]
            )
    return model


def sinks(size: float) -> GptOssForCausalLM:
    """Return a random gpt-oss with the bundled vocabulary, with the family's sinks, and `size` in K's biases."""
    config = GptOssConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=1, num_experts_per_tok=1, sliding_window=128,
        max_position_embeddings=4096, initializer_range=0.05, eos_token_id=2, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(SINK)
            bias = layer.self_attn.k_proj.bias
            bias[_slowest(len(bias), config.head_dim)] = size
    return model


def _slowest(num_channels: int, head_dim: int) -> torch.Tensor:
    """Return the channels that rotary embeddings rotate least: a pair in each head."""
    heads = torch.arange(num_channels).view(-1, head_dim)
    return heads[:, [head_dim // 2 - 1, head_dim - 1]].flatten()


KINDS = {"bias": (biased, 100.0), "hidden": (hidden, 100.0), "sinks": (sinks, 100.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=float, help="of the offset")
    arguments = parser.parse_args()
    make, size = KINDS[arguments.kind]
    make(size if arguments.size is None else arguments.size).save_pretrained(arguments.directory)
    for name in TOKENIZER_FILES:
        if (MODEL_DIR / name).is_file():
            shutil.copyfile(MODEL_DIR / name, arguments.directory / name)
    print(f"{arguments.kind}: {arguments.directory}")


if __name__ == "__main__":
    main()
