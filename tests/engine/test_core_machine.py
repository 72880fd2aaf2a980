"""Invariants 4, 6 and 7 under any sequence of requests, cancels, evictions and steps in a memory that is too small.

After every step `check()` derives what pool, queues and loads must be; at the end nothing is held, and each answer is
the one the same ids get alone.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from rekindle.engine.request import Request, State
from rekindle.engine.types import Reuse, Task
from rekindle.model.loaded import LoadedModel
from tests.engine.ahead_runner import RunnerElsewhere
from tests.engine.quoting import spoilt
from tests.engine.slow_disk import SlowDisk
from tests.exactness.rig import BLOCK_TOKENS, BY_SIZE, Rig, load
from tests.tiny_models import tiny_model_dir

_DIRECTORY: list[Path] = []
_ANSWERS: dict[tuple[int, ...], tuple[int, ...]] = {}


@pytest.fixture(autouse=True, scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    _DIRECTORY.append(tmp_path_factory.mktemp("machine"))
    yield
    _DIRECTORY.clear()
    _ANSWERS.clear()


@cache
def model() -> LoadedModel:
    return load(tiny_model_dir("llama", "fp64", _DIRECTORY[0]), "fp64", "q4h")


def alone(ids: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
    """The answer on memory of its own, everything computed; a shorter one is the beginning of a longer one."""
    if new_tokens > len(_ANSWERS.get(ids, ())):
        _ANSWERS[ids] = Rig(model(), num_blocks=16).generate(ids, new_tokens).token_ids
    return _ANSWERS[ids][:new_tokens]


def some(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng(seed).integers(4, 380, length))


class CoreRules:
    """What both machines do with a rig: ask, cancel, step, evict, and compare each answer with one computed alone."""

    rig: Rig

    def begin(self, rig: Rig, said: Sequence[tuple[int, ...]] = ((7, 8, 9),)) -> None:
        self.rig = rig
        self.started: list[tuple[Request, tuple[int, ...], int]] = []
        self.tasks: list[Request] = []
        self.said = list(said)

    def submit(
        self, ids: tuple[int, ...], new_tokens: int, reuse: Reuse = "continuation", namespace: str = "default"
    ) -> None:
        """Ask in a namespace, and keep what was asked to compare with."""
        request = self.rig.unqueued(ids, new_tokens, reuse)
        request.namespace, request.sequence.root = namespace, self.rig.cache.root(namespace)
        if self.rig.max_draft:
            request.sequence.texts = (np.array([*ids, *spoilt(alone(ids, new_tokens), every=4)], dtype=np.uint32),)
        self.rig.core.add(request)
        self.started.append((request, ids, new_tokens))
        if reuse != "off":
            self.said.append(ids)

    def earlier(self, which: int, cut: int, more: int) -> tuple[int, ...]:
        earlier = self.said[which % len(self.said)]
        return (*earlier[: max(1, cut)], *range(20, 20 + more))

    def evict(self, which: int) -> None:
        """Drop a finished sequence from memory, as far as nobody stands on it."""
        if not self.rig.turns:
            return
        turn, pool = self.rig.turns[which % len(self.rig.turns)], self.rig.pool
        held, free = pool.num_held, pool.num_free
        freed = self.rig.cache.evict_chain(turn.root, turn.ids, turn.hashes)
        assert (pool.num_held, pool.num_free) == (held, free + freed)
        self.rig.core.check()

    def finish(self) -> None:
        """Every request ends with the answer its ids get alone, or the part of it that was told before a cancel."""
        for done in self.rig.finish(*self.tasks):
            assert (done.finish_reason, done.token_ids) == ("stop", ())
        self.tasks.clear()
        results = self.rig.finish(*[request for request, _, _ in self.started])
        for result, (request, ids, new_tokens) in zip(results, self.started, strict=True):
            if result.finish_reason == "length":
                assert result.token_ids == alone(ids, new_tokens)
            else:
                assert result.token_ids == alone(ids, new_tokens)[: len(result.token_ids)]
            if request.sequence.reuse == "off":
                assert result.report.reused_tokens == 0
        self.started.clear()
        self.rig.end_idle_work()
        # A cancelled load may still be under way; it alone may hold blocks.
        self.rig.end_loads()
        assert self.rig.pool.num_held == 0


class CoreMachine(RuleBasedStateMachine, CoreRules):
    @initialize(max_draft=st.sampled_from((0, 5, 15, "ahead")))
    def make(self, max_draft: int | Literal["ahead"]) -> None:
        if max_draft == "ahead":
            self.begin(Rig(model(), num_blocks=9, max_chunk_tokens=32, runner_type=RunnerElsewhere))
        else:
            self.begin(Rig(model(), num_blocks=9, max_chunk_tokens=32, max_draft=max_draft))

    @rule(seed=st.integers(0, 4), length=st.integers(1, 60), new_tokens=st.integers(1, 20))
    def ask(self, seed: int, length: int, new_tokens: int) -> None:
        self.submit(some(seed, length), new_tokens)

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 9), new_tokens=st.integers(1, 9))
    def ask_on(self, which: int, cut: int, more: int, new_tokens: int) -> None:
        self.submit(self.earlier(which, cut, more), new_tokens)

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 9), new_tokens=st.integers(1, 9))
    def ask_without_reuse(self, which: int, cut: int, more: int, new_tokens: int) -> None:
        self.submit(self.earlier(which, cut, more), new_tokens, "off")

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    @rule(which=st.integers(0, 9))
    def cancel(self, which: int) -> None:
        if self.started:
            self.started[which % len(self.started)][0].cancelled.set()

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 60), agent=st.sampled_from("abc"))
    def foresee(self, which: int, cut: int, more: int, agent: str) -> None:
        self.rig.idle_work(self.earlier(which, cut, more), agent)

    @rule(which=st.integers(0, 9), task=st.sampled_from(("prefill", "load")))
    def do(self, which: int, task: Task) -> None:
        self.tasks.append(self.rig.task(self.earlier(which, 60, 3), task))

    @rule(which=st.integers(0, 9))
    def evict_finished(self, which: int) -> None:
        self.evict(which)

    @rule(which=st.integers(0, 9), num_kept=st.integers(0, 3))
    def demote_finished(self, which: int, num_kept: int) -> None:
        if self.rig.turns:
            turn = self.rig.turns[which % len(self.rig.turns)]
            self.rig.cache.demote(turn.root, turn.ids, turn.hashes, num_kept=num_kept)
            self.rig.core.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.finish()


class StoreMachine(RuleBasedStateMachine, CoreRules):
    """As above with a store behind it, which is closed and opened again in between."""

    @initialize()
    def make(self) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=_DIRECTORY[0]))
        self.begin(Rig(model(), num_blocks=9, max_chunk_tokens=32, store_dir=self.directory, max_draft=5))

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 30), new_tokens=st.integers(1, 9))
    def ask(self, which: int, cut: int, more: int, new_tokens: int) -> None:
        self.submit(self.earlier(which, cut, more), new_tokens)

    @rule(which=st.integers(0, 9), cut=st.integers(0, 60), more=st.integers(1, 60))
    def foresee(self, which: int, cut: int, more: int) -> None:
        self.rig.idle_work(self.earlier(which, cut, more))

    @rule(which=st.integers(0, 9), count=st.integers(0, 4))
    def cancel_and_step(self, which: int, count: int) -> None:
        if self.started:
            self.started[which % len(self.started)][0].cancelled.set()
        for _ in range(count):
            self.rig.step()

    @rule(which=st.integers(0, 9))
    def evict_finished(self, which: int) -> None:
        self.evict(which)

    @rule(which=st.integers(0, 9), new_tokens=st.integers(1, 4))
    def reopen_and_ask_again(self, which: int, new_tokens: int) -> None:
        self.finish()
        turns, store = self.rig.turns, self.rig.store
        assert store is not None
        self.rig.save()
        all_saved = not store.stats().unsaved_evicted
        self.rig.close()
        rig = Rig(model(), num_blocks=9, max_chunk_tokens=32, store_dir=self.directory, max_draft=5)
        self.begin(rig, said=self.said)
        if not turns:
            return
        turn = turns[which % len(turns)]
        ids = (*(int(token) for token in turn.ids), 5)
        result = self.rig.generate(ids, new_tokens)
        assert result.token_ids == alone(ids, new_tokens)
        if all_saved:
            assert result.report.warm_tokens >= turn.head_tokens
        assert result.report.hot_tokens == 0

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.finish()
            assert self.rig.store is not None
            self.rig.save()
            self.rig.store.check()
            self.rig.close()
            shutil.rmtree(self.directory)


class PlacesMachine(RuleBasedStateMachine, CoreRules):
    """Namespaces that ask for more places than there are; memory is enough for all who run."""

    @initialize(max_running=st.integers(2, 6))
    def make(self, max_running: int) -> None:
        settings = replace(BY_SIZE, max_running=max_running)
        self.begin(Rig(model(), num_blocks=64, max_chunk_tokens=64, settings=settings))
        self.unfair: Counter[str] = Counter()
        self.without: Counter[str] = Counter()

    @rule(
        namespace=st.sampled_from("aaabcd"),
        count=st.integers(1, 5),
        seed=st.integers(0, 3),
        length=st.sampled_from((1, BLOCK_TOKENS, 40)),  # few prompts: most of the time goes into answers computed alone
        new_tokens=st.integers(1, 40),
        reuse=st.sampled_from(("continuation", "continuation", "off")),
    )
    def ask(self, namespace: str, count: int, seed: int, length: int, new_tokens: int, reuse: Reuse) -> None:
        for each in range(count):
            self.submit(some(seed + each, length), new_tokens, reuse, namespace)

    @rule(which=st.integers(0, 40))
    def cancel(self, which: int) -> None:
        if self.started:
            self.started[which % len(self.started)][0].cancelled.set()

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.judge()

    def judge(self) -> None:
        """Nobody has more than its share for longer than a block while somebody with less waits, and who has nothing
        gets a turn after one of the others."""
        queues, most = self.rig.scheduler, self.rig.settings.max_running
        held = Counter(request.namespace for request in (*queues.running, *queues.loading))
        assert held.total() <= most
        names = {request.namespace for request in queues.everybody()}
        share = max(1, most // max(1, len(names)))
        waiting = {request.namespace for request in queues.waiting}
        is_above = any(held[name] > share for name in names)
        self.unfair = Counter({name: self.unfair[name] + 1 for name in waiting if is_above and held[name] < share})
        self.without = Counter({name: self.without[name] + 1 for name in waiting if not held[name]})
        assert max(self.unfair.values(), default=0) <= BLOCK_TOKENS, f"{self.unfair} below their share"
        assert max(self.without.values(), default=0) <= 4 * BLOCK_TOKENS, f"{self.without} have no place"

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.finish()


PlacesMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=15, deadline=None)
TestPlacesMachine = PlacesMachine.TestCase
CoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCoreMachine = CoreMachine.TestCase
StoreMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=12, deadline=None)
TestStoreMachine = StoreMachine.TestCase


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
        assert loading.state is State.LOADING and disk.reading.wait(60)
        loading.cancelled.set()
        rig.step()
        assert loading.state is State.FINISHED
        assert rig.pool.num_held == 5, "the blocks being read into were given away"
        others = [list(range(200, 240)), list(range(300, 340))]
        answers = [rig.generate(other, 4, reuse="off").token_ids for other in others]
        disk.go.set()
        rig.end_loads()
        assert rig.pool.num_held == 0
        assert [alone(tuple(other), 4) for other in others] == answers
        again = rig.generate([*ids, 5, 6, 7], 2)
        assert again.report.reused_tokens == len(ids)
        assert again.token_ids == alone((*ids, 5, 6, 7), 2)
    finally:
        disk.go.set()
        rig.close()
