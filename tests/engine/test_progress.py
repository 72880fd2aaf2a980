"""How far a long prompt is: known at any moment, and told by the log where it takes long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rekindle.model.loaded import LoadedModel
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("progress")
    return load(tiny_model_dir("llama", "fp32", directory), "fp32", "q4h")


def test_it_is_known_from_the_admission_to_the_first_token(loaded: LoadedModel) -> None:
    now = [100.0]
    rig = Rig(loaded, max_chunk_tokens=64, clock=lambda: now[0])
    rig.generate(some_ids(50), 1)
    request = rig.request([*some_ids(50), *some_ids(250, seed=2)], 3)
    assert request.reply.generation.progress is None, "it has not begun"
    seen = []
    while request.sequence.num_generated == 0:
        now[0] += 2.0
        rig.step()
        progress = request.reply.generation.progress
        assert progress is not None and progress.elapsed_s == now[0] - 102.0
        assert (progress.prompt_tokens, progress.reused_tokens, progress.marked_tokens) == (300, 50, 0)
        seen.append(progress.computed_tokens)
    assert seen == [64, 128, 192, 250]
    last = request.reply.generation.progress
    report = rig.finish(request)[0].report
    assert last is not None and request.reply.generation.progress is last, "with the first token it is over"
    assert (last.outcome, last.source, last.computed_tokens) == (report.outcome, report.source, report.computed_tokens)


def test_the_log_tells_every_ten_seconds(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    rig = Rig(loaded, max_chunk_tokens=16, clock=lambda: now[0])
    request = rig.request(some_ids(320), 1)
    with caplog.at_level(logging.INFO, logger="rekindle.engine"):
        while request.sequence.num_generated == 0:
            rig.step()
            now[0] += 2.0
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"request {request.id} of agent a: {done} of 320 prompt tokens done, {rate} tokens/s, about {left} s left"
        for done, rate, left in ((96, "10", 23), (176, "9", 16), (256, "9", 8))
    ]


def test_short_prompts_are_not_talked_about(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rekindle.engine"):
        Rig(loaded).generate(some_ids(320), 40)
    assert not caplog.records
