"""Weights out of a GGUF file are transformers' to the bit, for every way in which its code changes and names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, load_gguf_checkpoint

from rekindle.compute.load import read_config
from rekindle.config import ModelSettings
from rekindle.model import checkpoint, gguf_weights
from rekindle.model.adapter import register_attention
from rekindle.model.gguf_header import GgufHeader
from rekindle.model.gguf_weights import is_read_here, read_weights, weight_names
from rekindle.model.loader import load_weights
from rekindle_lab.bench.engine.gguf_file import Tensor, Value, write_file
from rekindle_lab.bench.engine.gguf_model import write_gguf
from tests.tiny_models import tiny_model, tiny_model_dir


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory of the test's own."""
    register_attention()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# The kind of a tiny model, and llama.cpp's name of its architecture.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "phi3": "phi3",
    "qwen3-moe": "qwen3moe",
    "minimax-m2": "minimax-m2",
}
TURNED = ("attn_qkv.weight", "ffn_down.weight", "ffn_up.weight", "attn_output.weight")  # of GPT-2
HALVES = ("ffn_gate_exps", "ffn_up_exps")  # of one weight


def stored(architecture: str, model: Any) -> Iterator[Tensor]:
    """Random tensors of the shapes that llama.cpp has for a model's weights."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    weights = model.state_dict()
    names = weight_names(architecture, model.config.num_hidden_layers, weights, processor)
    random = np.random.default_rng(3)
    for theirs, name in names.items():
        shape = list(weights[name].shape)
        if architecture == "gpt2" and theirs.endswith(TURNED):
            shape.reverse()
        if theirs.endswith(HALVES):
            shape[1] //= 2
        values = random.standard_normal(shape).astype(np.float32)
        blocks = len(shape) > 1 and shape[-1] % 32 == 0
        ending = "" if theirs.endswith((".weight", ".bias")) else ".weight"
        yield Tensor(theirs + ending, tuple(shape), "q8_0" if blocks else "f32", lambda values=values: values)


def described(architecture: str, model: Any) -> Mapping[str, Value]:
    """What transformers wants to know to read the tensors."""
    heads = {"head_count": model.config.num_attention_heads}
    if hasattr(model.config, "num_key_value_heads"):
        heads["head_count_kv"] = model.config.num_key_value_heads
    return {"general.architecture": architecture} | {f"{architecture}.attention.{k}": v for k, v in heads.items()}


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.bfloat16) for kind in ARCHITECTURES), ("llama", torch.float32)]
)
def test_weights_are_those_of_transformers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    architecture, model = ARCHITECTURES[kind], tiny_model(kind, torch.float32)
    file = tmp_path / "tiny.gguf"
    tensors = [*stored(architecture, model), Tensor("rope_freqs.weight", (4,), "f32", lambda: np.ones(4, np.float32))]
    write_file(file, described(architecture, model), tensors)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model, torch_dtype=dtype)["tensors"]
    ours = read_weights(GgufHeader.read(file), architecture, type(model), model.config, dtype).state
    assert len(ours) >= len({name for name, _ in model.named_parameters()}) - 1
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == dtype and torch.equal(weight, theirs[name].to(dtype)), name


def test_an_embedding_in_several_pieces_is_that_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", torch.float32)
    write_file(tmp_path / "tiny.gguf", described("llama", model), [*stored("llama", model)])
    read = (GgufHeader.read(tmp_path / "tiny.gguf"), "llama", type(model), model.config, torch.float32)
    whole = read_weights(*read).state
    monkeypatch.setattr(gguf_weights, "PIECE_VALUES", 7 * model.config.hidden_size)
    assert model.config.vocab_size % 7, "the last piece is smaller"
    for name, weight in read_weights(*read).state.items():
        assert torch.equal(weight, whole[name]), name


def test_transformers_shows_no_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gguf(tiny_model_dir("llama", "bf16", tmp_path), tmp_path / "tiny.gguf", "q8_0")
    directory = checkpoint.Source.find(str(tmp_path / "tiny.gguf"), None).fetch()
    load_weights(directory, read_config(directory), ModelSettings(device="cpu"))
    assert capfd.readouterr().err == ""


def test_what_only_a_newer_reader_knows_is_left_to_it() -> None:
    assert is_read_here("llama") and is_read_here("gemma3")
    assert not is_read_here("lfm2")
