"""Several replies to one prompt: it is computed once, each reply is as it would be alone, each is remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle.engine.request import Request, State
from rekindle.engine.types import GenerationRequest, Reuse
from rekindle.errors import BadRequest
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from rekindle.text.messages import normalise_messages
from tests.engine.conftest import Start
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

LONG = 2 * BLOCK_TOKENS + 9


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp64", tmp_path_factory.mktemp("choices")), "fp64", "q4h")


def ask(rig: Rig, prompt: np.ndarray, count: int, new_tokens: int = 5, reuse: Reuse = "continuation") -> list[Request]:
    """Requests as the preparer makes them: one array of ids, seeds that follow each other."""
    return [rig.request(prompt, new_tokens, reuse, temperature=1.0, seed=40 + index) for index in range(count)]


def alone(loaded: LoadedModel, prompt: np.ndarray, seed: int, new_tokens: int = 5) -> tuple[int, ...]:
    rig = Rig(loaded)
    return rig.finish(rig.request(prompt, new_tokens, temperature=1.0, seed=seed))[0].token_ids


@pytest.mark.parametrize("reuse", ["continuation", "off"])
@pytest.mark.parametrize("length", [5, 2 * BLOCK_TOKENS, LONG])
def test_the_prompt_is_computed_once_its_tail_too(loaded: LoadedModel, length: int, reuse: Reuse) -> None:
    rig, prompt, count, new_tokens = Rig(loaded), np.asarray(some_ids(length), dtype=np.uint32), 4, 5
    results = rig.finish(*ask(rig, prompt, count, new_tokens, reuse))
    # Each reply but the first runs the last token of the prompt again, for its own first draw.
    assert rig.core.num_rows == length + (count - 1) + count * (new_tokens - 1)
    assert [result.token_ids for result in results] == [alone(loaded, prompt, 40 + index) for index in range(count)]
    assert len({result.token_ids for result in results}) > 1
    assert [result.report.reused_tokens for result in results] == [0, *[length - 1] * (count - 1)]
    assert all(result.report.computed_tokens == length - result.report.reused_tokens for result in results)
    assert rig.pool.num_held == 0


def test_who_waits_takes_over_when_the_first_is_cancelled_in_the_middle(loaded: LoadedModel) -> None:
    rig, prompt = Rig(loaded, max_chunk_tokens=16), np.asarray(some_ids(LONG), dtype=np.uint32)
    first, *others = ask(rig, prompt, 3)
    rig.step()
    assert first.state is State.RUNNING and first.sequence.num_computed == 16 and len(rig.scheduler.running) == 1
    first.cancelled.set()
    results = rig.finish(*others)
    assert [result.token_ids for result in results] == [alone(loaded, prompt, 41), alone(loaded, prompt, 42)]
    assert rig.core.num_rows == LONG + 1 + 2 * 4
    assert rig.finish(first)[0].finish_reason == "cancelled"


def test_one_cancelled_reply_leaves_the_others(loaded: LoadedModel) -> None:
    rig, prompt = Rig(loaded), np.asarray(some_ids(LONG), dtype=np.uint32)
    requests = ask(rig, prompt, 3)
    for _ in range(4):
        rig.step()
    requests[0].cancelled.set()
    results = rig.finish(*requests)
    assert [result.finish_reason for result in results] == ["cancelled", "length", "length"]
    assert [result.token_ids for result in results[1:]] == [alone(loaded, prompt, 41), alone(loaded, prompt, 42)]


@pytest.mark.parametrize("num_blocks", [5, 6, 8])
def test_in_a_memory_too_small_for_all_of_them_the_answers_stay(loaded: LoadedModel, num_blocks: int) -> None:
    rig, prompt = Rig(loaded, num_blocks=num_blocks), np.asarray(some_ids(LONG), dtype=np.uint32)
    results = rig.finish(*ask(rig, prompt, 4, new_tokens=20))
    expected = [alone(loaded, prompt, 40 + index, new_tokens=20) for index in range(4)]
    assert [result.token_ids for result in results] == expected
    assert rig.pool.num_held == 0


def test_each_is_a_branch_of_its_agent(start: Start) -> None:
    engine = start()
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    asked = GenerationRequest(text="Once upon a time there was", agent="ada", params=params)
    results = [generation.result() for generation in engine.submit_many(asked, 3)]
    assert len({result.token_ids for result in results}) == 3
    assert engine.agent("ada").info().branches == 3
    single = [engine.submit(GenerationRequest(text=asked.text, params=SamplingParams(**_seeded(i)))) for i in range(3)]
    assert [generation.result().token_ids for generation in single] == [result.token_ids for result in results]
    assert len({result.prompt_ids for result in results}) == 1
    engine.check()


def _seeded(index: int) -> dict[str, int | bool]:
    return {"max_tokens": 6, "seed": 3 + index, "ignore_eos": True}


@pytest.mark.parametrize("kind", ["messages", "text", "token_ids"])
def test_unnamed_replies_belong_to_one_hidden_agent(start: Start, kind: str) -> None:
    engine = start()
    prompts: dict[str, Any] = {
        "messages": normalise_messages([{"role": "user", "content": "Hello!"}]),
        "text": "Hello, you!",
        "token_ids": (5, 6, 7, 8),
    }
    asked = GenerationRequest(**{kind: prompts[kind]}, params=SamplingParams(max_tokens=4))
    for generation in engine.submit_many(asked, 3):
        generation.result()
    engine.flush()
    assert engine.agents() == []
    book = engine.components.memory.book
    names = engine.components.intake.call(lambda: {branch.agent for branch in book.branches()}).result()
    assert len(names) == 1


@pytest.mark.parametrize("n", [0, 9])
def test_more_replies_than_an_agent_keeps_are_refused(start: Start, n: int) -> None:
    engine = start()
    with pytest.raises(BadRequest, match="n must be from 1 to 8") as caught:
        engine.submit_many(GenerationRequest(text="Hello!"), n)
    assert caught.value.param == "n"


def test_what_is_wrong_with_the_prompt_is_said_to_each(start: Start) -> None:
    engine = start()
    for generation in engine.submit_many(GenerationRequest(token_ids=()), 2):
        with pytest.raises(BadRequest, match="empty"):
            generation.result()
