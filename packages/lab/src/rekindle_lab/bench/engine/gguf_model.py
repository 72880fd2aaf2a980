"""A model directory as a GGUF file, from which llama.cpp and OpenVINO GenAI read the same weights.

Matrices are written in the requested type (rows of Q and K reordered where llama.cpp rotates neighbouring pairs), norms
and biases in fp32. The tokenizer becomes "gpt2" BPE with the pre-tokenizer "qwen2"; prompts given as ids do not use it.
Needs numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import ConfigError
from rekindle_lab.bench.engine.gguf_file import FILE_TYPES, GgufType, Tensor, Value, write_file

FAMILIES = ("llama", "qwen2", "qwen3")
INTERLEAVED = ("llama",)  # llama.cpp rotates neighbouring dimensions in these, halves of a head in others
NORMAL, CONTROL = 1, 3
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def values(self) -> np.ndarray:
        """Return the values in fp32; ConfigError for types other than bf16, fp16 and fp32."""
        data = np.memmap(self.path, dtype=np.uint8, mode="r")[self.begin : self.end].tobytes()
        plain = {"F16": "<f2", "F32": "<f4"}
        if self.dtype == "BF16":
            values = (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.dtype in plain:
            values = np.frombuffer(data, dtype=plain[self.dtype]).astype(np.float32)
        else:
            raise ConfigError(
                f"GGUF files can be written from bf16, fp16 and fp32 weights only; {self.name} is {self.dtype}"
            )
        return values.reshape(self.shape)


def write_gguf(directory: Path, path: Path, kind: GgufType) -> None:
    """Write the model of a directory to `path`; ConfigError if its family or a part of it cannot be written."""
    write_file(path, *contents(directory, path.stem, kind))


def contents(directory: Path, name: str, kind: GgufType) -> tuple[dict[str, Value], list[Tensor]]:
    """Return what the file of a model holds, which it calls `name`: metadata and tensors."""
    config = config_of(directory)
    tensors = [_tensor(found, config, kind) for found in stored_tensors(directory) if not _is_tied(found, config)]
    general: dict[str, Value] = {"general.name": name, "general.file_type": FILE_TYPES[kind]}
    return {**geometry(config), **general, **tokenizer(directory, config)}, tensors


def config_of(directory: Path) -> dict[str, Any]:
    """Return config.json with the fields that may be missing or nested; ConfigError for what cannot be written."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    if config.get("model_type") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"GGUF files can be written for {known} models only, not for {config.get('model_type')!r}")
    rope = {"rope_type": "default", **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    if rope["rope_type"] != "default":
        raise ConfigError(
            f"GGUF files can be written for models with plain rotary embeddings only, not {rope['rope_type']!r}"
        )
    if config.get("use_sliding_window"):
        raise ConfigError("GGUF files can be written for models with full attention only, not with a sliding window")
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,  # these three: what transformers takes where a config says nothing
        **config,
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }


def stored_tensors(directory: Path) -> Iterator[Stored]:
    """Yield the tensors of all safetensors files; ConfigError if there are none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} has no safetensors files")
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, about in header.items():
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            yield Stored(name, path, about["dtype"], tuple(about["shape"]), begin, end)


def _is_tied(found: Stored, config: dict[str, Any]) -> bool:
    return found.name == "lm_head.weight" and bool(config["tie_word_embeddings"])


def _tensor(found: Stored, config: dict[str, Any], kind: GgufType) -> Tensor:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = found.name.split(".")[-2]
    rotated = part in heads and config["model_type"] in INTERLEAVED
    values = partial(_for_rotation, found, heads[part]) if rotated else found.values
    return Tensor(gguf_name(found.name), found.shape, kind if len(found.shape) == 2 else "f32", values)


def _for_rotation(found: Stored, num_heads: int) -> np.ndarray:
    """Return a Q or K projection or bias with the halves of each head interleaved, as llama.cpp rotates them."""
    values = found.values()
    halves = values.reshape(num_heads, 2, len(values) // num_heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def gguf_name(name: str) -> str:
    """Return a tensor's name in a GGUF file; ConfigError for one that has none."""
    module, _, kind = name.rpartition(".")
    if module in WHOLE:
        return f"{WHOLE[module]}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    if part not in OF_A_LAYER:
        raise ConfigError(f"GGUF has no name for the tensor {name}")
    return f"blk.{number}.{OF_A_LAYER[part]}.{kind}"


def geometry(config: dict[str, Any]) -> dict[str, Value]:
    """Return the sizes of the model."""
    family = config["model_type"]
    sizes: dict[str, Value] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "vocab_size": config["vocab_size"],
    }
    return {"general.architecture": family, **{f"{family}.{name}": value for name, value in sizes.items()}}


def tokenizer(directory: Path, config: dict[str, Any]) -> dict[str, Value]:
    """Return vocabulary, merges, control tokens, and the chat template if there is one; ConfigError if it is no BPE."""
    stored = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    if stored["model"].get("type") != "BPE":
        raise ConfigError(f"GGUF files can be written with BPE tokenizers only, not {stored['model'].get('type')!r}")
    tokens = {number: token for token, number in stored["model"]["vocab"].items()}
    control = {item["id"]: item["content"] for item in stored["added_tokens"]}
    names = [control.get(number, tokens.get(number, f"<unused {number}>")) for number in range(config["vocab_size"])]
    found: dict[str, Value] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": names,
        "token_type": [CONTROL if number in control else NORMAL for number in range(len(names))],
        "merges": [item if isinstance(item, str) else " ".join(item) for item in stored["model"]["merges"]],
        "add_bos_token": False,
    }
    end = config.get("eos_token_id") or 0  # a copy without an end token: OpenVINO wants one, and is asked to ignore it
    found["eos_token_id"] = end[0] if isinstance(end, list) else end
    if config.get("pad_token_id") is not None:
        found["padding_token_id"] = config["pad_token_id"]
    template = directory / "chat_template.jinja"
    if template.is_file():
        found["chat_template"] = template.read_text("utf-8")
    return {f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}": found[name] for name in found}
