"""More requests than memory or places hold: little is computed twice, and every namespace gets its turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rekindle.engine.request import State
from rekindle.engine.types import Reuse
from rekindle.model.loaded import LoadedModel
from tests.exactness.rig import BY_SIZE, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("crowded")), "fp32", "q4h")


@pytest.mark.parametrize("reuse", ["continuation", "off"])
def test_nobody_is_let_in_on_the_blocks_the_running_need_next(loaded: LoadedModel, reuse: Reuse) -> None:
    rig, count, length, new_tokens = Rig(loaded, num_blocks=30), 32, 20, 40
    prompts = [some_ids(length, seed=seed) for seed in range(count)]
    results = rig.finish(*[rig.request(prompt, new_tokens, reuse) for prompt in prompts])
    least = count * (length + new_tokens - 1)
    assert rig.core.num_rows <= 1.2 * least, "before, 1.36 times the least were run"
    assert rig.core.num_preemptions <= 10, "before, 108"
    alone = Rig(loaded)
    for prompt, result in list(zip(prompts, results, strict=True))[::8]:
        assert result.token_ids == alone.generate(prompt, new_tokens, "off").token_ids
    assert rig.pool.num_held == 0


def test_where_memory_is_enough_nothing_is_computed_twice(loaded: LoadedModel) -> None:
    rig = Rig(loaded, num_blocks=64)
    rig.finish(*[rig.request(some_ids(20, seed=seed), 60) for seed in range(8)])
    assert (rig.core.num_rows, rig.core.num_preemptions) == (8 * (20 + 59), 0)


def test_a_namespace_that_asks_much_does_not_keep_another_waiting(loaded: LoadedModel) -> None:
    rig = Rig(loaded, settings=replace(BY_SIZE, max_running=1), clock=lambda: 0.0)
    many = [rig.request(some_ids(20, seed=seed), 2) for seed in range(6)]
    few = [rig.unqueued(some_ids(20, seed=10 + seed), 2) for seed in range(2)]
    for request in few:
        request.namespace = "other"
        rig.core.add(request)
    rig.finish(*few)
    # One of each namespace a turn: the first of the many, then one of the few, and again.
    assert sum(request.state is State.FINISHED for request in many) <= 2
    rig.finish(*many)
