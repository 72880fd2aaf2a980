"""Saving and loading under a stub of an engine's scheduler: what is stored is right, nothing twice, nothing spoilt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle_vllm.groups import Group, Groups
from rekindle_vllm.names import Scope
from rekindle_vllm.planner import Planner
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled
from rekindle_vllm.steps import StepReport
from tests.kernels.native import needs_kernels
from tests.vllm.engine import Request, StubEngine, expected_rows, reply_of
from tests.vllm.stored import RECORD, Stores, check_records, damage, prompt, records_of


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made = Stores(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("block_tokens", [16, 32, 64])
def test_a_new_process_continues_from_disk(stores: Stores, block_tokens: int) -> None:
    ids = prompt(300)
    first = StubEngine(stores.open(), block_tokens=block_tokens)
    reply = first.serve("a", ids, 30)
    assert reply == reply_of(ids, 30)
    assert first.reuse["a"] == Reuse(300, 0, 0, 0)
    check_records(first.owner, ids + reply, 5)
    assert first.owner.stats().blocks_written == 5
    second = StubEngine(stores.open(), block_tokens=block_tokens)
    longer = ids + reply + prompt(40, 1)
    assert second.serve("b", longer, 5) == reply_of(longer, 5)
    assert second.reuse["b"] == Reuse(370, 0, 320, 0)
    assert second.owner.stats().blocks_read == 5 and second.owner.stats().blocks_written == 0


def test_a_prompt_of_whole_records_computes_its_last_one(stores: Stores) -> None:
    ids = prompt(128)
    StubEngine(stores.open()).serve("a", ids)
    engine = StubEngine(stores.open())
    assert engine.serve("b", ids, 3) == reply_of(ids, 3)
    assert engine.reuse["b"] == Reuse(128, 0, 64, 0)
    assert engine.owner.stats().blocks_written == 0


def test_hot_tokens_come_first_and_are_not_overwritten(stores: Stores) -> None:
    ids = prompt(256)
    StubEngine(stores.open("q4h")).serve("a", ids)  # whose decoded values are not those that are hot
    engine = StubEngine(stores.open("q4h"), block_tokens=16)
    engine.serve("b", ids[:100])
    before = [made.cache.clone() for made in engine.workers[0].backends]
    hot = dict(engine.hot)
    engine.serve("c", [*ids, 7], 2)
    assert engine.reuse["c"] == Reuse(257, 96, 160, 0)
    for kept, made in zip(before, engine.workers[0].backends, strict=True):
        held = sorted(block for (_, key), block in hot.items() if len(key) <= 96)
        assert torch.equal(kept[held], made.cache[held]) and held


def test_requests_that_share_a_prefix_save_it_once(stores: Stores) -> None:
    engine, shared = StubEngine(stores.open()), prompt(200)
    for number in range(4):
        engine.add(Request(f"r{number}", shared + prompt(70, number), 4))
    engine.drain()
    for number in range(4):
        check_records(engine.owner, shared + prompt(70, number), 4)
    assert engine.owner.stats().blocks_written == 3 + 4
    assert engine.owner.stats().blocks_orphaned == 0


def test_a_preempted_request_resumes_from_disk(stores: Stores) -> None:
    engine, ids = StubEngine(stores.open(), budget=64), prompt(250)
    request = Request("a", list(ids), 20)
    engine.add(request)
    for _ in range(4):
        engine.step()
    engine.forget_hot()
    engine.preempt(request)
    assert engine.owner.store.flush(10)
    engine.drain()
    assert engine.replies["a"] == reply_of(ids, 20)
    assert engine.owner.stats().blocks_read == 3
    check_records(engine.owner, ids + engine.replies["a"], 4)
    assert engine.owner.stats().blocks_written == 4
    assert engine.reuse["a"] == Reuse(250, 0, 0, 0)  # of the prompt, when it began


def test_a_crowded_engine_preempts_and_every_reply_is_right(stores: Stores) -> None:
    engine = StubEngine(stores.open(), num_blocks=40, budget=90)
    prompts = {f"r{number}": prompt(150 + 20 * number, number) for number in range(6)}
    for name, ids in prompts.items():
        engine.add(Request(name, list(ids), 40))
    engine.drain()
    for name, ids in prompts.items():
        assert engine.replies[name] == reply_of(ids, 40)
        check_records(engine.owner, ids + engine.replies[name], (len(ids) + 39) // RECORD)


def test_an_aborted_request_keeps_what_it_had_computed(stores: Stores) -> None:
    engine, ids = StubEngine(stores.open(), budget=100), prompt(300)
    request = Request("a", list(ids))
    engine.add(request)
    engine.step()
    engine.step()
    engine.abort(request)
    check_records(engine.owner, ids, 3)
    assert [record.num_tokens for record in engine.owner.store.sequences()] == [192]


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_damaged_record_is_computed_again_and_saved_again(stores: Stores, bad: int) -> None:
    ids = prompt(300)
    reply = StubEngine(stores.open()).serve("a", ids, 5)
    owner = stores.open()
    damage(stores.directory, records_of(owner, ids)[bad])
    engine = StubEngine(owner, num_records=4)
    assert engine.serve("b", ids, 5) == reply
    assert engine.reuse["b"] == Reuse(300, 0, bad * RECORD, (4 - bad) * RECORD)
    assert engine.recomputed == (4 - bad) * RECORD
    check_records(owner, ids, 4)
    assert owner.stats().bad_records == 1 and owner.stats().blocks_written == 1
    again = StubEngine(stores.open())
    assert again.serve("c", ids, 5) == reply and again.reuse["c"] == Reuse(300, 0, 256, 0)


@needs_kernels
def test_the_kernels_read_records(stores: Stores) -> None:
    assert stores.open().store.readers.read_records is not None


@pytest.mark.parametrize("bad", [0, 2, 5, None])
def test_a_load_that_several_threads_read_ends_at_its_first_bad_record(stores: Stores, bad: int | None) -> None:
    ids = prompt(400)
    StubEngine(stores.open()).serve("a", ids)
    owner = stores.open(readers=4)
    blocks = records_of(owner, ids)
    if bad is not None:
        damage(stores.directory, blocks[bad])
    rows = [np.zeros(owner.layout.parts[0].payload_bytes, dtype=np.uint8) for _ in blocks]
    good = owner.begin_load(owner.plan_load(blocks), 0, rows).result(10)
    assert good == (len(blocks) if bad is None else bad) and len(blocks) == 6
    for number, row in enumerate(rows[:good]):
        assert np.array_equal(row, expected_rows(owner.layout, ids[: (number + 1) * RECORD]))
    assert owner.begin_load(owner.plan_load([]), 0, []).result(10) == 0


def test_nothing_is_saved_that_was_computed_after_a_failed_load(stores: Stores) -> None:
    """Two requests share the blocks of a load that fails; both compute on, on garbage, in the very step."""
    ids = prompt(128)
    StubEngine(stores.open()).serve("a", ids + prompt(64, 5))
    owner = stores.open()
    damage(stores.directory, records_of(owner, ids)[0])
    engine = StubEngine(owner, budget=400)
    prompts = {f"r{number}": ids + prompt(140, number) for number in range(2)}
    for name, given in prompts.items():
        engine.add(Request(name, list(given), 3))
    engine.step()
    assert owner.stats().queue_length == 0 and owner.store.flush(10) and owner.stats().blocks_written == 0
    engine.drain()
    for name, given in prompts.items():
        assert engine.replies[name] == reply_of(given, 3)
        assert engine.reuse[name].loaded == 0
        check_records(owner, given, 4)


def test_what_continues_after_blocks_that_are_still_garbage_saves_nothing(stores: Stores) -> None:
    """The request whose load failed is gone before it computes its blocks again; the engine still shares them."""
    ids = prompt(256)
    StubEngine(stores.open()).serve("a", [*ids, 1])
    owner = stores.open()
    damage(stores.directory, records_of(owner, ids)[1])
    engine = StubEngine(owner)
    request = Request("b", [*ids, 2])
    engine.add(request)
    engine.step()
    engine.abort(request)
    longer = ids + prompt(140, 3)
    engine.serve("c", longer)
    assert len(records_of(owner, longer)) == 1
    engine.forget_hot()
    engine.serve("d", longer)
    check_records(owner, longer, 6)


def test_a_full_staging_buffer_delays_saving_and_loses_nothing(stores: Stores) -> None:
    engine = StubEngine(stores.open(staging_bytes=1), budget=500, patience_s=0.0)
    ids = prompt(480)
    assert engine.serve("a", ids, 60) == reply_of(ids, 60)
    saved = len(records_of(engine.owner, ids + engine.replies["a"]))
    check_records(engine.owner, ids + engine.replies["a"], saved)
    assert saved >= 2 and engine.owner.stats().blocks_orphaned == 0
    assert [record.num_tokens for record in engine.owner.store.sequences()] == [saved * RECORD]


def test_a_step_without_room_is_followed_by_nine_times_as_long_without_saving(stores: Stores) -> None:
    owner, ids = stores.open(), prompt(480)
    now = 100.0
    planner = Planner(owner, Groups([Group(0, 16)], RECORD), clock=lambda: now)
    planner.match(EngineRequest("a", ids, Scope("default")), 0)
    work, blocks = Scheduled("a", 0, 256, begins=True), {"a": [range(1, 31)]}.__getitem__
    (first,) = planner.plan([work], blocks).saves
    planner.report(StepReport(saved={first.key: 1}, stalled_s=0.5))
    later = replace(work, computed=256, tokens=1, begins=False)
    now = 104.4
    assert not planner.plan([later], blocks).saves
    now = 104.6
    (again,) = planner.plan([later], blocks).saves
    assert again.blocks == first.blocks[1:]  # what was not saved is not forgotten
    planner.report(StepReport(saved={again.key: 3}))
    assert planner.finish("a") is not None
    planner.check()


def test_only_what_the_store_has_no_room_for_is_a_stall(stores: Stores) -> None:
    for staging_bytes, stalls in ((1, True), (1 << 24, False)):
        engine = StubEngine(stores.open(staging_bytes=staging_bytes), budget=500, patience_s=0.0)
        engine.serve("a", prompt(480), 2)
        assert (engine.stalled_s > 0) is stalls


def test_only_tokens_within_the_limit_are_kept(stores: Stores) -> None:
    ids = prompt(300)
    for _ in range(2):
        engine = StubEngine(stores.open())
        engine.add(Request("a", list(ids), 2, limit=150))
        engine.drain()
        assert engine.replies["a"] == reply_of(ids, 2)
        check_records(engine.owner, ids, 2)
    assert engine.reuse["a"] == Reuse(300, 0, 128, 0)


def test_scopes_share_nothing(stores: Stores) -> None:
    ids, owner = prompt(200), stores.open()
    engine = StubEngine(owner)
    for number, scope in enumerate((Scope("default"), Scope("other"), Scope("other", "salt"), Scope("other", "", "x"))):
        engine.forget_hot()
        engine.add(Request(f"r{number}", list(ids), scope=scope))
        engine.drain()
        assert engine.reuse[f"r{number}"] == Reuse(200, 0, 0, 0)
        assert len(records_of(owner, ids, scope)) == 3
    assert {record.namespace for record in owner.store.sequences()} == {"default", "other"}


def test_turns_of_an_agent_are_one_branch_and_other_prompts_of_it_are_others(stores: Stores) -> None:
    engine, ids = StubEngine(stores.open()), prompt(140)
    for turn in range(3):
        ids += engine.serve(f"turn {turn}", ids, 70, agent="ada")
        engine.serve(f"title {turn}", prompt(130, 9), 2, agent="ada")
    found = {(record.agent, record.branch): record.num_tokens for record in _sequences(engine)}
    assert found == {("ada", 0): 320, ("ada", 1): 128}


def test_unnamed_conversations_are_continued_after_a_restart(stores: Stores) -> None:
    engine, ids = StubEngine(stores.open()), prompt(140)
    ids += engine.serve("one", ids, 70)
    engine.serve("other", prompt(140, 1))
    engine = StubEngine(stores.open())
    engine.serve("two", ids, 70)
    assert sorted(record.num_tokens for record in _sequences(engine)) == [128, 256]
    assert all(record.agent.startswith("\x01") for record in _sequences(engine))


def test_a_stopped_planner_neither_saves_nor_loads(stores: Stores) -> None:
    engine, ids = StubEngine(stores.open()), prompt(200)
    engine.serve("a", ids)
    engine.forget_hot()
    engine.planner.stop()
    engine.serve("b", [*ids, *prompt(100, 2)])
    assert engine.reuse["b"] == Reuse(300, 0, 0, 0)
    assert len(records_of(engine.owner, [*ids, *prompt(100, 2)])) == 3


def test_in_4_bits_a_prefix_is_loaded_and_the_rest_computed(stores: Stores) -> None:
    ids = prompt(200)
    StubEngine(stores.open("q4h")).serve("a", ids)
    engine = StubEngine(stores.open("q4h"))
    engine.serve("b", ids)
    assert engine.reuse["b"] == Reuse(200, 0, 192, 0)


def _sequences(engine: StubEngine) -> list[object]:
    assert engine.owner.store.flush(10)
    return list(engine.owner.store.sequences())
