"""One forward step: which rows become logits, what is written, and whose numbers were not finite."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from rekindle.model.adapter import StepCache
from rekindle.model.batch import ForwardBatch, SequenceStep
from rekindle.model.geometry import ProbeStep
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from rekindle.model.recurrent import ObservedStates
from rekindle.model.runner import ModelRunner
from rekindle.model.sampler import Draw, SamplerState
from tests.model.helpers import Bench, in_memory, random_ids
from tests.tiny_models import tiny_model

GREEDY = SamplerState(SamplingParams(temperature=0.0), 0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return in_memory(tiny_model("llama", torch.float64))


def step(ids: list[int], start: int = 0, logits: Literal["none", "last", "all"] = "last") -> SequenceStep:
    return SequenceStep(np.array(ids, dtype=np.uint32), start, (0,), start, logits)


@pytest.mark.parametrize("count", range(1, 10))
def test_rows_and_logit_rows_come_in_fours(count: int) -> None:
    batch = ForwardBatch.build([step([7] * count, 3, "all"), step([9], 5)])
    assert batch.num_rows % 4 == 0 and 0 <= batch.num_rows - count - 1 < 4
    assert len(batch.logit_rows) % 4 == 0 and batch.num_logits == count + 1
    assert batch.logit_rows[: count + 1].tolist() == [*range(count), count]
    assert batch.position_ids[: count + 1].tolist() == [*range(3, 3 + count), 5]
    assert batch.input_ids.tolist() == [7] * count + [9] + [0] * (batch.num_rows - count - 1)
    alone = ForwardBatch.build([step([7] * count, 3, "all")], lambda rows: rows)
    assert (alone.num_rows, len(alone.logit_rows), alone.num_logits) == (count, count, count)


def test_no_logits_may_be_asked_for(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    ids = random_ids(20)
    nothing = bench.runner.forward([bench.step("a", ids[:13], "none")])
    assert nothing.shape == (0, loaded.spec.vocab_size)
    last = bench.runner.forward([bench.step("a", ids[13:], "last")])
    whole = Bench(loaded).forward(("a", ids))[0]
    assert torch.equal(last[0], whole[-1])


def test_seconds_are_those_of_launching_and_of_waiting_once(loaded: LoadedModel) -> None:
    bench, seconds = Bench(loaded), itertools.count()
    runner = ModelRunner(loaded, bench.arena, clock=lambda: float(next(seconds)))
    launched = runner.launch([bench.step("a", random_ids(5), "last")])
    assert runner.model_s == 1.0
    launched.wait()
    launched.wait()
    assert runner.model_s == 2.0


def test_what_is_drawn_before_a_step_is_waited_for_comes_with_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, states = Bench(loaded), [SamplerState.create(SamplingParams(top_k=9, logprobs=2), lambda: 1), GREEDY]
    launched = bench.runner.launch([bench.step("a", random_ids(5), "all")])
    draws = [Draw(row, state) for row in range(5) for state in states]
    first = launched.draw(draws)
    monkeypatch.setattr("rekindle.model.runner.Readback", lambda tensors: pytest.fail("waits on its own"))
    assert launched.wait() == frozenset()
    later = launched.draw(draws)
    tokens = [(drawn.token, drawn.scores is None) for drawn in later.results() if drawn is not None]
    assert [(drawn.token, drawn.scores is None) for drawn in first.results() if drawn is not None] == tokens
    assert [token for token, _ in tokens[1::2]] == launched.logits.argmax(dim=1).tolist() and len(tokens) == 10


def test_a_step_below_num_stored_writes_nothing(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    ids = random_ids(21)
    logits = bench.forward(("a", ids))[0]
    before = bench.stored_bytes("a")
    again = SequenceStep(np.array(ids[-1:], dtype=np.uint32), 20, bench.tables["a"], 21, "last")
    assert torch.equal(bench.runner.forward([again])[0], logits[-1])
    assert bench.stored_bytes("a") == before
    wrong = replace(again, token_ids=np.array([5], dtype=np.uint32))
    bench.runner.forward([wrong])
    assert bench.stored_bytes("a") == before


def test_no_other_block_is_touched(loaded: LoadedModel) -> None:
    bench = Bench(loaded)
    bench.forward(("a", random_ids(37)), ("b", random_ids(5, seed=2)))
    before = bench.stored_bytes("b")
    bench.forward(("a", random_ids(30, seed=3)))
    bench.forward(("c", random_ids(3, seed=4)))
    assert bench.stored_bytes("b") == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kv", ["q4h", "fp32"])
def test_only_the_sequence_with_numbers_that_are_not_finite_fails(bad: float, kv: str) -> None:
    model = tiny_model("llama", torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[300] = bad
    bench = Bench(in_memory(model, kv=kv))
    alone = Bench(in_memory(tiny_model("llama", torch.float32), kv=kv))
    good, other = random_ids(9, high=300), random_ids(6, seed=2, high=300)
    logits = bench.forward(("a", good), ("bad", [5, 300, 7]), ("b", other))
    assert bench.failed == {1}
    assert torch.equal(logits[2], alone.forward(("b", other))[0])
    bench.forward(("a", [8]), ("b", [9, 10]))
    assert bench.failed == set()


def test_only_k_that_is_not_finite_is_seen() -> None:
    """Infinite K can hide behind weights of zero; it must not reach the cache unseen."""
    model = tiny_model("llama", torch.float32)
    model.model.layers[2].self_attn.k_proj.register_forward_hook(
        lambda module, args, output: output.index_fill(1, torch.arange(4, output.shape[1]), float("-inf"))
    )
    bench = Bench(in_memory(model, kv="q4h"))
    launched = bench.runner.launch([bench.step("a", [5, 6], "none"), bench.step("b", [7, 8, 9, 10], "none")])
    assert launched.wait() == {1}


def test_shared_kv_layers_find_the_layer_that_wrote() -> None:
    cache = StepCache(ProbeStep(ObservedStates([])))
    k, v = torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16)
    assert cache.update(k, v, 5)[0] is k
    assert cache.kv_layer(k, v) == 5
    assert cache.kv_layer(k, k) is None and cache.kv_layer(k.clone(), v) is None
