"""A prompt that was not computed to its end is not computed again from its beginning."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rekindle.engine.api import Engine
from rekindle.engine.request import Request, State
from rekindle.errors import Timeout
from rekindle.model.loaded import LoadedModel
from tests.engine.conftest import Start
from tests.engine.holding import held
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

IDS = some_ids(300)
KNOWN = 41  # so that it stops inside a block: what was begun of one counts, too
CHUNK = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("resuming")), "fp32", "q4h")


def begun(rig: Rig, num_steps: int = 2) -> Request:
    request = rig.request(IDS, 3)
    for _ in range(num_steps):
        rig.step()
    assert 0 < request.sequence.num_computed < len(IDS)
    return request


def stop(request: Request, how: str) -> None:
    if how == "cancelled":
        request.cancelled.set()
    else:
        request.deadline = -math.inf


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_it_goes_on_where_it_stopped(loaded: LoadedModel, tmp_path: Path, how: str, where: str) -> None:
    rig = Rig(loaded, max_chunk_tokens=CHUNK, store_dir=tmp_path)
    rig.generate(IDS[:KNOWN], 1)
    request, reached = begun(rig), KNOWN + 2 * CHUNK
    stop(request, how)
    rig.step()
    assert request.state is State.FINISHED and request.sequence.num_computed == reached
    if how == "timed out":
        with pytest.raises(Timeout):
            request.reply.generation.result()
    assert len(rig.turns) == 1, "it is no turn"
    if where == "disk":
        rig = rig.reopened()
    result = rig.generate(IDS, 3)
    assert (result.report.reused_tokens, result.report.computed_tokens) == (reached, len(IDS) - reached)
    assert (result.report.warm_tokens > 0) == (where == "disk")
    assert result.report.outcome == "diverge"
    assert result.report.source == ("own" if where == "memory" else "shared"), (
        "after a restart nobody knows whose it was"
    )
    assert result.token_ids == Rig(loaded).generate(IDS, 3).token_ids
    rig.close()


def test_stopped_again_and_again_it_comes_to_its_end(loaded: LoadedModel) -> None:
    rig = Rig(loaded, max_chunk_tokens=CHUNK)
    rig.generate(IDS[:KNOWN], 1)
    for computed in range(KNOWN + CHUNK, len(IDS), CHUNK):
        request = begun(rig, 1)
        assert request.sequence.num_computed == computed
        stop(request, "cancelled")
        rig.step()
    assert rig.generate(IDS, 3).report.computed_tokens == len(IDS) - computed
    assert rig.core.num_rows == len(IDS) + 2, "nothing was computed twice"


def cut_off(engine: Engine, agent: str, messages: list[dict[str, str]]) -> int:
    """Ask, and leave when a part of the prompt is computed; return how much."""
    with held(engine, lambda request: request.sequence.num_computed > 5 * CHUNK):  # else it may be over before that
        generation = engine.stream(agent, messages, temperature=0.0, max_tokens=3)
        while generation.progress is None or not generation.progress.computed_tokens:
            assert not generation.cancel_asked
        generation.cancel()
    assert generation.result().finish_reason == "cancelled"
    assert generation.progress is not None
    return generation.progress.computed_tokens


@pytest.mark.parametrize("has_memories", [False, True])
def test_the_caller_is_not_told_of_a_miss(start: Start, has_memories: bool) -> None:
    engine = start(max_chunk_tokens=16)
    if has_memories:
        engine.chat("ada", [{"role": "user", "content": "1 2 3"}], temperature=0.0, max_tokens=3)
    long = [{"role": "system", "content": "The red box holds 4711 screws, the blue box holds 12 nuts. " * 40}]
    computed = cut_off(engine, "ada", long)
    assert engine.flush()
    asked = [*long, {"role": "user", "content": "Hm?"}]
    report = engine.chat("ada", asked, temperature=0.0, max_tokens=3).report
    assert report.reused_tokens >= computed - 16
    assert (report.outcome, report.source, report.explanation) == ("diverge", "own", None)
    engine.check()


def test_a_little_of_it_is_a_miss_for_an_agent_with_other_memories(start: Start) -> None:
    engine, text = start(), "The red box holds 4711 screws. "
    engine.chat("bob", [{"role": "user", "content": "1 2 3"}], temperature=0.0, max_tokens=3)
    engine.prefill("ada", [{"role": "user", "content": text * 2}])
    engine.agent("ada").delete()
    report = engine.chat("bob", [{"role": "user", "content": text * 20}], temperature=0.0, max_tokens=3).report
    assert report.outcome == "miss"
