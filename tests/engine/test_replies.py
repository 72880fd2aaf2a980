"""What a reply says of its tokens, where it ends, and that penalties hold through a preemption."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.engine.api import Engine
from rekindle.engine.request import State
from rekindle.engine.types import GenerationRequest
from rekindle.errors import BadRequest
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir

RULES = {
    "temperature": 0.9,
    "seed": 11,
    "presence_penalty": 0.7,
    "frequency_penalty": 1.1,
    "repetition_penalty": 1.3,
    "min_p": 0.02,
    "logit_bias": ((17, 3.0),),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("replies")), "fp32", "q4h")


def test_logprobs_are_those_of_a_forward_over_prompt_and_reply(loaded: LoadedModel) -> None:
    rig, prompt = Rig(loaded), some_ids(30)
    result = rig.finish(rig.request(prompt, 8, logprobs=4, **RULES))[0]
    assert [each.token_id for each in result.logprobs] == list(result.token_ids)
    ids = [*prompt, *result.token_ids]
    expected = torch.log_softmax(Rig(loaded).logits(ids, [len(ids)]).float(), dim=-1)[len(prompt) - 1 :]
    for row, told in enumerate(result.logprobs):
        assert told.logprob == pytest.approx(float(expected[row, told.token_id]), abs=1e-4)
        best = expected[row].topk(4).values.tolist()
        assert [each.logprob for each in told.top] == pytest.approx(best, abs=1e-4)
        assert told.text == rig.encoder.vocabulary.token_bytes(told.token_id)


def test_every_delta_brings_the_logprobs_of_its_tokens_also_the_last(loaded: LoadedModel) -> None:
    rig, prompt = Rig(loaded), some_ids(40, seed=1)
    whole = rig.finish(rig.request(prompt, 8))[0]
    assert whole.logprobs == () and whole.text[4:6].isascii()
    request = rig.unqueued(prompt, 8, logprobs=0)
    request.reply.stream.watch_for((whole.text[4:6],))
    rig.core.add(request)
    while request.state is not State.FINISHED:
        rig.step()
    deltas = list(request.reply.generation)
    assert deltas[-1].finish_reason == "stop" and deltas[-1].token_ids
    for delta in deltas:
        assert tuple(each.token_id for each in delta.logprobs) == delta.token_ids
        assert all(each.top == () for each in delta.logprobs)


def test_penalties_and_seeds_hold_through_preemptions_and_beside_others(loaded: LoadedModel) -> None:
    prompts = [some_ids(20, seed=seed) for seed in range(4)]
    expected = []
    for prompt in prompts:
        rig = Rig(loaded)
        expected.append(rig.finish(rig.request(prompt, 60, logprobs=2, **RULES))[0])
    crowded = Rig(loaded, num_blocks=8, max_chunk_tokens=32)
    requests = [crowded.request(prompt, 60, logprobs=2, **RULES) for prompt in prompts]
    results = crowded.finish(*requests)
    assert crowded.core.num_preemptions > 0
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    for result, single in zip(results, expected, strict=True):
        told, alone = ([each.logprob for each in r.logprobs] for r in (result, single))
        assert told == pytest.approx(alone, abs=1e-4)


def test_a_reply_ends_at_eos_and_stop_tokens_unless_told_otherwise(start: Start) -> None:
    engine = start()
    (eos,) = sorted(engine.spec.eos_ids)[:1]

    def say(**params: Any) -> tuple[str, tuple[int, ...]]:
        given = SamplingParams(max_tokens=6, temperature=0.0, **params)
        result = engine.submit(GenerationRequest(text="Hello there", params=given)).result()
        return result.finish_reason, result.token_ids

    wants_eos = ((eos, 100.0),)
    plain = say(ignore_eos=True)[1]
    assert len(plain) == 6
    assert say(logit_bias=wants_eos) == ("stop", ())
    assert say(logit_bias=wants_eos, ignore_eos=True) == ("length", (eos,) * 6)
    reason, ids = say(logit_bias=wants_eos, min_tokens=3)
    assert (reason, len(ids)) == ("stop", 3) and eos not in ids
    first = plain.index(plain[2])
    assert say(ignore_eos=True, stop_token_ids=(plain[2],)) == ("stop", plain[:first])
    engine.check()


def test_a_stop_string_counts_from_the_least_length_on(start: Start) -> None:
    engine = start()
    wants = SamplingParams(max_tokens=9, temperature=0.0, logit_bias=((_id_of(engine, "a"), 100.0),))
    asked = GenerationRequest(text="Hello there", params=dataclasses.replace(wants, stop=("a",)))
    assert engine.submit(asked).result().text == ""
    longer = dataclasses.replace(asked, params=dataclasses.replace(wants, stop=("a",), min_tokens=4))
    result = engine.submit(longer).result()
    assert (result.text, len(result.token_ids), result.finish_reason) == ("aaa", 4, "stop")


def _id_of(engine: Engine, text: str) -> int:
    ids = engine.encoder.encode(engine.encoder.render_text(text))
    return int(np.asarray(ids)[-1])


@pytest.mark.parametrize("params", [{"logit_bias": ((1 << 20, 1.0),)}, {"stop_token_ids": (1 << 20,)}])
def test_ids_the_model_does_not_have_are_refused_by_name(start: Start, params: dict[str, Any]) -> None:
    engine = start()
    asked = GenerationRequest(text="Hello", params=SamplingParams(**params))
    with pytest.raises(BadRequest, match="token ids must lie in") as caught:
        engine.submit(asked).result()
    assert caught.value.param == next(iter(params))


def test_special_tokens_are_spelled_in_logprobs(loaded: LoadedModel) -> None:
    vocabulary = Rig(loaded, num_blocks=BLOCK_TOKENS).encoder.vocabulary
    specials = [token for token in range(vocabulary.size) if vocabulary.is_control_token(token)]
    assert any(vocabulary.token_bytes(token) and not vocabulary.shown(token) for token in specials)
