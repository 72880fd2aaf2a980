"""Namespaces share the running places and hot memory: none of them waits for another one's replies to end.

Time is counted in steps of the core; its clock stands still unless a test moves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rekindle.engine.request import Request, State
from rekindle.engine.types import Reuse
from rekindle.model.loaded import LoadedModel
from tests.exactness.rig import BLOCK_TOKENS, BY_SIZE, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

ENDLESS = 2000
SMALL, NEW = 24, 5  # what the other namespace asks: a short prompt, a short reply


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("places")), "fp32", "q4h")


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(
    rig: Rig, namespace: str, ids: Sequence[int] | np.ndarray, new_tokens: int, reuse: Reuse = "continuation"
) -> Request:
    """Queue a request of a namespace."""
    request = rig.unqueued(ids, new_tokens, reuse)
    request.namespace, request.sequence.root = namespace, rig.cache.root(namespace)
    rig.core.add(request)
    return request


def steps_to_end(rig: Rig, request: Request, most: int = 60) -> int:
    """Steps until it has ended, at most so many."""
    for count in range(1, most + 1):
        rig.core.step()
        if request.state is State.FINISHED:
            rig.core.check()
            return count
    return most + 1


def finish(rig: Rig, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    """Step until these have ended; their answers. What must hold is checked at the end."""
    while any(request.state is not State.FINISHED for request in requests):
        rig.core.step()
    rig.core.check()
    return [request.reply.generation.result().token_ids for request in requests]


def steps_alone(loaded: LoadedModel, ids: Sequence[int], new_tokens: int) -> int:
    """Steps of a request that has the engine to itself."""
    rig = Rig(loaded)
    return steps_to_end(rig, rig.request(ids, new_tokens))


def alone(loaded: LoadedModel, ids: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """The answer on memory of its own, everything computed."""
    rig = Rig(loaded)
    return finish(rig, [rig.request(ids, new_tokens, "off")])[0]


def num_running(rig: Rig) -> dict[str, int]:
    return dict(Counter(request.namespace for request in rig.scheduler.running))


def attack(rig: Rig, kind: str) -> None:
    """What namespace `a` asks: far more than the 32 places hold."""
    if kind == "prompts":
        for seed in range(100):
            ask(rig, "a", some_ids(2400, seed=seed), 40)
        return
    for seed in range(60):
        ask(rig, "a", some_ids(20, seed=seed), ENDLESS, "off" if kind == "without reuse" else "continuation")


@pytest.mark.parametrize("num_steps", [1, 8])
@pytest.mark.parametrize("kind", ["streams", "prompts", "without reuse"])
def test_a_small_request_is_answered_within_four_steps_of_its_own(
    loaded: LoadedModel, kind: str, num_steps: int
) -> None:
    clock = Clock()
    rig = Rig(loaded, num_blocks=5400, clock=clock)
    attack(rig, kind)
    for _ in range(num_steps):
        clock.now += 1.0
        rig.core.step()
    assert num_running(rig) == {"a": 32}, "a namespace alone has every place"
    small = ask(rig, "b", some_ids(SMALL, seed=500), NEW)
    assert steps_to_end(rig, small) <= steps_alone(loaded, some_ids(SMALL, seed=500), NEW) + 4
    rig.step()
    assert num_running(rig) == {"a": 32}, "and every place is a's again"


def test_all_choices_of_one_prompt_get_their_places(loaded: LoadedModel) -> None:
    rig, ids = Rig(loaded, num_blocks=600, settings=replace(BY_SIZE, max_running=8)), some_ids(SMALL, seed=500)
    for seed in range(20):
        ask(rig, "a", some_ids(20, seed=seed), ENDLESS)
    for _ in range(5):
        rig.step()
    prompt = np.asarray(ids, dtype=np.uint32)
    choices = [ask(rig, "b", prompt, NEW) for _ in range(4)]
    steps = [steps_to_end(rig, choice) for choice in choices]
    assert sum(steps) <= steps_alone(loaded, ids, NEW) + 4, "the prompt is computed once, and they run together"
    assert {choice.reply.generation.result().token_ids for choice in choices} == {alone(loaded, ids, NEW)}


def test_memory_that_one_namespace_fills_has_room_for_another(loaded: LoadedModel) -> None:
    clock = Clock()
    rig = Rig(loaded, num_blocks=400, clock=clock)
    for seed in range(20):
        ask(rig, "a", some_ids(1200, seed=seed), 200)
    for _ in range(30):
        clock.now += 1.0
        rig.core.step()
    assert num_running(rig) == {"a": 5} and rig.pool.num_free + rig.pool.num_cached < 25, "memory is full"
    ids = some_ids(400, seed=500)
    other = ask(rig, "b", ids, NEW)
    assert steps_to_end(rig, other) <= steps_alone(loaded, ids, NEW) + 4
    assert other.reply.generation.result().token_ids == alone(loaded, ids, NEW)


def test_who_grows_takes_blocks_of_its_own_namespace_not_of_another_within_its_share(loaded: LoadedModel) -> None:
    rig = Rig(loaded, num_blocks=40)
    many = [ask(rig, "a", some_ids(60, seed=seed), 60) for seed in range(5)]
    for _ in range(3):
        rig.step()
    young = ask(rig, "b", some_ids(60, seed=500), 70)
    finish(rig, [young])
    assert young.sequence.num_preemptions == 0 and sum(each.sequence.num_preemptions for each in many) > 0
    assert finish(rig, many) == [alone(loaded, some_ids(60, seed=seed), 60) for seed in range(5)]


def test_a_request_that_fills_memory_gives_way_after_a_turn_and_goes_on_where_it_was(loaded: LoadedModel) -> None:
    clock, large, ids = Clock(), some_ids(400, seed=1), some_ids(200, seed=500)
    rig = Rig(loaded, num_blocks=36, clock=clock)
    giant = ask(rig, "a", large, 100)
    while giant.sequence.num_generated < 40:
        rig.core.step()
    other = ask(rig, "b", ids, NEW)
    assert steps_to_end(rig, other) <= steps_alone(loaded, ids, NEW) + 4
    assert other.reply.generation.result().token_ids == alone(loaded, ids, NEW)
    assert finish(rig, [giant]) == [alone(loaded, large, 100)] and giant.sequence.num_preemptions == 1
    assert rig.core.num_rows <= 400 + 99 + 200 + NEW + 200, "what the other one needed is computed again, not more"


def test_a_request_larger_than_a_share_runs_although_another_namespace_keeps_asking(loaded: LoadedModel) -> None:
    clock, large = Clock(), some_ids(400, seed=1)
    rig = Rig(loaded, num_blocks=36, clock=clock)
    busy = [ask(rig, "b", some_ids(40, seed=seed), 40) for seed in range(6)]
    rig.step()
    giant = ask(rig, "a", large, 20)
    for seed in range(100, 200):
        clock.now += 0.25
        rig.core.step()
        if giant.state is State.FINISHED:
            break
        if sum(request.state is not State.FINISHED for request in busy) < 8:
            busy.append(ask(rig, "b", some_ids(40, seed=seed), 40))
    assert giant.reply.generation.result().token_ids == alone(loaded, large, 20)
    finish(rig, busy)


def test_places_are_divided_by_who_wants_them(loaded: LoadedModel) -> None:
    rig = Rig(loaded, num_blocks=900, settings=replace(BY_SIZE, max_running=8))
    streams = {name: [ask(rig, name, some_ids(20, seed=seed), ENDLESS) for seed in range(12)] for name in "ab"}
    rig.step()
    assert num_running(rig) == {"a": 4, "b": 4}
    streams["c"] = [ask(rig, "c", some_ids(20, seed=seed), ENDLESS) for seed in range(12)]
    for _ in range(BLOCK_TOKENS):
        rig.step()
    assert sorted(num_running(rig).values()) == [2, 3, 3], "two each; the rest is anybody's"
    for name in "ab":
        for request in streams[name]:
            request.cancelled.set()
    rig.step()
    assert num_running(rig) == {"c": 8}


def test_namespaces_that_outnumber_the_places_take_turns_of_a_block(loaded: LoadedModel) -> None:
    rig = Rig(loaded, num_blocks=200, settings=replace(BY_SIZE, max_running=2), clock=lambda: 0.0)
    requests = [ask(rig, name, some_ids(20, seed=seed), 40) for seed, name in enumerate("abcde")]
    waited, longest = Counter[str](), 0
    while any(request.state is not State.FINISHED for request in requests):
        rig.core.step()
        for request in requests:
            waited[request.namespace] = waited[request.namespace] + 1 if request.state is State.WAITING else 0
        longest = max(longest, *waited.values())
    assert longest <= 2 * (BLOCK_TOKENS + 2), "a turn of each two of the other four"
    assert rig.core.num_rows == 5 * (20 + 39), "nothing is computed twice"
    for seed, request in enumerate(requests):
        assert request.reply.generation.result().token_ids == alone(loaded, some_ids(20, seed=seed), 40)


def test_who_was_preempted_gets_ahead_before_it_is_again(loaded: LoadedModel) -> None:
    rig = Rig(loaded, num_blocks=64, settings=replace(BY_SIZE, max_running=2), clock=lambda: 0.0)
    streams = [ask(rig, "a", some_ids(20, seed=seed), 60, "off") for seed in range(2)]
    for seed in range(30):
        computed = [request.sequence.num_before for request in streams]
        before = [request.sequence.num_preemptions for request in streams]
        steps_to_end(rig, ask(rig, "b", some_ids(SMALL, seed=500 + seed), 1, "off"))
        for request, had, count in zip(streams, computed, before, strict=True):
            if request.sequence.num_preemptions > max(1, count):
                assert request.sequence.num_before >= had + BLOCK_TOKENS
    assert [request.sequence.num_preemptions for request in streams] != [0, 0]


@pytest.mark.parametrize(("reuse", "most_again"), [("continuation", 0), ("off", 500)])
def test_giving_places_back_and_forth_computes_little_again(loaded: LoadedModel, reuse: Reuse, most_again: int) -> None:
    """Ten short requests, one after another, next to eight streams in four places: each takes a place for a while."""
    rig = Rig(loaded, num_blocks=160, settings=replace(BY_SIZE, max_running=4))
    streams = [ask(rig, "a", some_ids(20, seed=seed), 60, reuse) for seed in range(8)]
    for _ in range(10):
        rig.core.step()
    for seed in range(10):
        small = ask(rig, "b", some_ids(SMALL, seed=500 + seed), NEW, "off")
        assert steps_to_end(rig, small) <= NEW + 4
    answers = finish(rig, streams)
    least = 8 * (20 + 59) + 10 * (SMALL + NEW - 1)
    assert rig.core.num_rows - least <= most_again
    assert rig.core.num_preemptions <= 10
    begun = [request.times.first_token for request in streams]
    assert begun == sorted(begun, key=lambda at: at or 0.0), "who was preempted goes on before who waits"
    assert answers[:4] == [alone(loaded, some_ids(20, seed=seed), 60) for seed in range(4)]
    assert rig.pool.num_held == 0
