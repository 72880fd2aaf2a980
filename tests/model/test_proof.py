"""A model is proved once per circumstances: remembered when nothing changed, proved again when anything did."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle.model.fingerprint import write_json
from rekindle.model.loaded import LoadedModel
from rekindle.model.proof import Proof, ProofCache
from tests.tiny_models import tiny_model_dir

TORCH = KernelCompute(None)


def proofs(directory: Path) -> list[Path]:
    return sorted(directory.glob("proof-*.json"))


def test_the_second_start_reads_what_the_first_proved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, state = tiny_model_dir("llama", "fp32", tmp_path), tmp_path / "state"
    settings = ModelSettings(model=str(model), kv="q4h", threads=1)

    def load(settings: ModelSettings = settings, block_tokens: int = 16) -> LoadedModel:
        return load_model(settings, block_tokens=block_tokens, max_context=None, format_map_dir=state)

    first = load()
    (path,) = proofs(state)
    write_json(path, {"promise": "close", "finding": "written by the test", "is_steady": True})
    with caplog.at_level(logging.INFO, "rekindle"):
        second = load()
    assert "written by the test" in caplog.text and second.promise == "close"
    assert second.spec == first.spec
    assert load(block_tokens=32).promise == "bitwise" and len(proofs(state)) == 2
    assert load(replace(settings, kv="fp32")).promise == "bitwise" and len(proofs(state)) == 3


def test_threads_other_kernels_and_a_damaged_file_are_proved_again(tmp_path: Path) -> None:
    settings = ModelSettings(device="cpu", threads=1)
    torch.set_num_threads(1)
    cache = ProofCache(tmp_path, b"i" * 32, settings, 16, TORCH)
    cache.write(Proof("bitwise", "equal", is_steady=True))
    assert ProofCache(tmp_path, b"i" * 32, settings, 16, TORCH).read() == Proof("bitwise", "equal", is_steady=True)
    assert ProofCache(tmp_path, b"j" * 32, settings, 16, TORCH).read() is None
    assert ProofCache(None, b"i" * 32, settings, 16, TORCH).read() is None
    try:
        torch.set_num_threads(2)
        assert ProofCache(tmp_path, b"i" * 32, settings, 16, TORCH).read() is None
    finally:
        torch.set_num_threads(1)
    one, other = (KernelLibrary("avx2", Path("library"), digest, ctypes.CDLL(None)) for digest in ("one", "other"))
    ProofCache(tmp_path, b"i" * 32, settings, 16, KernelCompute(one)).write(Proof("close", "of one", is_steady=False))
    assert ProofCache(tmp_path, b"i" * 32, settings, 16, KernelCompute(one)).read() == Proof(
        "close", "of one", is_steady=False
    )
    assert ProofCache(tmp_path, b"i" * 32, settings, 16, KernelCompute(other)).read() is None
    assert ProofCache(tmp_path, b"i" * 32, settings, 16, TORCH).read() == Proof("bitwise", "equal", is_steady=True)
    for path in proofs(tmp_path):
        path.write_text("{")
    assert ProofCache(tmp_path, b"i" * 32, settings, 16, TORCH).read() is None
