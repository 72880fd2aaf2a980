"""What a request has cost is said once, however it ends: what was computed of its prompt, and what was generated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.engine.request import Request
from rekindle.errors import Timeout
from rekindle.model.loaded import LoadedModel
from tests.exactness.rig import Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

IDS = some_ids(40)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("spending")), "fp32", "q4h")


@pytest.fixture
def rig(loaded: LoadedModel) -> Iterator[Rig]:
    made = Rig(loaded, max_chunk_tokens=16)
    yield made
    made.close()


def spent(request: Request) -> list[tuple[int, int]]:
    """What this request will say that it has cost: (computed, generated)."""
    found: list[tuple[int, int]] = []
    request.reply.generation.on_spent(lambda computed, generated: found.append((computed, generated)))
    return found


def test_a_whole_reply_costs_what_was_computed_and_the_next_one_what_is_new(rig: Rig) -> None:
    first = rig.request(IDS, 4)
    cost = spent(first)
    result = rig.finish(first)[0]
    assert cost == [(40, 4)] == [(result.report.computed_tokens, result.report.completion_tokens)]
    second = rig.request([*IDS, *result.token_ids, 5, 6], 3)
    cost = spent(second)
    report = rig.finish(second)[0].report
    assert cost == [(report.computed_tokens, 3)] and report.computed_tokens < 40


@pytest.mark.parametrize(("steps", "right"), [(0, (0, 0)), (1, (16, 0)), (2, (32, 0)), (5, (40, 3))])
def test_a_cancelled_one_costs_what_was_done_until_then(rig: Rig, steps: int, right: tuple[int, int]) -> None:
    request = rig.request(IDS, 20)
    cost = spent(request)
    for _ in range(steps):
        rig.step()
    request.cancelled.set()
    rig.step()
    assert request.reply.generation.result().finish_reason == "cancelled"
    assert cost == [right]


def test_one_that_is_out_of_time_costs_as_much(rig: Rig) -> None:
    late = rig.request(IDS, 20)
    cost = spent(late)
    while not late.sequence.num_generated:
        rig.step()
    late.deadline = 0.0
    rig.step()
    with pytest.raises(Timeout):
        late.reply.generation.result()
    assert cost == [(40, late.sequence.num_generated)]
