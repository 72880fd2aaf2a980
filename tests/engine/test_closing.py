"""Whoever speaks to an engine that is closing or closed gets an answer, never a wait without end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.types import GenerationRequest
from rekindle.errors import RekindleError
from tests.tiny_models import tiny_model_dir


def test_requests_and_questions_during_and_after_close_are_answered(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of engines that tests before this one have left running for their files
    model = tiny_model_dir("llama", "fp32", tmp_path)
    engine = Engine.from_pretrained(str(model), threads=1, hot_bytes=4 << 20, store=str(tmp_path / "store"))
    parts = engine._running
    long_run = engine.submit(GenerationRequest(text="Tell me everything.", agent="ada"))
    next(iter(long_run))
    answers: list[str] = []

    def pester() -> None:
        for _ in range(200):
            try:
                engine.submit(GenerationRequest(text="Hm?")).cancel()
                engine.stats()
                answers.append("stats")
            except RekindleError:
                answers.append("refused")

    threads = [threading.Thread(target=pester) for _ in range(3)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody still waits"
    assert answers.count("refused") > 0
    with pytest.raises(RekindleError, match="closed"):
        long_run.result()
    with pytest.raises(RekindleError, match="closed"):
        parts.loop.call(lambda core: core.num_steps).result(5)
    assert parts.intake.call(lambda: 3).result(5) == 3
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("rekindle")]
