"""The fingerprint changes with all that reaches K and V, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
import stat as stat_module
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.model.fingerprint import DigestCache, model_identity, model_inputs, shown_inputs


@pytest.fixture
def copied(model_dir: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "model"))


def fingerprint_of(directory: Path, *, block_tokens: int = 16, maps: Path | None = None, **settings: Any) -> bytes:
    chosen = ModelSettings(model=str(directory), **settings)
    return load_model(chosen, block_tokens=block_tokens, max_context=None, format_map_dir=maps).spec.fingerprint


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def test_what_does_not_reach_kv_leaves_it(copied: Path, tmp_path: Path) -> None:
    before = fingerprint_of(copied)
    assert fingerprint_of(copied, threads=1, maps=tmp_path / "maps") == before
    (copied / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    edit_json(copied / "config.json", eos_token_id=3, transformers_version="5.99.0", initializer_range=0.5)
    edit_json(copied / "tokenizer_config.json", model_max_length=7)
    assert fingerprint_of(copied) == before
    moved = copied.rename(copied.parent / "elsewhere")
    assert fingerprint_of(moved) == before


def test_what_reaches_kv_changes_it(copied: Path) -> None:
    seen = {"plain": fingerprint_of(copied)}
    seen["block size"] = fingerprint_of(copied, block_tokens=32)
    seen["format"] = fingerprint_of(copied, kv="fp32")
    seen["dtype"] = fingerprint_of(copied, dtype="bf16")
    config = (copied / "config.json").read_text("utf-8")
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    for name, change in {"rope": {"rope_parameters": rope}, "norm": {"rms_norm_eps": 1e-3}}.items():
        edit_json(copied / "config.json", **change)
        seen[name] = fingerprint_of(copied)
        (copied / "config.json").write_text(config, "utf-8")
    tokenizer = copied / "tokenizer.json"
    text = tokenizer.read_text("utf-8")
    tokenizer.write_text(text + "\n", "utf-8")
    seen["tokenizer"] = fingerprint_of(copied)
    tokenizer.write_text(text, "utf-8")
    assert fingerprint_of(copied) == seen["plain"]
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    seen["weights"] = fingerprint_of(copied)
    assert len(set(seen.values())) == len(seen), seen
    assert all(len(value) == 32 for value in seen.values())


def test_each_ingredient_counts_alone(model_dir: Callable[..., Path]) -> None:
    config = AutoConfig.from_pretrained(model_dir("llama"))
    plain = {"weights": ["a", "b"], "config": config, "dtype": torch.float32, "rope": "default", "tokenizer": "t"}
    changes = {"weights": ["a", "c"], "dtype": torch.bfloat16, "rope": "yarn", "tokenizer": "u"}
    kinds = [plain, *({**plain, name: value} for name, value in changes.items())]
    seen = {model_identity(model_inputs(**kind)) for kind in kinds}
    shown = [shown_inputs(model_inputs(**kind)) for kind in kinds]
    assert [{name for name in each if each[name] != shown[0][name]} for each in shown] == [
        set(),
        *({x} for x in changes),
    ]
    assert all(len(value) <= 16 for value in shown[0].values())
    quantised = AutoConfig.from_pretrained(model_dir("llama"))
    quantised.quantization_config = {"quant_method": "gptq", "bits": 4}
    seen.add(model_identity(model_inputs(**{**plain, "config": quantised})))
    assert len(seen) == len(changes) + 2


def test_digests_are_remembered_until_the_file_changes(tmp_path: Path) -> None:
    file, memory = tmp_path / "weights", tmp_path / "maps" / "digests.json"
    file.write_bytes(b"one")
    first = DigestCache(memory).digest(file)
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # SHA-256 of "one"
    known = json.loads(memory.read_text())
    known[str(file.resolve())]["sha256"] = "ab" * 32
    memory.write_text(json.dumps(known))
    assert DigestCache(memory).digest(file) == "ab" * 32  # same path, size, times and inode: not read again
    stat = file.stat()
    while file.stat().st_ctime_ns == stat.st_ctime_ns:  # some kernels count it in ticks of milliseconds
        file.write_bytes(b"two")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a copy that keeps times leaves it
    assert DigestCache(memory).digest(file) not in ("ab" * 32, first)
    DigestCache(memory).check()
    assert stat_module.S_IMODE(memory.stat().st_mode) == 0o600


@pytest.mark.parametrize("damaged", ["{broken", "null", "5", "[[]]", '{"FILE": null}', '{"FILE": {"sha256": 5}}'])
def test_a_damaged_memory_is_ignored(tmp_path: Path, damaged: str) -> None:
    file, memory = tmp_path / "weights", tmp_path / "digests.json"
    file.write_bytes(b"one")
    expected = DigestCache(None).digest(file)
    memory.write_text(damaged.replace("FILE", str(file.resolve())), "utf-8")
    assert DigestCache(memory).digest(file) == expected


def test_a_hub_blob_is_named_by_its_digest(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / ("ab" * 32)
    blob.write_bytes(b"not read")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert DigestCache(None).digest(link) == "ab" * 32


def test_weights_of_a_quantised_or_changed_dtype_count(copied: Path) -> None:
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(copied / "model.safetensors").items()}
    before = fingerprint_of(copied, dtype="bf16")
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    assert fingerprint_of(copied, dtype="bf16") != before
