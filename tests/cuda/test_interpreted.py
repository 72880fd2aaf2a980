"""What stands in for a card on a processor; on a card test_card.py shows the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rekindle.compute.cpu.compute import KernelCompute
from rekindle.compute.cpu.kernels.library import KernelChoice
from rekindle.compute.cpu.packer import Packer
from rekindle.compute.devices import Chosen
from rekindle.compute.load import load_model
from rekindle.config import ModelSettings
from rekindle_cuda.graphs import CudaGraphs
from tests.cuda.test_packed import CARD
from tests.tiny_models import tiny_model_dir


class Interpreted(KernelCompute):
    """Computes by torch over what is packed for a card."""

    __slots__ = ()

    def packer(self, device: str) -> Packer:
        return CARD


@pytest.mark.parametrize("weights", ["int8", "auto"])
def test_a_model_is_loaded_packed_and_proved(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have the same bits on all paths, and nothing is written for the next start; `auto` looks before it packs."""
    chosen = Chosen("cpu", Interpreted(None), KernelChoice(None))
    monkeypatch.setattr("rekindle.compute.load.choose_device", lambda settings: chosen)
    model = str(tiny_model_dir("llama", "bf16", tmp_path, num_hidden_layers=1))
    settings = ModelSettings(model=model, device="cpu", weights=weights, map_weights="on", kv="q4h")
    loaded = load_model(settings, block_tokens=16, max_context=256, format_map_dir=tmp_path)
    notes = [note for note in loaded.notes if note.startswith("weights: ")]
    assert loaded.promise == "bitwise" and ("KL 0.0" if weights == "auto" else "8 of 8 packed layers") in notes[0]
    assert loaded.unsaved is None and not list(tmp_path.glob("packed-*"))


def test_a_recording_that_cannot_be_ended_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch has it: where CUDA refuses to end one, torch restores no stream and goes on to record to the pool."""
    ended, now, pools = list[object](), ["the thread's"], iter([(0, 1), (0, 2)])

    @contextmanager
    def record(graph: object, *, pool: object, stream: str, capture_error_mode: str) -> Iterator[None]:
        now[0] = stream
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr("torch.cuda.graph", record)
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr("torch.cuda.Stream", lambda: "one of its own")
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr("torch.cuda.current_stream", lambda: now[0])
    monkeypatch.setattr("torch.cuda.set_stream", lambda stream: now.__setitem__(0, stream))
    monkeypatch.setattr("rekindle_cuda.graphs.end_recording", ended.append)
    recorder = CudaGraphs()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="previous error"):
            recorder.record(lambda: (torch.zeros(1), torch.zeros(1)))
        assert now == ["the thread's"]
    assert ended == [(0, 1), (0, 2)]
