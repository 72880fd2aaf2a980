"""Which fields of a config a GGUF file's keys are, where layers differ and where transformers' tables say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rekindle.model.gguf_config import config_files
from rekindle.model.gguf_header import GgufHeader
from rekindle_lab.bench.engine.gguf_file import Tensor, Value, write_file

SIZES: dict[str, Value] = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 32,
    "attention.sliding_window": 512,
    "rope.freq_base": 1e6,
}


def config_of(tmp_path: Path, architecture: str, tensors: tuple[str, ...] = (), **more: Value) -> dict[str, Any]:
    """The config of a file with these sizes, further keys (`__` is a dot) and tensors."""
    given = {**SIZES, **{key.replace("__", "."): value for key, value in more.items()}}
    values = {f"{architecture}.{key}": value for key, value in given.items()}
    vocabulary: dict[str, Value] = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 1}
    stored = [
        Tensor(name, (2, 4), "f32", lambda: np.ones((2, 4), np.float32)) for name in ("token_embd.weight", *tensors)
    ]
    write_file(tmp_path / "m.gguf", {"general.architecture": architecture, **values, **vocabulary}, stored)
    return config_files(GgufHeader.read(tmp_path / "m.gguf"))["config.json"]


def test_only_layers_with_full_attention_are_scaled(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    other = config_of(tmp_path, "gemma3", rope__freq_base_swa=5_000.0)
    assert other["rope_parameters"]["sliding_attention"]["rope_theta"] == 5_000.0


def test_heads_and_windows_are_those_of_the_file(tmp_path: Path) -> None:
    config = config_of(tmp_path, "gemma3", attention__sliding_window_pattern=3)
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (32, 32)
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert config["tie_word_embeddings"] and config["vocab_size"] == 2
    large = config_of(tmp_path, "gemma3", block_count=62)
    assert large["query_pre_attn_scalar"] == 64 // 4, "27B scales by its hidden size and heads"
    qwen = config_of(tmp_path, "qwen3", ("output.weight",))
    assert (qwen["head_dim"], qwen["tie_word_embeddings"]) == (32, False)


def test_biases_and_parts_that_are_rotated(tmp_path: Path) -> None:
    plain, biased = (
        config_of(tmp_path, "llama", tensors, rope__dimension_count=32) for tensors in ((), ("blk.0.attn_q.bias",))
    )
    assert (plain["attention_bias"], biased["attention_bias"]) == (False, True)
    phi = config_of(tmp_path, "phi3", rope__dimension_count=12)
    assert phi["rope_parameters"]["partial_rotary_factor"] == 12 / 32
