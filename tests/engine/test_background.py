"""Idle work: only while nobody else is there, within its share of memory, and without a trace on disk until it is used.

No time is measured: what a row costs is given, and the clock stands still.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.config import EngineSettings
from rekindle.engine.core.background import MOST_WAITING
from rekindle.engine.core.purge import HotPurge, wipe
from rekindle.engine.request import State
from rekindle.errors import RequestFailed
from rekindle.model.loaded import LoadedModel
from rekindle.store.commands import Purge
from tests.engine.dying import raising
from tests.engine.fixed_costs import FixedCosts
from tests.engine.slow_disk import SlowDisk
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

STALL_S = 0.25
CHUNK = 48  # of rows at 2 ms, in whole blocks, within 0.4 of the stall


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("idle")), "fp32", "q4h")


def make_rig(loaded: LoadedModel, num_blocks: int = 96) -> Rig:
    costs = FixedCosts(base_s=0.0, row_s=0.002, row_context_s=0.0)
    settings = EngineSettings(max_stall_s=STALL_S)
    return Rig(loaded, num_blocks=num_blocks, settings=settings, costs=costs, clock=lambda: 0.0)


def test_it_gives_way_within_a_step_and_goes_on_later(loaded: LoadedModel) -> None:
    rig, ids = make_rig(loaded), some_ids(400)
    idle = rig.idle_work(ids)
    rig.step()
    assert (idle.state, idle.sequence.num_computed) == (State.RUNNING, CHUNK), (
        "a step of it is shorter than beside others"
    )
    other = rig.request(some_ids(30, seed=2), 3)
    rig.step()
    assert (idle.state, other.sequence.num_generated) == (State.WAITING, 1), "who arrives is next"
    assert not idle.sequence.table.blocks and rig.num_hot(ids) == CHUNK, "its blocks are there and nobody holds them"
    rig.finish(other)
    assert idle.state is State.WAITING
    rig.step()
    assert idle.sequence.num_computed == 2 * CHUNK, "it went on from where it stopped"
    rig.end_idle_work()
    assert rig.num_hot(ids) == 400 and rig.core.background.num_tokens == 400
    assert [turn for turn in rig.turns if turn.agent == "idle"] == []
    result = rig.generate([*ids, 5, 6], 2)
    assert (result.report.reused_tokens, result.report.computed_tokens) == (400, 2)
    assert result.token_ids == make_rig(loaded).generate([*ids, 5, 6], 2).token_ids


def test_while_others_wait_or_load_it_does_not_run(loaded: LoadedModel) -> None:
    rig = make_rig(loaded)
    idle, others = rig.idle_work(some_ids(200)), [rig.request(some_ids(60, seed=s), 9) for s in (2, 3)]
    while any(other.state is not State.FINISHED for other in others):
        assert idle.sequence.num_computed == 0
        rig.step()
    rig.end_idle_work()
    assert rig.num_hot(some_ids(200)) == 200


def test_while_blocks_come_from_disk_for_others_it_does_not_run(loaded: LoadedModel, tmp_path: Path) -> None:
    first = Rig(loaded, store_dir=tmp_path)
    first.generate(some_ids(90), 1)
    first.save()
    first.close()
    disk = SlowDisk()
    rig = Rig(loaded, store_dir=tmp_path, fs=disk)
    try:
        loading, idle = rig.request([*some_ids(90), 5], 2), rig.idle_work(some_ids(60, seed=2))
        for _ in range(3):
            rig.step()
        assert (loading.state, idle.sequence.num_computed) == (State.LOADING, 0) and not rig.core.has_work
        disk.go.set()
        rig.finish(loading)
        rig.end_idle_work()
        assert rig.num_hot(some_ids(60, seed=2)) == 60
    finally:
        disk.go.set()
        rig.close()


def test_it_takes_half_of_what_nobody_holds_and_no_more(loaded: LoadedModel) -> None:
    rig, theirs = make_rig(loaded, num_blocks=24), some_ids(12 * BLOCK_TOKENS - 1, seed=2)
    rig.generate(theirs, 1)
    assert (rig.pool.num_free, rig.pool.num_cached) == (12, 12)
    rig.idle_work(some_ids(400))
    rig.end_idle_work()
    assert rig.num_hot(some_ids(400)) == 12 * BLOCK_TOKENS
    assert rig.num_hot(theirs) == len(theirs) and not rig.pool.num_evictions


def test_a_request_of_the_agent_ends_it_and_finds_what_is_computed(loaded: LoadedModel) -> None:
    rig, ids = make_rig(loaded), some_ids(400)
    mine, theirs = rig.idle_work(ids, "a"), rig.idle_work(some_ids(90, seed=3), "b")
    mine = rig.idle_work(ids, "a")
    rig.step()
    request = rig.request([*ids, 7], 1)
    assert mine.state is State.FINISHED and theirs.state is State.WAITING
    rig.step()
    assert request.sequence.hot_tokens == CHUNK
    rig.finish(request)
    rig.end_idle_work()
    assert rig.num_hot(some_ids(90, seed=3)) == 90


def test_the_latest_goes_first_and_too_many_are_given_up(loaded: LoadedModel) -> None:
    rig = make_rig(loaded)
    asked = [rig.idle_work(some_ids(32, seed=n), f"agent {n}") for n in range(MOST_WAITING + 2)]
    assert [work.state for work in asked[:3]] == [State.FINISHED, State.FINISHED, State.WAITING]
    rig.step()
    assert asked[-1].state is State.RUNNING


def test_what_is_too_little_is_left(loaded: LoadedModel) -> None:
    rig, ids = make_rig(loaded), some_ids(60)
    rig.generate(ids, 1)
    rig.idle_work(ids)
    rig.end_idle_work()
    assert (rig.core.background.num_begun, rig.core.background.num_tokens) == (0, 0)


def test_it_is_written_to_disk_when_a_turn_stands_on_it(loaded: LoadedModel, tmp_path: Path) -> None:
    rig, ids = Rig(loaded, store_dir=tmp_path), some_ids(200)
    rig.idle_work(ids[:150])
    rig.end_idle_work()
    rig.save()
    assert rig.store is not None and rig.store.stats().blocks_written == 0
    rig.generate(ids, 2)
    rig.save()
    assert rig.store.stats().blocks_orphaned == 0, "what it stands on was not queued before it"
    again = rig.reopened()
    result = again.generate([*ids, 5], 1)
    assert result.report.warm_tokens == 200
    again.save()
    assert again.store is not None
    again.store.check()
    again.close()


def test_a_purge_takes_what_is_being_computed_for_the_agent(loaded: LoadedModel) -> None:
    rig, ids, nothing = make_rig(loaded), some_ids(400), frozenset[BlockHash]()
    rig.idle_work(ids, "a")
    rig.step()
    assert rig.pool.num_held == CHUNK // BLOCK_TOKENS
    num_wiped = wipe(rig.core, HotPurge(Purge("default", "a"), nothing, nothing, nothing))
    assert (rig.pool.num_held, rig.pool.num_cached) == (0, 0) and num_wiped >= CHUNK // BLOCK_TOKENS
    assert not len(rig.core.background)


def test_what_fails_in_its_forward_pass_ends_and_a_purge_finds_its_blocks(loaded: LoadedModel) -> None:
    rig, ids, nothing = make_rig(loaded), some_ids(400), frozenset[BlockHash]()
    first, second = rig.idle(ids, "a"), rig.idle(some_ids(90, seed=2), "a")
    first.followed_by = second
    rig.core.add(first)
    rig.step()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(raising(RuntimeError))
    rig.step()
    hook.remove()
    assert first.state is State.FINISHED and rig.num_hot(ids) == CHUNK
    rig.end_idle_work()
    assert second.state is State.FINISHED and rig.num_hot(some_ids(90, seed=2)) == 90
    wipe(rig.core, HotPurge(Purge("default", "a"), nothing, nothing, nothing))
    assert (rig.pool.num_held, rig.pool.num_cached) == (0, 0)


def test_what_follows_comes_when_the_first_is_done(loaded: LoadedModel) -> None:
    rig = make_rig(loaded)
    first, second = rig.idle(some_ids(120), "a"), rig.idle(some_ids(90, seed=2), "a")
    first.followed_by = second
    rig.core.add(first)
    rig.end_idle_work()
    assert (rig.num_hot(some_ids(120)), rig.num_hot(some_ids(90, seed=2))) == (120, 90)
    again, never = rig.idle(some_ids(300, seed=3), "a"), rig.idle(some_ids(90, seed=4), "a")
    again.followed_by = never
    rig.core.add(again)
    rig.step()
    rig.finish(rig.request(some_ids(20, seed=5), 1))
    rig.end_idle_work()
    assert rig.num_hot(some_ids(90, seed=4)) == 0, "with the first it is out of date"


def test_it_ends_when_the_engine_does(loaded: LoadedModel) -> None:
    rig = make_rig(loaded)
    running, waiting = rig.idle_work(some_ids(400), "a"), rig.idle_work(some_ids(300), "b")
    rig.step()
    rig.core.fail_all(RequestFailed("closing"))
    assert running.state is waiting.state is State.FINISHED
    assert rig.pool.num_held == 0 and not len(rig.core.background)


def test_reading_for_it_takes_no_more_than_half_either(loaded: LoadedModel, tmp_path: Path) -> None:
    first = Rig(loaded, num_blocks=24, store_dir=tmp_path)
    first.generate(ids := some_ids(13 * BLOCK_TOKENS), 1)
    rig = first.reopened()
    try:
        rig.generate(theirs := some_ids(12 * BLOCK_TOKENS - 1, seed=2), 1)
        assert (rig.pool.num_free, rig.pool.num_cached) == (12, 12)
        rig.idle_work([*ids, *some_ids(40, seed=3)])
        rig.end_idle_work()
        assert rig.num_hot(theirs) == len(theirs) and not rig.pool.num_evictions
        rig.idle_work([*ids[: 6 * BLOCK_TOKENS], *some_ids(200, seed=3)])
        rig.end_idle_work()
        assert rig.core.background.num_tokens == 6 * BLOCK_TOKENS, "what was read counts, too"
        assert rig.num_hot(theirs) == len(theirs) and not rig.pool.num_evictions
    finally:
        rig.close()


def test_a_purge_forgets_what_was_held_back_from_the_disk(loaded: LoadedModel, tmp_path: Path) -> None:
    rig, nothing = Rig(loaded, store_dir=tmp_path), frozenset[BlockHash]()
    try:
        rig.idle_work(some_ids(200), "a")
        rig.end_idle_work()
        assert rig.cache.saving.num_deferred
        wipe(rig.core, HotPurge(Purge("default", "a"), nothing, nothing, nothing))
        assert not rig.cache.saving.num_deferred, "the words of the purged agent are still here"
    finally:
        rig.close()
