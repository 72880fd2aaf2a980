"""Peers of `rekindle bench engine`: their names, and what is measured of every one.

The engine here is transformers itself, through the interface that peers have; the peers are not installed by tests.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from rekindle.config import Settings
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import flags_of
from rekindle_lab.bench.endless import endless_copy
from rekindle_lab.bench.engine import peer_arm, transformers_arm
from rekindle_lab.bench.engine.bench import EngineBench, table
from rekindle_lab.bench.engine.job import Job
from rekindle_lab.bench.engine.peers import Peer, need_packages, peers_of
from rekindle_lab.record import Measurement
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="module")
def job(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    parent = tmp_path_factory.mktemp("jobs")
    flags = flags_of(Settings.load({"threads": 1}))
    flags |= {"model": str(endless_copy(model, parent / "model")), "store": str(parent / "store")}
    return Job("openvino", flags, 600, repeats=2, seed=0, decode_tokens=8, weights="q8_0")


class Plain:
    """A peer that computes every prompt anew with transformers; `shift` makes it another model."""

    about: Mapping[str, Any] = {"engine": "transformers"}

    def __init__(self, job: Job, shift: int = 0) -> None:
        self._model = transformers_arm.load(job)
        self._shift = shift

    def first_token(self, ids: np.ndarray) -> int:
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor(ids.astype("int64"))[None]).logits[0, -1]
        return int(logits.argmax()) + self._shift

    def decode(self, prompts: Sequence[np.ndarray], count: int, repeats: int) -> list[float]:
        rates = []
        for _ in range(repeats):
            began = time.perf_counter()
            for ids in prompts:
                self.first_token(ids[:count])
            rates.append(len(prompts) / (time.perf_counter() - began))
        return rates

    def release(self) -> None:
        return


def with_tokens(job: Job) -> Job:
    (found,) = transformers_arm.first_tokens(job)
    return replace(job, expected=found.detail["tokens"])


def test_peers_have_the_same_rows_as_we_have(job: Job) -> None:
    found = {item.measure: item for item in peer_arm.speed(with_tokens(job), Plain)}
    assert list(found) == [
        "first tokens as of transformers, of 16", "cold", "hot EXTEND", "hot EXACT",
        "decode, 1 streams", "decode, 4 streams", "decode, 8 streams",
    ]  # fmt: skip
    assert found["first tokens as of transformers, of 16"].median == 16
    assert 500 < found["cold"].detail["prompt_tokens"] <= 600
    assert (len(found["cold"].values), len(found["decode, 8 streams"].values)) == (job.num_cold, job.repeats) == (1, 2)
    (memory,) = peer_arm.memory(replace(job, arm="openvino memory"), Plain)
    assert {item.arm for item in (*found.values(), memory)} == {"openvino:q8_0"}
    assert memory.measure == "peak memory of a cold prompt, in chunks" and memory.unit == "MiB"


def test_a_peer_that_computes_another_model_fails(job: Job) -> None:
    with pytest.raises(RekindleError, match="openvino:q8_0 computes another model: 0 of 16"):
        list(peer_arm.speed(with_tokens(job), partial(Plain, shift=1000)))


def test_names_of_peers() -> None:
    assert peers_of("") == ()
    assert peers_of("openvino, llama.cpp:q8_0") == (Peer("openvino", "f16"), Peer("llama.cpp", "q8_0"))
    assert [peer.arm for peer in peers_of("openvino,openvino:q8_0,llama.cpp:bf16")] == [
        "openvino", "openvino:q8_0", "llama.cpp:bf16"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", r"--against takes openvino and llama\.cpp, separated by commas, not 'vllm'"),
        ("openvino,", "not ''"),
        ("openvino:bf16", r"--against openvino takes f16, q8_0 weights \(openvino:q8_0\), not 'bf16'"),
        ("openvino,openvino:f16", "names a peer twice"),
    ],
)
def test_what_is_no_peer_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineBench(against=text)


def test_missing_packages_are_named_with_their_command() -> None:
    with pytest.raises(ConfigError, match=r"openvino and llama\.cpp .*: pip install openvino-genai llama-cpp-python$"):
        need_packages(peers_of("openvino,llama.cpp"), lambda module: None)
    need_packages(peers_of("openvino,llama.cpp"), lambda module: module)


def test_the_table_has_a_column_per_arm() -> None:
    def cold(arm: str, *values: float) -> Measurement:
        return Measurement("cold", arm, "s", values)

    measured = [cold("rekindle", 2.0, 2.2, 2.4), cold("transformers", 8.8), cold("openvino", 3.3), cold("llama.cpp", 1)]
    for width in (80, 200):
        shown = io.StringIO()
        Console(width=width, file=shown).print(table(measured))
        lines = shown.getvalue()
        assert max(map(len, lines.splitlines())) <= width
        assert [word for word in lines.split() if word.endswith(("0x", "5x"))] == [
            "4.00x", "1.50x", "0.45x"
        ]  # fmt: skip
