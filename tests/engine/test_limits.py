"""How long a request may take and how many may wait: past either it ends at once, and nothing is lost by it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.generation import Generation
from rekindle.engine.intake.intake import AdmissionQueueLimit
from rekindle.engine.request import State
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Overloaded, Timeout
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start
from tests.engine.slow_disk import SlowDisk
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("limits")), "fp32", "q4h")


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_request_past_its_time_is_stopped_in_the_next_step_and_its_blocks_stay(loaded: LoadedModel) -> None:
    clock, ids = Clock(), some_ids(40)
    rig = Rig(loaded, clock=clock)
    late, other = rig.unqueued(ids, 30), rig.unqueued(some_ids(20, seed=2), 8)
    late.deadline = clock.now + 5
    rig.core.add(late)
    rig.core.add(other)
    for _ in range(4):
        rig.step()
    said = late.sequence.num_generated
    assert said > 1
    clock.now += 4.9
    rig.step()
    assert late.state is State.RUNNING and late.sequence.num_generated == said + 1
    clock.now += 0.1
    rig.step()
    assert late.state is State.FINISHED and late.sequence.num_generated == said + 1
    with pytest.raises(Timeout, match="5 s"):
        late.reply.generation.result()
    assert rig.finish(other)[0].finish_reason == "length"
    assert [len(turn.ids) for turn in rig.turns] == [len(ids) + said, 20 + 7], "what it said is remembered"
    assert rig.generate(ids, 1).report.reused_tokens == len(ids) - 1


def test_also_while_it_waits(loaded: LoadedModel) -> None:
    clock = Clock()
    rig = Rig(loaded, clock=clock, num_blocks=4)
    running, waiting = rig.request(some_ids(40), 8), rig.unqueued(some_ids(40, seed=2), 8)
    waiting.deadline = clock.now + 1
    rig.step()
    rig.core.add(waiting)
    rig.step()
    assert waiting.state is State.WAITING
    clock.now += 1
    rig.step()
    with pytest.raises(Timeout):
        waiting.reply.generation.result()
    assert rig.finish(running)[0].finish_reason == "length"


def test_also_while_its_blocks_are_read_with_nothing_else_to_wake_the_engine(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    ids = some_ids(5 * BLOCK_TOKENS)
    first = Rig(loaded, store_dir=tmp_path)
    first.generate(ids, 1)
    first.save()
    first.close()
    disk, loop = SlowDisk(), EngineLoop(check_when_idle=True)
    rig = Rig(loaded, num_blocks=9, store_dir=tmp_path, fs=disk, report_load=loop.report_load)
    loop.start(rig.core)
    try:
        request = rig.unqueued([*ids, 5], 4)
        request.deadline = rig.clock() + 0.2
        loop.submit(request)
        with pytest.raises(Timeout):
            request.reply.generation.result()
        assert not disk.go.is_set(), "the answer came while the reader was still reading"
    finally:
        disk.go.set()
        loop.stop()
        rig.close()


def test_the_setting_reaches_every_request(start: Start) -> None:
    engine = start(request_timeout_s=1e-6)
    with pytest.raises(Timeout, match="request_timeout_s"):
        engine.chat("ada", [{"role": "user", "content": "Hello!"}])
    assert engine.stats().num_held_blocks == 0
    engine.check()


def test_who_finds_too_many_waiting_is_refused_at_once(start: Start) -> None:
    engine, busy = start(max_waiting=2), threading.Event()
    engine.components.intake.call(busy.wait)
    asked = GenerationRequest(text="Hello!", params=SamplingParams(max_tokens=3))
    accepted = [engine.submit(asked), engine.submit(asked)]
    refused = [engine.submit(asked), *engine.submit_many(asked, 2)]
    for generation in refused:
        with pytest.raises(Overloaded, match="2 requests wait") as caught:
            generation.result()
        assert caught.value.retry_after_s > 0
    assert not busy.is_set(), "the refusal waited for the others"
    busy.set()
    assert all(generation.result().finish_reason for generation in accepted)
    assert engine.submit(asked).result().finish_reason, "there is room again"
    assert engine.components.intake.room.num_waiting == 0


def test_every_end_leaves_the_room_and_only_once() -> None:
    room = AdmissionQueueLimit(3)
    generations = [Generation() for _ in range(3)]
    assert room.enter("a", 3) and not room.enter("a", 1)
    for generation in generations:
        generation.on_begin(partial(room.leave, "a"))
    generations[0].begin()
    generations[0].put(Overloaded("no", retry_after_s=1.0))
    assert room.num_waiting == 2
    generations[1].put(Overloaded("no", retry_after_s=1.0))
    assert room.num_waiting == 1 and room.enter("a", 2) and not room.enter("a", 1)


def test_more_replies_than_may_wait_come_into_an_empty_room() -> None:
    room = AdmissionQueueLimit(1)
    assert room.enter("a", 4) and not room.enter("a", 1)


def test_a_namespace_that_fills_the_room_leaves_others_their_share() -> None:
    room = AdmissionQueueLimit(12)
    assert room.enter("a", 12) and not room.enter("a", 1)
    assert room.enter("b", 6) and not room.enter("b", 1), "half of it"
    assert room.enter("c", 4) and not room.enter("c", 1), "a third"
    assert room.num_waiting == 22
    for _ in range(11):
        room.leave("a")
    assert room.num_waiting == 11 and room.enter("b", 1) and not room.enter("b", 1)


def test_who_fills_the_waiting_room_keeps_no_other_tenant_out(start: Start) -> None:
    engine, busy = start(max_waiting=4), threading.Event()
    engine.components.intake.call(busy.wait)
    asked = GenerationRequest(text="Hello!", params=SamplingParams(max_tokens=2), namespace="a")
    accepted = [engine.submit(asked) for _ in range(4)]
    refused, other = engine.submit(asked), engine.submit(replace(asked, namespace="b"))
    with pytest.raises(Overloaded):
        refused.result()
    busy.set()
    assert all(generation.result().finish_reason for generation in (*accepted, other))
    assert engine.components.intake.room.num_waiting == 0
