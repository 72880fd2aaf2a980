"""Invariants 4, 6 and 7 under any sequence of requests, cancels and steps in a memory that is too small.

After every step `check()` derives what pool, queues and loads must be; at the end nothing is held, and each answer is
the one the same ids get alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rekindle.engine.request import Request, State
from rekindle.model.load import LoadedModel
from rekindle.store.sync import OsFileSystem
from rekindle.store.values import Bytes
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.tiny_models import tiny_model_dir

_DIRECTORY: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    _DIRECTORY.append(tmp_path_factory.mktemp("machine"))
    yield
    _DIRECTORY.clear()


@cache
def model() -> LoadedModel:
    return load(tiny_model_dir("llama", "fp64", _DIRECTORY[0]), "fp64", "q4h")


@cache
def alone(ids: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    """The answer on memory of its own, everything computed."""
    return Rig(model(), num_blocks=16).generate(ids, new_tokens).token_ids


class CoreMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rig = Rig(model(), num_blocks=9, max_chunk_tokens=32)
        self.started: list[tuple[Request, tuple[int, ...], int]] = []
        self.said: list[tuple[int, ...]] = [(7, 8, 9)]

    @rule(seed=st.integers(0, 4), length=st.integers(1, 60), new_tokens=st.integers(1, 20))
    def ask(self, seed: int, length: int, new_tokens: int) -> None:
        ids = tuple(int(x) for x in np.random.default_rng(seed).integers(4, 380, length))
        self._submit(ids, new_tokens)

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 9), new_tokens=st.integers(1, 9))
    def ask_on(self, which: int, cut: int, more: int, new_tokens: int) -> None:
        earlier = self.said[which % len(self.said)]
        self._submit((*earlier[: max(1, cut)], *range(20, 20 + more)), new_tokens)

    def _submit(self, ids: tuple[int, ...], new_tokens: int) -> None:
        self.started.append((self.rig.request(ids, new_tokens), ids, new_tokens))
        self.said.append(ids)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if self.started:
            self.started[which % len(self.started)][0].cancelled.set()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        results = self.rig.finish(*[request for request, _, _ in self.started])
        for result, (_, ids, new_tokens) in zip(results, self.started, strict=True):
            if result.finish_reason == "length":
                assert result.token_ids == alone(ids, new_tokens)
            else:
                assert result.token_ids == alone(ids, new_tokens)[: len(result.token_ids)]
        assert self.rig.pool.num_held == 0


CoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCoreMachine = CoreMachine.TestCase


class SlowDisk(OsFileSystem):
    """Reads of whole records wait until they are let go."""

    def __init__(self) -> None:
        self.reading = threading.Event()
        self.go = threading.Event()

    def read(self, fd: int, offset: int, out: Bytes) -> int:
        if offset:  # the first page of a shard is its header
            self.reading.set()
            assert self.go.wait(30)
        return super().read(fd, offset, out)


def test_a_cancelled_load_keeps_its_blocks_until_the_reader_is_done(tmp_path: Path) -> None:
    ids = list(range(10, 10 + 5 * BLOCK_TOKENS))
    first = Rig(model(), store_dir=tmp_path)
    first.generate(ids, 1)
    first.save()
    first.close()
    disk = SlowDisk()
    rig = Rig(model(), num_blocks=9, store_dir=tmp_path, fs=disk)
    try:
        loading = rig.request([*ids, 5, 6, 7], 2)
        rig.step()
        assert loading.state is State.LOADING and disk.reading.wait(10)
        loading.cancelled.set()
        rig.step()
        assert loading.state is State.FINISHED
        assert rig.pool.num_held == 5, "the blocks being read into were given away"
        others = [list(range(200, 240)), list(range(300, 340))]
        answers = [rig.generate(other, 4, reuse="off").token_ids for other in others]
        disk.go.set()
        while not rig.reports:
            pass
        rig.step()
        assert rig.pool.num_held == 0
        assert [alone(tuple(other), 4) for other in others] == answers
        again = rig.generate([*ids, 5, 6, 7], 2)
        assert again.report.reused_tokens == len(ids)
        assert again.token_ids == alone((*ids, 5, 6, 7), 2)
    finally:
        disk.go.set()
        rig.close()
