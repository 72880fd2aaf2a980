"""A model directory as a GGUF file: names, types, bytes, and what has no form in it."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rekindle.errors import ConfigError
from rekindle_lab.bench.engine.gguf_file import encoded
from rekindle_lab.bench.engine.gguf_model import config_of, write_gguf
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("gguf"))


def tensors_of(path: Path) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """Read a GGUF file: name -> shape, type, data up to the next tensor; metadata is walked over."""
    data = path.read_bytes()
    at = 0

    def take(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return value

    def text() -> str:
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> Any:
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return text() if kind == 8 else take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    assert (take("4s"), take("I")) == (b"GGUF", 3)
    num_tensors, num_values = take("Q"), take("Q")
    metadata = {text(): value(take("I")) for _ in range(num_values)}
    assert metadata["general.architecture"] == "llama"
    assert len(metadata["tokenizer.ggml.tokens"]) == metadata["llama.vocab_size"]
    found = []
    for _ in range(num_tensors):
        name = text()
        shape = tuple(take("Q") for _ in range(take("I")))[::-1]
        found.append((name, shape, take("I"), take("Q")))
    begin = -(-at // 32) * 32
    ends = [offset for *_, offset in found[1:]] + [len(data) - begin]
    return {
        name: (shape, kind, data[begin + offset : begin + end])
        for (name, shape, kind, offset), end in zip(found, ends, strict=True)
    }


def test_a_model_as_gguf(model: Path, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf", "f32")
    stored, found = load_file(model / "model.safetensors"), tensors_of(tmp_path / "m.gguf")
    assert len(found) == len(stored)
    shape, kind, data = found["blk.1.attn_v.weight"]
    values = stored["model.layers.1.self_attn.v_proj.weight"].float()
    assert (shape, kind, data) == (tuple(values.shape), 0, values.numpy().tobytes())
    key = stored["model.layers.1.self_attn.k_proj.weight"].float()
    half = config_of(model)["head_dim"] // 2
    mixed = np.frombuffer(found["blk.1.attn_k.weight"][2], "<f4").reshape(key.shape)
    assert np.array_equal(mixed[:4], key[[0, half, 1, half + 1]].numpy())  # neighbours are rotated there, halves here


def test_a_model_without_a_form_in_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="GGUF files can be written for llama, qwen2, qwen3 models only, not for 'gemma2'"
    ):
        write_gguf(tiny_model_dir("gemma2", "fp32", tmp_path), tmp_path / "m.gguf", "f16")


def test_types_of_tensors() -> None:
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    bf16 = torch.tensor(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert encoded(values, "bf16") == bf16.tobytes()
    assert encoded(values, "f16") == values.astype(np.float16).tobytes()
    blocks = np.frombuffer(encoded(values, "q8_0"), [("scale", "<f2"), ("codes", "i1", 32)])
    back = (blocks["codes"] * blocks["scale"].astype(np.float32)[:, None]).reshape(values.shape)
    assert np.abs(back - values).max() < np.abs(values).max() / 127
    with pytest.raises(ValueError, match="multiple of 32"):
        encoded(values[:, :40], "q8_0")


def test_a_config_that_leaves_out_what_has_a_default_is_written(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    for name in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        del config[name]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = config_of(tmp_path / "model")
    assert found["num_key_value_heads"] == config["num_attention_heads"]
    assert (found["rms_norm_eps"], found["max_position_embeddings"]) == (1e-6, 2048)


def test_a_tokenizer_of_another_kind_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "model": {"type": "Unigram", "vocab": []}}))
    with pytest.raises(ConfigError, match="with BPE tokenizers only, not 'Unigram'"):
        write_gguf(tmp_path / "model", tmp_path / "file.gguf", "f16")
