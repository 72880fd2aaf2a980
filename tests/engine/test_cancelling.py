"""A cancel is heard at every station: before the prompt is prepared, while blocks come from disk, while it runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rekindle.engine.core.loop import EngineLoop
from rekindle.engine.types import GenerationRequest
from rekindle.errors import Cancelled
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start
from tests.engine.slow_disk import SlowDisk
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("cancelling")), "fp32", "q4h")


def test_while_its_blocks_are_read(loaded: LoadedModel, tmp_path: Path) -> None:
    ids = some_ids(80)
    first = Rig(loaded, store_dir=tmp_path)
    first.generate(ids, 1)
    first.save()
    first.close()
    disk, loop, held = SlowDisk(), EngineLoop(check_when_idle=True), threading.Event()
    rig = Rig(loaded, num_blocks=9, store_dir=tmp_path, fs=disk, report_load=loop.report_load)
    loop.start(rig.core)
    try:
        request = rig.unqueued([*ids, 5], 4)
        loop.submit(request)
        assert disk.reading.wait(60)
        request.cancelled.set()
        loop.wake()
        result = request.reply.generation.result()
        assert (result.finish_reason, result.token_ids) == ("cancelled", ())
        assert not disk.go.is_set(), "the answer came while the reader was still reading"
        other = rig.unqueued(some_ids(30, seed=2), 4, "off")
        loop.submit(other)
        assert other.reply.generation.result().finish_reason == "length", "others go on meanwhile"
        assert loop.call(lambda core: core.cache.pool.num_held).result(60) == 5
        disk.go.set()
        while loop.call(lambda core: core.cache.pool.num_held).result(60):
            assert not held.wait(0.005)
        again = rig.unqueued([*ids, 5], 1)
        loop.submit(again)
        assert again.reply.generation.result().report.hot_tokens == len(ids), "what was read is kept"
    finally:
        disk.go.set()
        loop.stop()
        rig.close()


def test_before_it_is_prepared(start: Start) -> None:
    engine, busy, asked = start(), threading.Event(), GenerationRequest(text="Hello!", agent="ada")
    engine.components.intake.call(busy.wait)
    generation = engine.submit(asked)
    generation.cancel()
    busy.set()
    with pytest.raises(Cancelled):
        generation.result()
    assert engine.stats().num_held_blocks == 0 and engine.stats().prompt_tokens == 0
    assert engine.agents() == []


def test_after_its_end(start: Start) -> None:
    engine = start()
    generation = engine.submit(GenerationRequest(text="Hello!", agent="ada", params=SamplingParams(max_tokens=3)))
    result = generation.result()
    generation.cancel()
    assert generation.result() == result
    engine.check()
