"""Invariant 1: the same ids give the same KV, bit for bit, and the same answer, whatever path they took.

In float64, where no rounding can hide behind a tolerance: block bytes and greedy tokens must be identical.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rekindle.engine.request import State
from tests.engine.quoting import quoting, spoilt
from tests.exactness.conftest import KINDS, MakeRig
from tests.exactness.rig import BLOCK_TOKENS, Rig
from tests.exactness.tiers import import_all, tier_of

# Every architecture in the format that is served; others with and without windows, as no format knows more of a layer.
OTHERS = [("llama", "native"), ("gemma3", "native"), ("llama", "q8h/q4h"), ("gemma3", "q8h")]
EVERY = pytest.mark.parametrize(("kind", "kv"), [*((kind, "q4h") for kind in KINDS), *OTHERS])
NEW = 6


def some_ids(count: int, seed: int = 1) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(4, 380) for _ in range(count)]


def cold(make_rig: MakeRig, kind: str, kv: str, ids: list[int], new: int = NEW) -> tuple[tuple[int, ...], list[bytes]]:
    """Answer and bytes of one cold run in one chunk, on memory of its own."""
    rig = make_rig(kind, "fp64", kv)
    answer = rig.generate(ids, new).token_ids
    return answer, rig.stored([*ids, *answer[:-1]])


def same(rig: Rig, ids: list[int], answer: tuple[int, ...], expected: tuple[tuple[int, ...], list[bytes]]) -> None:
    assert answer == expected[0]
    assert rig.stored([*ids, *answer[:-1]]) == expected[1]


@EVERY
def test_prefill_in_chunks_equals_one_piece(make_rig: MakeRig, kind: str, kv: str) -> None:
    ids = some_ids(83)
    expected = cold(make_rig, kind, kv, ids)
    for largest in (16, 32, 48):
        rig = make_rig(kind, "fp64", kv, max_chunk_tokens=largest)
        same(rig, ids, rig.generate(ids, NEW).token_ids, expected)


@EVERY
def test_odd_pieces_and_single_tokens_give_the_same_bytes_and_logits(make_rig: MakeRig, kind: str, kv: str) -> None:
    ids = some_ids(61)
    rig = make_rig(kind, "fp64", kv)
    logits, blocks = rig.compute(ids, [61])
    for pieces in ([1] * 61, [7, 1, 13, 2, 3, 35], [60, 1], [1, 60], [31, 30]):
        same_logits, same_blocks = rig.compute(ids, pieces)
        np.testing.assert_allclose(same_logits, logits, rtol=0, atol=1e-11)
        differing = [index for index, (a, b) in enumerate(zip(same_blocks, blocks, strict=True)) if a != b]
        assert not differing, f"pieces {pieces[:6]}: blocks {differing} have other bytes than one piece"


def every_depth(kind: str, kv: str, length: int) -> Sequence[int]:
    """All depths at which a prompt may leave another for one kind, those around block ends for the rest."""
    if (kind, kv) == ("gemma3", "q4h"):
        return range(1, length)
    return (1, 15, 16, 17, 31, 33, 47, 51)


@EVERY
def test_extend_exact_and_every_divergence(make_rig: MakeRig, kind: str, kv: str) -> None:
    ids = some_ids(52)
    rig = make_rig(kind, "fp64", kv, num_blocks=256)
    first = rig.generate(ids, NEW)
    same(rig, ids, first.token_ids, cold(make_rig, kind, kv, ids))

    again = rig.generate(ids, NEW)
    assert (again.report.reused_tokens, again.report.computed_tokens) == (51, 1)
    assert again.token_ids == first.token_ids

    longer = [*ids, *first.token_ids, *some_ids(9, seed=2)]
    extended = rig.generate(longer, NEW)
    assert extended.report.reused_tokens == len(ids) + NEW - 1
    same(rig, longer, extended.token_ids, cold(make_rig, kind, kv, longer))

    for depth in every_depth(kind, kv, len(ids)):
        other = [*ids[:depth], *some_ids(20, seed=depth + 100)]
        diverged = rig.generate(other, NEW)
        assert diverged.report.reused_tokens == depth
        same(rig, other, diverged.token_ids, cold(make_rig, kind, kv, other))
    same(rig, ids, first.token_ids, cold(make_rig, kind, kv, ids))  # and nobody wrote into the first one's blocks


@EVERY
def test_packed_with_others(make_rig: MakeRig, kind: str, kv: str) -> None:
    prompts = [some_ids(count, seed=count) for count in (5, 37, 64, 18, 1)]
    rig = make_rig(kind, "fp64", kv, max_chunk_tokens=32)
    requests = []
    for prompt in prompts:
        requests.append(rig.request(prompt, NEW))
        rig.step()
    for prompt, result in zip(prompts, rig.finish(*requests), strict=True):
        same(rig, prompt, result.token_ids, cold(make_rig, kind, kv, prompt))


@EVERY
def test_with_drafts_right_and_wrong(make_rig: MakeRig, kind: str, kv: str) -> None:
    prompts = [some_ids(count, seed=count) for count in (37, 18, 1)]
    expected = [cold(make_rig, kind, kv, prompt, 30) for prompt in prompts]
    rig = make_rig(kind, "fp64", kv, max_draft=7)
    requests = [
        quoting(rig, prompt, 30, [*prompt, *spoilt(answer)])
        for prompt, (answer, _) in zip(prompts, expected, strict=True)
    ]
    for prompt, result, alone in zip(prompts, rig.finish(*requests), expected, strict=True):
        same(rig, prompt, result.token_ids, alone)
    assert rig.core.speculation.num_drafted > rig.core.speculation.num_accepted > 30


@EVERY
def test_preempted_and_computed_again(make_rig: MakeRig, kind: str, kv: str) -> None:
    prompts = [some_ids(40, seed=7), some_ids(44, seed=8)]
    rig = make_rig(kind, "fp64", kv, num_blocks=8)  # 4 each to go on for a block, 5 to finish
    requests = [rig.request(prompt, 28) for prompt in prompts]
    for prompt, request in zip(prompts, requests, strict=True):  # the older one is done first
        result = rig.finish(request)[0]
        same(rig, prompt, result.token_ids, cold(make_rig, kind, kv, prompt, 28))
    assert [request.sequence.num_preemptions > 0 for request in requests] == [False, True]


@EVERY
def test_warm_after_reopening(make_rig: MakeRig, tmp_path: Path, kind: str, kv: str) -> None:
    ids = some_ids(57)
    rig = make_rig(kind, "fp64", kv, store_dir=tmp_path)
    first = rig.generate(ids, NEW)
    reopened = rig.reopened()
    try:
        longer = [*ids, *first.token_ids, *some_ids(5, seed=3)]
        result = reopened.generate(longer, NEW)
        stored = len(ids) + NEW - 1
        assert (result.report.warm_tokens, result.report.hot_tokens) == (stored, 0)
        same(reopened, longer, result.token_ids, cold(make_rig, kind, kv, longer))
    finally:
        reopened.close()


@EVERY
def test_imported_from_an_object_tier(make_rig: MakeRig, tmp_path: Path, kind: str, kv: str) -> None:
    ids = some_ids(57)
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one = make_rig(kind, "fp64", kv, store_dir=tmp_path / "one")
    (tmp_path / "other" / "secret").write_bytes((tmp_path / "one" / "secret").read_bytes())
    other = make_rig(kind, "fp64", kv, store_dir=tmp_path / "other")
    first = one.generate(ids, NEW)
    one.save()
    with tier_of(one, tmp_path / "tier") as exporting, tier_of(other, tmp_path / "tier") as importing:
        exporting.exports.put("default", "a0", 0)
        assert exporting.exports.flush(30.0)
        assert import_all(other, importing, "a0") == 4
    longer = [*ids, *first.token_ids, *some_ids(5, seed=3)]
    result = other.generate(longer, NEW)
    assert (result.report.warm_tokens, result.report.hot_tokens) == (len(ids) + NEW - 1, 0)
    same(other, longer, result.token_ids, cold(make_rig, kind, kv, longer))


@EVERY
def test_packed_with_others_while_some_come_from_disk(make_rig: MakeRig, tmp_path: Path, kind: str, kv: str) -> None:
    warm = [some_ids(count, seed=count) for count in (57, 32, 20)]
    first = make_rig(kind, "fp64", kv, store_dir=tmp_path, max_chunk_tokens=32)
    first.finish(*[first.request(prompt, 1) for prompt in warm])
    rig = first.reopened()
    try:
        cold_prompts = [some_ids(count, seed=count) for count in (70, 9)]
        prompts = [cold_prompts[0], *[[*prompt, *some_ids(7, seed=5)] for prompt in warm], cold_prompts[1]]
        requests = [rig.request(prompts[0], NEW)]
        rig.step()
        requests += [rig.request(prompt, NEW) for prompt in prompts[1:]]
        rig.step()
        states = [request.state for request in requests]
        assert states == [State.RUNNING, *[State.LOADING] * 3, State.RUNNING], "cold ones run while others load"
        results = rig.finish(*requests)
        assert [result.report.warm_tokens for result in results] == [0, 57, 32, 20, 0]
        for prompt, result in zip(prompts, results, strict=True):
            same(rig, prompt, result.token_ids, cold(make_rig, kind, kv, prompt))
    finally:
        rig.close()


@EVERY
def test_forks_share_blocks_and_write_their_own(make_rig: MakeRig, kind: str, kv: str) -> None:
    ids = some_ids(40)
    rig = make_rig(kind, "fp64", kv)
    rig.generate(ids, 1)
    tails = [some_ids(11, seed=seed) for seed in (21, 22, 23)]
    requests = [rig.request([*ids, *tail], NEW) for tail in tails]
    for tail, result in zip(tails, rig.finish(*requests), strict=True):
        assert result.report.reused_tokens == len(ids)
        same(rig, [*ids, *tail], result.token_ids, cold(make_rig, kind, kv, [*ids, *tail]))


@EVERY
def test_equal_prefixes_are_computed_once(make_rig: MakeRig, kind: str, kv: str) -> None:
    shared = some_ids(48)
    prompts = [[*shared, *some_ids(7, seed=seed)] for seed in (31, 32, 33)]
    rig = make_rig(kind, "fp64", kv, max_chunk_tokens=16)
    results = rig.finish(*[rig.request(prompt, NEW) for prompt in prompts])
    assert [result.report.reused_tokens for result in results] == [0, 48, 48]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == cold(make_rig, kind, kv, prompt)[0]


@EVERY
def test_reuse_off_neither_reads_nor_writes(make_rig: MakeRig, kind: str, kv: str) -> None:
    ids = some_ids(50)
    rig = make_rig(kind, "fp64", kv)
    first = rig.generate(ids, NEW, reuse="off")
    assert rig.pool.num_cached == 0
    kept = rig.generate(ids, NEW)
    off = rig.generate(ids, NEW, reuse="off")
    assert kept.report.reused_tokens == off.report.reused_tokens == 0
    assert first.token_ids == kept.token_ids == off.token_ids


@EVERY
def test_absorbed_in_pieces_while_others_speak(make_rig: MakeRig, kind: str, kv: str) -> None:
    """What a listener took in word by word, beside the decodes of others, is what its turn would have computed."""
    heard, speeches = some_ids(75), [some_ids(count, seed=count) for count in (20, 33)]
    rig = make_rig(kind, "fp64", kv, max_chunk_tokens=32)
    speaking = [rig.request(speech, 8) for speech in speeches]
    rig.finish(rig.task(heard[:9], "absorb"))
    ends = (9, 31, 32, 48, 70)
    for before, end in pairwise(ends):
        (taken,) = rig.finish(rig.task(heard[:end], "absorb"))
        assert taken.report.computed_tokens == end - before
    assert all(request.state is State.RUNNING for request in speaking)
    other = [*heard[:50], *some_ids(8, seed=3)]  # the words went on otherwise
    prompts = (heard, other)
    answers = rig.finish(*[rig.request(prompt, NEW) for prompt in prompts])
    for prompt, answer, reused in zip(prompts, answers, (70, 50), strict=True):
        assert answer.report.reused_tokens == reused
        assert answer.token_ids == rig.generate(prompt, NEW, reuse="off").token_ids
    same(rig, heard, answers[0].token_ids, cold(make_rig, kind, kv, heard))
    for speech, result in zip(speeches, rig.finish(*speaking), strict=True):
        assert result.token_ids == rig.generate(speech, 8, reuse="off").token_ids


def test_a_cancelled_prefill_goes_on_where_it_stopped(make_rig: MakeRig) -> None:
    ids = some_ids(90)
    rig = make_rig("llama", "fp64", "q4h", max_chunk_tokens=16)
    request = rig.request(ids, NEW)
    for _ in range(3):
        rig.step()
    request.cancelled.set()
    assert rig.finish(request)[0].finish_reason == "cancelled"
    assert request.state is State.FINISHED and rig.pool.num_held == 0
    again = rig.generate(ids, NEW)
    assert again.report.reused_tokens == 3 * BLOCK_TOKENS
    same(rig, ids, again.token_ids, cold(make_rig, "llama", "q4h", ids))
