"""Replies, deltas and stored bytes do not depend on drafts, right or wrong; and drafts are computed where they pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.engine.core.costs import StepCosts
from rekindle.engine.core.scheduler import Chunk
from rekindle.engine.core.speculation import MAX_DRAFT, Speculation, max_draft
from rekindle.engine.drafts import find_draft
from rekindle.engine.request import Request, State
from rekindle.engine.types import GenerationRequest
from rekindle.model.loaded import LoadedModel
from rekindle.model.params import SamplingParams
from tests.engine.conftest import Start
from tests.engine.fixed_costs import FixedCosts
from tests.engine.quoting import quoting, spoilt
from tests.engine.test_replies import RULES
from tests.engine.test_scheduler import MakeRequest, maker
from tests.exactness.rig import BLOCK_TOKENS, Rig, load
from tests.exactness.test_paths import some_ids
from tests.tiny_models import tiny_model_dir, write_tokenizer

NEW = 50
PROMPT = some_ids(30)
FREE = FixedCosts(base_s=0.01, row_s=0.0, row_context_s=0.0)
GREEDY: dict[str, Any] = {}
SEEDED = {"temperature": 1.2, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tiny_model_dir("llama", "fp32", tmp_path_factory.mktemp("speculation")), "fp32", "q4h")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeRequest:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return maker(directory)


def single(loaded: LoadedModel, new_tokens: int = NEW, *, stop: str = "", **params: Any) -> tuple[Rig, Request]:
    """The prompt's reply without drafts."""
    rig = Rig(loaded)
    return rig, said(rig, rig.unqueued(PROMPT, new_tokens, **params), stop)


def said(rig: Rig, request: Request, stop: str) -> Request:
    if stop:
        request.reply.stream.watch_for((stop,))
    rig.core.add(request)
    rig.finish(request)
    return request


def drafted(
    loaded: LoadedModel, text: Sequence[int], new_tokens: int = NEW, *, stop: str = "", **params: Any
) -> tuple[Rig, Request]:
    """The same with drafts from this text."""
    rig = Rig(loaded, max_draft=7)
    request = rig.unqueued(PROMPT, new_tokens, **params)
    request.sequence.texts = (np.array([*PROMPT, *text], dtype=np.uint32),)
    return rig, said(rig, request, stop)


def same(one: tuple[Rig, Request], other: tuple[Rig, Request]) -> None:
    """Equal tokens, deltas, turns and bytes."""
    (rig, request), (plain, expected) = one, other
    result = request.reply.generation.result()
    wanted = expected.reply.generation.result()
    assert (result.token_ids, result.text, result.finish_reason) == (
        wanted.token_ids,
        wanted.text,
        wanted.finish_reason,
    )
    assert result.logprobs == wanted.logprobs
    assert request.reply.texts == expected.reply.texts, "in other pieces"
    (turn,), (plain_turn,) = rig.turns, plain.turns
    assert turn.ids.tolist() == plain_turn.ids.tolist() and turn.hashes == plain_turn.hashes
    assert turn.head == plain_turn.head
    assert rig.stored(turn.ids) == plain.stored(turn.ids)
    assert rig.pool.num_cached == plain.pool.num_cached, "blocks of drafts were kept"
    assert rig.pool.num_held == 0


@pytest.mark.parametrize("params", [GREEDY, SEEDED, {**RULES, "logprobs": 3}], ids=["greedy", "seeded", "penalties"])
def test_a_reply_is_the_same_with_right_and_with_wrong_drafts(loaded: LoadedModel, params: dict[str, Any]) -> None:
    plain = single(loaded, **params)
    ids = plain[1].sequence.ids[len(PROMPT) :].tolist()
    assert len(ids) == NEW
    for text in (ids, spoilt(ids), spoilt(ids, every=3)):
        rig, request = drafted(loaded, text, **params)
        same((rig, request), plain)
        counts = rig.core.speculation
        assert rig.core.num_steps == plain[0].core.num_steps - counts.num_accepted < NEW
        assert rig.core.num_rows == plain[0].core.num_rows + counts.num_drafted - counts.num_accepted
        assert (counts.num_drafted == counts.num_accepted) == (text == ids)


@pytest.mark.parametrize("new_tokens", range(1, 20))
def test_it_ends_with_its_last_token_and_computes_none_after_it(loaded: LoadedModel, new_tokens: int) -> None:
    plain = single(loaded, NEW)
    text = plain[1].sequence.ids[len(PROMPT) :].tolist()
    rig, request = drafted(loaded, text, new_tokens)
    same((rig, request), single(loaded, new_tokens))
    assert rig.core.num_rows == len(PROMPT) + new_tokens - 1


@pytest.mark.parametrize("index", [1, 9, 14, 33])
def test_it_ends_at_a_stop_token_inside_a_draft(loaded: LoadedModel, index: int) -> None:
    ids = single(loaded, **SEEDED)[1].sequence.ids[len(PROMPT) :].tolist()
    params = {**SEEDED, "stop_token_ids": (ids[index],)}
    one = drafted(loaded, ids, **params)
    same(one, single(loaded, **params))
    assert one[1].sequence.num_generated == ids.index(ids[index])


@pytest.mark.parametrize("start", [4, 20, 41])
def test_it_ends_at_a_stop_string_inside_a_draft(loaded: LoadedModel, start: int) -> None:
    plain = single(loaded, **SEEDED)[1]
    ids, text = plain.sequence.ids[len(PROMPT) :].tolist(), plain.reply.generation.result().text
    stop = text[start : start + 3]
    one = drafted(loaded, ids, stop=stop, **SEEDED)
    same(one, single(loaded, stop=stop, **SEEDED))
    assert one[1].sequence.num_generated < NEW


def test_choices_that_share_a_tail_each_write_their_own(loaded: LoadedModel) -> None:
    prompt = np.array(PROMPT, dtype=np.uint32)
    wanted, texts = [], []
    for seed in range(3):
        plain = Rig(loaded)
        wanted.append(plain.finish(plain.request(prompt, NEW, temperature=1.2, seed=seed))[0])
        texts.append([*PROMPT, *spoilt(wanted[-1].token_ids)])
    rig = Rig(loaded, max_draft=7)
    requests = [quoting(rig, prompt, NEW, text, temperature=1.2, seed=seed) for seed, text in enumerate(texts)]
    results = rig.finish(*requests)
    assert [result.report.reused_tokens for result in results] == [0, 29, 29]
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]
    for result, expected in zip(results, wanted, strict=True):
        ids = [*PROMPT, *result.token_ids[:-1]]
        alone = Rig(loaded)
        alone.generate(ids, 1)
        assert rig.stored(ids) == alone.stored(ids) and result.text == expected.text
    assert rig.core.speculation.num_accepted > 0


def test_alongside_others_that_prefill_and_decode_and_are_preempted(loaded: LoadedModel) -> None:
    prompts = [some_ids(20, seed=seed) for seed in range(4)]
    wanted = []
    for prompt in prompts:
        plain = Rig(loaded)
        wanted.append(plain.generate(prompt, 60).token_ids)
    rig = Rig(loaded, num_blocks=8, max_chunk_tokens=32, max_draft=7)
    requests = [quoting(rig, prompt, 60, spoilt(ids)) for prompt, ids in zip(prompts, wanted, strict=True)]
    assert [result.token_ids for result in rig.finish(*requests)] == wanted
    assert rig.core.num_preemptions > 0 and rig.core.speculation.num_accepted > 0


def test_a_cancelled_reply_leaves_what_was_told_and_is_resumed(loaded: LoadedModel) -> None:
    ids = single(loaded)[1].sequence.ids.tolist()
    rig = Rig(loaded, max_draft=7)
    request = quoting(rig, PROMPT, NEW, spoilt(ids, every=11))
    while request.sequence.num_generated < 20:
        rig.step()
    request.cancelled.set()
    result = rig.finish(request)[0]
    assert result.finish_reason == "cancelled" and list(result.token_ids) == ids[30 : 30 + len(result.token_ids)]
    known = [*PROMPT, *result.token_ids]
    assert rig.turns[0].ids.tolist() == known[:-1]
    again = rig.generate(known, 5)
    assert again.report.reused_tokens == len(known) - 1
    assert [*known, *again.token_ids] == ids[: len(known) + 5]
    whole = Rig(loaded)
    whole.generate(known, 1)
    assert rig.stored(known) == whole.stored(known)


def test_what_was_saved_is_what_a_run_without_drafts_saves(loaded: LoadedModel, tmp_path: Path) -> None:
    ids = single(loaded)[1].sequence.ids.tolist()
    rigs = [Rig(loaded, store_dir=tmp_path / name, max_draft=most) for name, most in (("plain", 0), ("drafts", 7))]
    for rig in rigs:
        rig.finish(quoting(rig, PROMPT, NEW, spoilt(ids)))
    assert rigs[1].core.speculation.num_accepted > 0
    reopened = [rig.reopened() for rig in rigs]
    counts = [rig.store.stats().num_blocks for rig in reopened if rig.store is not None]
    assert counts == [5, 5], "79 tokens in blocks of 16"
    results = [rig.generate([*ids[:-1], 5], 4) for rig in reopened]
    assert [result.report.warm_tokens for result in results] == [len(ids) - 1] * 2
    assert results[0].token_ids == results[1].token_ids
    assert reopened[0].stored(ids[:-1]) == reopened[1].stored(ids[:-1])
    for rig in reopened:
        rig.close()


@pytest.mark.parametrize("kv", ["native", "q4h"])
def test_a_drafted_token_that_breaks_the_model_ends_no_reply(tmp_path: Path, kv: str) -> None:
    broken = load(tiny_model_dir("llama", "fp32", tmp_path), "fp32", kv)
    prompt, poison = some_ids(30), 383
    plain = Rig(broken)
    wanted = plain.finish(plain.request(prompt, 20, logit_bias=((poison, -100.0),)))[0]
    assert poison not in (*prompt, *wanted.token_ids)
    with torch.no_grad():
        broken.model.get_input_embeddings().weight[poison] = torch.inf
    rig = Rig(broken, max_draft=7)
    text = [*prompt, *wanted.token_ids]
    text[35], text[43] = poison, poison
    request = quoting(rig, prompt, 20, text, logit_bias=((poison, -100.0),))
    beside = rig.request(some_ids(9, seed=4), 20)
    results = rig.finish(request, beside)
    assert results[0].token_ids == wanted.token_ids and len(results[1].token_ids) == 20
    assert rig.core.speculation.num_accepted > 0
    known = [*prompt, *wanted.token_ids[:-1]]
    assert rig.stored(known) == plain.stored(known)


def decoding(make: MakeRequest, text: Sequence[int], *, known: str = "") -> Request:
    """A running request that decodes after this text; its drafts are `known` to be right, or wrong."""
    request = make(len(text), state=State.RUNNING, num_computed=len(text) - 1, max_new_tokens=100)
    request.sequence.token_ids[: len(text)] = text
    for _ in range(60 if known else 0):
        request.sequence.acceptance.observe(len(text), right=known == "right")
    return request


def counts(costs: StepCosts, *requests: Request, most: int = 7, max_step_s: float = 1.0) -> list[int]:
    chunks = [Chunk(each.sequence, each.sequence.num_computed, 1, each) for each in requests]
    proposed = Speculation(costs, max_tokens=most, max_step_s=max_step_s).propose(chunks)
    assert [replace(chunk, draft=()) for chunk in proposed] == chunks
    return [len(chunk.draft) for chunk in proposed]


REPEATS, NEVER = [1, 2, 3, 4] * 3, [*range(1, 13)]


def test_as_many_rows_as_pay(make: MakeRequest) -> None:
    sure, half, wrong = (decoding(make, REPEATS, known=known) for known in ("right", "", "wrong"))
    assert counts(FREE, sure) == counts(FREE, half) == [7], "what costs nothing always pays"
    dear = FixedCosts(base_s=0.01, row_s=0.004, row_context_s=0.0)  # a row more lengthens a step by 29 %
    assert counts(dear, sure) == [7]
    assert counts(dear, half) == [1]
    assert counts(dear, wrong) == [0]
    assert counts(dear, decoding(make, NEVER, known="right")) == [0]
    assert counts(dear, wrong, sure, half) == [0, 7, 0], "others wait for the rows, too"
    assert counts(FREE, sure, most=0) == [0]


def test_no_step_becomes_longer_than_a_stream_may_pause(make: MakeRequest) -> None:
    sure = decoding(make, REPEATS, known="right")
    costs = FixedCosts(base_s=0.01, row_s=0.01, row_context_s=0.0)
    assert counts(costs, sure) == [7]
    assert counts(costs, sure, max_step_s=0.055) == [3]
    assert counts(costs, sure, max_step_s=0.005) == [0]


def test_a_step_that_prefills_has_no_drafts_and_learns_from_what_it_samples(make: MakeRequest) -> None:
    sure, prompt = decoding(make, REPEATS, known="right"), make(90, state=State.RUNNING)
    speculation = Speculation(FREE, max_tokens=7, max_step_s=1.0)
    chunks = [Chunk(sure.sequence, len(REPEATS) - 1, 1, sure), Chunk(prompt.sequence, 0, 64, prompt)]
    assert speculation.propose(chunks) == chunks
    guess = find_draft(sure.sequence.ids, most=7)
    before = sure.sequence.acceptance.chances(guess)[0]
    sure.sequence.append(9)
    speculation.judge(chunks[0])
    assert sure.sequence.acceptance.chances(guess)[0] < before
    assert (speculation.num_drafted, speculation.num_accepted) == (0, 0)


def test_prefills_run_as_soon_as_without_drafts(loaded: LoadedModel) -> None:
    ids = single(loaded)[1].sequence.ids.tolist()
    steps = []
    for most in (0, 7):
        rig = Rig(loaded, max_chunk_tokens=32, max_draft=most)
        quoting(rig, PROMPT, NEW, ids)
        rig.step()
        rig.step()
        before, prompt = rig.core.num_steps, rig.request(some_ids(90, seed=3), 1)
        rig.finish(prompt)
        steps.append(rig.core.num_steps - before)
    assert steps[0] == steps[1]


def test_nothing_is_drafted_where_bits_depend_on_the_rows_of_a_step() -> None:
    assert max_draft("auto", is_steady=True) == MAX_DRAFT > 0
    assert max_draft("auto", is_steady=False) == max_draft("off", is_steady=True) == 0


def test_an_engine_says_how_many_were_drafted_and_answers_the_same(start: Start) -> None:
    given = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(text="one two three " * 8 + text, params=given, agent=text) for text in ("a", "b")]
    answers = []
    for setting in ("off", "auto"):
        engine = start(speculate=setting, reuse="off")
        answers.append([each.result().token_ids for each in [engine.submit(request) for request in asked]])
        stats = engine.stats()
        assert 0 <= stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.num_draft_tokens == 0 or setting == "auto"
        engine.check()
    assert answers[0] == answers[1]


def test_rows_after_a_wrong_token_are_never_in_a_block_that_is_found(loaded: LoadedModel) -> None:
    """Wrong drafts that cross the end of a block, one after the other."""
    ids = single(loaded)[1].sequence.ids.tolist()
    rig = Rig(loaded, max_draft=BLOCK_TOKENS)
    text = [token for index in range(len(PROMPT), len(ids)) for token in (*ids[index - 2 : index], *[7] * 20)]
    request = quoting(rig, PROMPT, NEW, text)
    wrong = [*PROMPT, *[7] * 34]
    while request.state is not State.FINISHED:
        rig.step()
        known = request.sequence.num_tokens
        assert rig.num_hot([*request.sequence.ids.tolist(), *wrong]) <= known
    assert request.sequence.ids.tolist() == ids
    assert rig.core.speculation.num_drafted > 10 * rig.core.speculation.num_accepted
