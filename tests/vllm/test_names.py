"""Names of another engine's KV: whatever changes its bytes changes them, and nothing else does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.cache.blocks.hashing import root_hash
from rekindle.errors import ModelRefused
from rekindle.model.fingerprint import DigestCache
from rekindle.spec import KVLayout
from rekindle_vllm.names import Computation, HeadShape, Scope, adapter_digest, model_fingerprint, record_layout

LAYERS = (HeadShape(2, 32, 32),) * 3
LAYOUT = record_layout(LAYERS, torch.bfloat16, "native", 64)
VLLM = Computation("vllm", torch.bfloat16, max_context=4096)
CONFIG = {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return model_files(tmp_path / "model", CONFIG)


def model_files(directory: Path, config: dict[str, Any], weights: bytes = b"weights") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def named(directory: Path, computed: Computation = VLLM, layout: KVLayout = LAYOUT) -> bytes:
    return model_fingerprint(directory, computed, layout, DigestCache(None))


def test_the_same_files_elsewhere_have_the_same_name(directory: Path, tmp_path: Path) -> None:
    other = model_files(tmp_path / "copy", CONFIG | {"transformers_version": "9", "use_cache": False})
    assert named(directory) == named(other)


def test_whatever_changes_kv_changes_the_name(directory: Path, tmp_path: Path) -> None:
    names = {
        "as it is": named(directory),
        "weights": named(model_files(tmp_path / "weights", CONFIG, b"others")),
        "config": named(model_files(tmp_path / "config", CONFIG | {"rms_norm_eps": 1e-5})),
        "overrides": named(directory, replace(VLLM, overrides={"rms_norm_eps": 1e-6})),
        "dtype": named(directory, replace(VLLM, dtype=torch.float16)),
        "quantization": named(directory, replace(VLLM, quantization="fp8")),
        "engine": named(directory, replace(VLLM, engine="another")),
        "format": named(directory, layout=record_layout(LAYERS, torch.bfloat16, "q4h", 64)),
        "block tokens": named(directory, layout=record_layout(LAYERS, torch.bfloat16, "native", 32)),
        "kept dtype": named(directory, layout=record_layout(LAYERS, torch.float16, "native", 64)),
        "heads": named(directory, layout=record_layout((HeadShape(1, 32, 32),) * 3, torch.bfloat16, "native", 64)),
    }
    adapted = model_files(tmp_path / "adapter", CONFIG)
    (adapted / "adapter_config.json").write_text("{}")
    names["adapter"] = named(adapted)
    assert len(set(names.values())) == len(names)


def test_an_override_is_as_good_as_the_same_line_in_the_config(directory: Path, tmp_path: Path) -> None:
    written = model_files(tmp_path / "written", CONFIG | {"rms_norm_eps": 1e-6})
    assert named(directory, replace(VLLM, overrides={"rms_norm_eps": 1e-6})) == named(written)


def test_the_context_is_part_of_the_name_where_rope_depends_on_it(directory: Path, tmp_path: Path) -> None:
    long = replace(VLLM, max_context=8192)
    assert named(directory) == named(directory, long)
    for config in ({"rope_scaling": {"type": "dynamic"}}, {"text": {"rope_parameters": {"rope_type": "longrope"}}}):
        changing = model_files(tmp_path / "changing", config)
        assert named(changing) != named(changing, long)


def test_a_model_without_config_or_weights_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read"):
        named(tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"no model\.safetensors"):
        named(directory)


def test_layouts_that_no_record_has_are_refused() -> None:
    with pytest.raises(ModelRefused, match="format native fits"):
        record_layout((HeadShape(2, 40, 40),), torch.bfloat16, "q4h", 64)
    with pytest.raises(ModelRefused, match="bf16, fp16 or fp32"):
        record_layout(LAYERS, torch.float8_e4m3fn, "native", 64)
    with pytest.raises(ModelRefused, match="power of two"):
        record_layout(LAYERS, torch.bfloat16, "native", 48)


def test_scopes_have_roots_of_their_own() -> None:
    scopes = [
        Scope("default"),
        Scope("other"),
        Scope("default", ""),
        Scope("default", "salt"),
        Scope("default", None, "salt"),
        Scope("default", "salt", "adapter"),
        Scope("default", '["salt", "adapter"]'),
    ]
    roots = [scope.root(b"model", b"secret") for scope in scopes]
    assert len(set(roots)) == len(scopes)
    assert roots[0] == root_hash(fingerprint=b"model", namespace="default", cache_salt="", secret=b"secret")
    assert roots[0] not in (Scope("default").root(b"another", b"secret"), Scope("default").root(b"model", b"own"))


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    digests = []
    for number, weights in enumerate((b"one", b"one", b"two")):
        adapter = tmp_path / str(number)
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        digests.append(adapter_digest(adapter, DigestCache(None)))
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(ModelRefused, match="adapter_config"):
        adapter_digest(tmp_path, DigestCache(None))
