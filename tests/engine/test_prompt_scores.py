"""Scores of prompts: as `transformers` computes them, and computed once where prompts have a common beginning."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rekindle.engine.api import Engine
from rekindle.engine.blocks.score_cache import ScoreCache
from rekindle.engine.generation import Generation
from rekindle.engine.request import Request
from rekindle.engine.types import ChatResult, GenerationRequest, Reuse
from rekindle.errors import BadRequest
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.params import SamplingParams
from tests.engine.holding import held
from tests.tiny_models import CORPUS, VOCAB_SIZE, tiny_model_dir

Start = Callable[..., Engine]
SIZE = 16  # tokens of a block, as `start` sets it


def ids_of(seed: int, count: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(4, VOCAB_SIZE, count)]


def expected(directory: Path, ids: list[int]) -> torch.Tensor:
    """Log probabilities [n - 1, vocab] of `transformers`, in the model's own precision."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)


def scored(result: ChatResult) -> list[TokenLogprob]:
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(result.prompt_ids)
    assert result.prompt_logprobs[0] is None
    return [each for each in result.prompt_logprobs if each is not None]


def test_scores_are_those_of_transformers(start: Start, tiny_llama: Path) -> None:
    ids = ids_of(1, 70)
    engine = start(kv="fp32", max_chunk_tokens=24)
    found = scored(engine.generate(ids, max_tokens=1, prompt_logprobs=3))
    logprobs = expected(tiny_llama, ids)
    assert [each.token_id for each in found] == ids[1:]
    for row, each in zip(logprobs, found, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=2e-4)
        assert each.rank == int((row > row[each.token_id]).sum()) + 1
        assert [top.token_id for top in each.top] == row.topk(3).indices.tolist()
        assert [top.rank for top in each.top] == [1, 2, 3]
        assert each.text == engine.encoder.vocabulary.token_bytes(each.token_id)


def fresh(engine: Engine, ids: list[int]) -> ChatResult:
    return engine.generate(ids, max_tokens=1, temperature=0, prompt_logprobs=1, reuse="off")


@pytest.mark.parametrize("kv", ["fp32", "q4h"])
def test_a_common_beginning_is_scored_once(start: Start, kv: str) -> None:
    engine, common = start(kv=kv), ids_of(2, 5 * SIZE)
    first = engine.generate([*common, *ids_of(3, 9)], max_tokens=1, prompt_logprobs=1)
    other = [*common, *ids_of(4, 12)]
    second = engine.generate(other, max_tokens=1, prompt_logprobs=1, temperature=0)
    assert first.report.reused_tokens == 0
    assert second.report.reused_tokens == len(common) - 1  # the last one's logits score the next token
    alone = fresh(engine, other)
    assert alone.report.reused_tokens == 0
    assert second.prompt_logprobs == alone.prompt_logprobs
    assert second.token_ids == alone.token_ids
    again = engine.generate(other, max_tokens=1, prompt_logprobs=0)
    assert [each.logprob for each in scored(again)] == [each.logprob for each in scored(alone)]
    assert all(not each.top for each in scored(again))
    engine.check()


def test_stored_tokens_without_scores_are_computed_again(start: Start) -> None:
    engine, ids = start(kv="fp32"), ids_of(5, 4 * SIZE + 3)
    engine.generate(ids, agent="ada", max_tokens=1)
    assert engine.generate(ids, max_tokens=1).report.reused_tokens == len(ids) - 1
    with_scores = engine.generate(ids, agent="ada", max_tokens=2, prompt_logprobs=1)
    assert with_scores.report.reused_tokens == 0
    assert with_scores.prompt_logprobs == fresh(engine, ids).prompt_logprobs
    more = engine.generate(ids, max_tokens=1, prompt_logprobs=4)  # than is kept
    assert more.report.reused_tokens == 0
    fewer = engine.generate(ids, max_tokens=1, prompt_logprobs=2)
    assert fewer.report.reused_tokens == 4 * SIZE - 1
    assert [each.top[:2] for each in scored(more)] == [each.top for each in scored(fewer)]


def test_several_replies_share_the_scores_of_their_prompt(start: Start) -> None:
    engine, ids = start(kv="fp32"), ids_of(6, 40)
    request = GenerationRequest(token_ids=tuple(ids), params=SamplingParams(max_tokens=3, prompt_logprobs=1, seed=1))
    rows = engine.components.core.num_rows
    results = [each.result() for each in engine.submit_many(request, 3)]
    assert results[0].prompt_logprobs is not None
    assert len({id(each) for each in results}) == 3
    assert results[0].prompt_logprobs == results[1].prompt_logprobs == results[2].prompt_logprobs
    assert engine.components.core.num_rows - rows <= len(ids) + 3 * 3


def test_prompts_of_a_batch_wait_for_what_one_of_them_scores(start: Start) -> None:
    engine, common = start(kv="fp32", max_chunk_tokens=32), ids_of(7, 8 * SIZE)
    engine.generate(common, max_tokens=1)  # stored, without scores
    rows = engine.components.core.num_rows
    prompts = [[*common, *ids_of(10 + each, 5)] for each in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ids: engine.generate(ids, max_tokens=1, prompt_logprobs=1), prompts))
    assert engine.components.core.num_rows - rows <= len(common) + 4 * 7
    for ids, result in zip(prompts, results, strict=True):
        assert result.prompt_logprobs == fresh(engine, ids).prompt_logprobs


@pytest.mark.parametrize("kind", ["gemma3", "qwen3.5"])
def test_windows_and_states_are_resumed_where_scores_can_be(start: Start, kind: str, tmp_path: Path) -> None:
    model = tiny_model_dir(kind, "fp32", tmp_path / "models")
    common = ids_of(8, 6 * SIZE)
    prompts = [[*common, *ids_of(20 + each, 7 + each)] for each in range(4)]
    start(model, hot_bytes=8 << 20).generate(prompts[0], agent="ada", max_tokens=1)
    engine = start(model, hot_bytes=8 << 20)  # its KV is on disk now, without scores, and with windows only at its end
    alone = [scored(engine.generate(ids, max_tokens=1, prompt_logprobs=2, reuse="off")) for ids in prompts]
    for ids, right in zip(prompts, alone, strict=True):
        result = engine.generate(ids, max_tokens=1, prompt_logprobs=2)
        assert [each.token_id for each in scored(result)] == [each.token_id for each in right]
        assert [each.logprob for each in scored(result)] == pytest.approx([each.logprob for each in right], abs=1e-3)
    assert result.report.reused_tokens >= 5 * SIZE


def test_a_reply_of_no_tokens_scores_the_prompt_alone(start: Start) -> None:
    engine, ids = start(kv="fp32"), ids_of(9, 2 * SIZE)
    empty = engine.generate(ids, max_tokens=0, prompt_logprobs=1)
    assert (empty.text, empty.token_ids) == ("", ())
    assert empty.prompt_logprobs == fresh(engine, ids).prompt_logprobs
    again = engine.generate(ids, max_tokens=0, prompt_logprobs=1)
    assert again.report.reused_tokens == len(ids)  # nothing is left to compute
    assert again.prompt_logprobs == empty.prompt_logprobs


def test_only_a_named_agent_remembers_a_scored_text(start: Start) -> None:
    engine, text = start(kv="fp32"), " ".join(CORPUS)
    engine.generate(text, max_tokens=1, prompt_logprobs=1)
    later = engine.generate(f"{text} And so on.", max_tokens=1)
    assert later.report.matched_bytes == 0
    assert later.report.reused_tokens > 0, "its blocks are there all the same"
    engine.generate(text, agent="ada", max_tokens=2, prompt_logprobs=1)
    assert engine.agent("ada").info().num_tokens > 0


def test_the_oldest_scores_make_room(start: Start) -> None:
    engine, ids = start(kv="fp32"), ids_of(15, 6 * SIZE)
    scores = engine.components.core.cache.scores = ScoreCache(max_bytes=3 << 10)
    first = engine.generate(ids, max_tokens=1, prompt_logprobs=1)
    engine.check()
    assert 0 < len(scores) < 6
    again = engine.generate(ids, max_tokens=1, prompt_logprobs=1)
    assert again.report.reused_tokens == 0, "its first scores are gone, and with them the use of the others"
    assert again.prompt_logprobs == first.prompt_logprobs


def test_a_purge_drops_scores(start: Start) -> None:
    engine, ids = start(kv="fp32"), ids_of(12, 3 * SIZE)
    engine.generate(ids, agent="ada", max_tokens=1, prompt_logprobs=1)
    assert len(engine.components.core.cache.scores) == 3
    engine.agent("ada").purge()
    assert len(engine.components.core.cache.scores) == 0
    assert engine.generate(ids, max_tokens=1, prompt_logprobs=1).report.reused_tokens == 0


def is_half_done(request: Request) -> bool:
    return request.sequence.num_computed >= 2 * SIZE


def started(engine: Engine, ids: list[int], reuse: Reuse = "continuation") -> Generation:
    """A prompt of which a part is computed; `engine` stands still there."""
    request = GenerationRequest(
        token_ids=tuple(ids), params=SamplingParams(max_tokens=1, prompt_logprobs=1), reuse=reuse
    )
    generation = engine.submit(request)
    while not engine.components.loop.call(lambda core: any(map(is_half_done, core.scheduler.running))).result(30):
        assert generation.prompt_logprobs is None
    return generation


def test_a_cancelled_prompt_has_no_scores_and_leaves_those_of_its_blocks(start: Start) -> None:
    engine, ids = start(kv="fp32", max_chunk_tokens=16), ids_of(13, 5 * SIZE)
    with held(engine, is_half_done):
        generation = started(engine, ids)
        generation.cancel()
        result = generation.result()
    assert (result.finish_reason, result.prompt_logprobs) == ("cancelled", None)
    found = engine.generate(ids, max_tokens=1, prompt_logprobs=1)
    assert found.report.reused_tokens == 2 * SIZE - 1
    assert found.prompt_logprobs == fresh(engine, ids).prompt_logprobs


@pytest.mark.parametrize("reuse", ["continuation", "off"])
def test_a_preempted_prompt_keeps_its_scores(start: Start, reuse: Reuse) -> None:
    engine, ids = start(kv="fp32", max_chunk_tokens=16), ids_of(14, 5 * SIZE)
    with held(engine, is_half_done):
        generation = started(engine, ids, reuse)
        call = engine.components.loop.call(lambda core: core.admission.preempt(core.scheduler.running[0]))
        call.result(30)
    assert engine.stats().num_preemptions == 1
    assert generation.result().prompt_logprobs == fresh(engine, ids).prompt_logprobs


@pytest.mark.parametrize("given", [-1, 21, True, "1", 1.0])
def test_a_wrong_number_of_alternatives_is_refused(given: object) -> None:
    with pytest.raises(BadRequest, match="prompt_logprobs must be an integer from 0 to 20"):
        SamplingParams(prompt_logprobs=given)
