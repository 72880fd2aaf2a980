"""Whoever speaks to an engine that is closing or closed gets an answer, never a wait without end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rekindle.engine.agent_admin import AgentAdmin
from rekindle.engine.api import Engine
from rekindle.engine.factory import assemble
from rekindle.engine.generation import Generation
from rekindle.engine.types import GenerationRequest
from rekindle.errors import RekindleError
from rekindle.model.params import SamplingParams
from rekindle.store.commands import Pin
from tests.engine.conftest import Start
from tests.engine.holding import held
from tests.given import settings_of
from tests.tiny_models import tiny_model_dir


def test_requests_and_questions_during_and_after_close_are_answered(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # of engines that tests before this one have left running for their files
    model = tiny_model_dir("llama", "fp32", tmp_path)
    engine = Engine.from_pretrained(str(model), threads=1, hot_bytes=4 << 20, store=str(tmp_path / "store"))
    parts = engine.components
    endless = SamplingParams(ignore_eos=True)
    refused: list[str] = []

    def pester() -> None:
        while len(refused) < 200:
            try:
                engine.submit(GenerationRequest(text="Hm?")).cancel()
                engine.stats()
            except RekindleError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=pester, daemon=True) for _ in range(3)]
    with held(engine, lambda request: request.sequence.num_generated > 500):  # else it may be over before the close
        long_run = engine.submit(GenerationRequest(text="Tell me everything.", agent="ada", params=endless))
        next(iter(long_run))
        for thread in threads:
            thread.start()
        engine.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody still waits"
    assert len(refused) >= 200
    with pytest.raises(RekindleError, match="closed"):
        long_run.result()
    with pytest.raises(RekindleError, match="closed"):
        parts.loop.call(lambda core: core.num_steps).result(5)
    assert parts.intake.call(lambda: 3).result(5) == 3
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("rekindle")]


def test_orders_to_a_closed_engine_are_refused(start: Start) -> None:
    engine = start()
    engine.chat("ada", [{"role": "user", "content": "Hello."}], max_tokens=2)
    parts = engine.components
    engine.close()
    with pytest.raises(RekindleError, match="closed"):
        AgentAdmin(parts, "default", "ada").pin(None)


@pytest.mark.parametrize("has_room", [True, False])
def test_orders_that_wait_when_it_ends_are_carried_out_or_refused(
    tiny_llama: Path, tmp_path: Path, has_room: bool
) -> None:
    given = {"threads": 1, "hot_bytes": 4 << 20, "block_tokens": 16, "staging_bytes": 1, "store": tmp_path / "store"}
    parts = assemble(settings_of(model=str(tiny_llama), **given))
    parts.start()
    order, said, go_on = Pin("default", "ada", 0.0), Generation(), threading.Event()
    assert parts.store is not None
    if not has_room:  # the writer stands still with the one block that there is room for, and all else waits for it
        parts.store.writer.call(lambda ledger: go_on.wait(60))
    asked = GenerationRequest(text="Hello. " * 40, agent="ada", params=SamplingParams(max_tokens=2))
    parts.intake.submit(asked, [said])
    assert said.result().finish_reason
    if has_room:
        assert parts.flush(60)
    parts.loop.save(order)
    parts.loop.stop()  # as at a close that could not wait any longer
    if has_room:
        assert order.done.result(60), "the agent is known"
    else:
        with pytest.raises(RekindleError, match="closed"):
            order.done.result(0)
    go_on.set()
    parts.intake.stop()
    parts.store.close()
