"""A long prompt beside a running stream: the stream gets its token in every step, and the steps are short.

No time is measured: what a row costs is given, and the clock stands still.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.config import EngineSettings
from rekindle.engine.request import State
from rekindle.model.loaded import LoadedModel
from tests.engine.fixed_costs import FixedCosts
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

STALL_S = 0.25


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory: Path = tmp_path_factory.mktemp("stalls")
    return load(tiny_model_dir("llama", "fp32", directory), "fp32", "q4h")


def make_rig(loaded: LoadedModel, row_s: float) -> Rig:
    costs = FixedCosts(base_s=0.0, row_s=row_s, row_context_s=0.0)
    return Rig(loaded, settings=EngineSettings(max_stall_s=STALL_S), costs=costs, clock=lambda: 0.0)


@pytest.mark.parametrize(("row_s", "chunk", "misses"), [(0.002, 112, 0), (0.01, 16, 0), (1.0, 16, 25)])
def test_a_stream_gets_a_token_in_every_step_of_a_long_prefill(
    loaded: LoadedModel, row_s: float, chunk: int, misses: int
) -> None:
    rig = make_rig(loaded, row_s)
    stream = rig.request(some_ids(10), 60)
    while not stream.sequence.num_generated:
        rig.step()
    before = rig.scheduler.num_stall_misses
    long = rig.request(some_ids(400, seed=2), 1)
    steps = 0
    while long.state is not State.FINISHED:
        told, computed = stream.sequence.num_generated, long.sequence.num_computed
        rig.step()
        steps += 1
        assert stream.sequence.num_generated == told + 1
        assert long.sequence.num_computed - computed <= chunk
    assert steps == -(-400 // chunk)
    assert rig.scheduler.num_stall_misses - before == misses
    answers = [result.token_ids for result in rig.finish(stream, long)]
    alone = make_rig(loaded, row_s)
    assert answers == [alone.generate(some_ids(10), 60).token_ids, alone.generate(some_ids(400, seed=2), 1).token_ids]


def test_alone_a_prompt_takes_the_long_steps(loaded: LoadedModel) -> None:
    rig = make_rig(loaded, 0.01)
    long = rig.request(some_ids(400, seed=2), 1)
    rig.step()
    assert long.sequence.num_computed == 96
