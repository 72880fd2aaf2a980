"""Snapshots of recurrent state: turns go on from them, on and off disk, and few are kept.

In float64, with blocks of 16 tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rekindle.engine.core.purge import HotPurge, wipe
from rekindle.engine.core.speculation import max_draft
from rekindle.store.commands import Purge
from tests.exactness.conftest import MakeRig
from tests.exactness.rig import BLOCK_TOKENS, Rig
from tests.exactness.test_paths import some_ids

KINDS = ("lfm2", "qwen3-next", "nemotron-h", "falcon-h1")
NEW = 5


def rows_of(rig: Rig) -> int:
    """How many snapshots are on disk."""
    assert rig.store is not None
    with rig.store.index.reading() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM block WHERE part = 1").fetchone()[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["hot", "warm"])
def test_what_extends_a_turn_computes_its_new_tokens_and_the_last_block(
    make_rig: MakeRig, tmp_path: Path, kind: str, place: str
) -> None:
    """Ten turns. On disk are the snapshots of the ends of the last prompt and reply, and no older ones."""
    rig = make_rig(kind, "fp64", "q4h", store_dir=tmp_path, max_chunk_tokens=64, num_blocks=120)
    plain = make_rig(kind, "fp64", "q4h")
    ids = some_ids(100)
    for turn in range(10):
        result = rig.generate(ids, NEW)
        assert result.token_ids == plain.generate(ids, NEW, "off").token_ids
        if turn:
            assert 33 <= result.report.computed_tokens <= 33 + BLOCK_TOKENS, "a token of the reply, and the new text"
            assert result.report.explanation is None
            tokens = result.report.hot_tokens if place == "hot" else result.report.warm_tokens
            assert tokens == len(ids) - result.report.computed_tokens
        ids = [*ids, *result.token_ids, *some_ids(32, seed=turn)]
        del rig.turns[:-1]  # all turns are those of one agent
        rig.save()
        assert 1 <= rows_of(rig) <= 2, "of prompt and reply"
        if place == "warm":
            rig = rig.reopened()
    rig.close()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 48, 49])
@pytest.mark.parametrize("kind", ["lfm2", "qwen3.5"])
def test_the_same_prompt_again_computes_the_tokens_after_its_last_block(
    make_rig: MakeRig, kind: str, num_tokens: int
) -> None:
    rig, ids = make_rig(kind, "fp64", "q4h"), some_ids(num_tokens)
    first, second = rig.generate(ids, NEW), rig.generate(ids, NEW)
    assert second.token_ids == first.token_ids
    assert second.report.reused_tokens == (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.report.explanation is None


def test_what_diverges_is_resumed_at_the_last_snapshot_and_says_so(make_rig: MakeRig) -> None:
    """The first prompt to part somewhere computes from the last snapshot before; then that place has one."""
    rig, common = make_rig("lfm2", "fp64", "q4h", max_chunk_tokens=512), some_ids(100)
    rig.generate([*common, *some_ids(150, seed=2)], NEW)
    second = rig.generate([*common, *some_ids(50, seed=3)], NEW).report
    assert second.reused_tokens == 0 and second.explanation is not None
    assert second.explanation.detail.endswith("(matched 100 tokens, resumed at 0)")
    third = rig.generate([*common, *some_ids(50, seed=4)], NEW)
    assert third.report.reused_tokens == 96 and third.report.explanation is None
    plain = make_rig("lfm2", "fp64", "q4h").generate([*common, *some_ids(50, seed=4)], NEW)
    assert third.token_ids == plain.token_ids


def test_duplicates_of_a_prompt_share_it_up_to_its_last_block(make_rig: MakeRig) -> None:
    rig = make_rig("qwen3.5", "fp64", "q4h")
    expected = make_rig("qwen3.5", "fp64", "q4h").generate(some_ids(90), NEW).token_ids
    ids = rig.request(some_ids(90), NEW).sequence.prompt_ids
    for _ in range(3):
        rig.request(ids, NEW)
    results = rig.finish(*rig.scheduler.waiting)
    assert [result.token_ids for result in results] == [expected] * 4
    assert sorted(result.report.reused_tokens for result in results) == [0, 80, 80, 80]


def test_many_requests_with_few_slots_give_their_own_answers(make_rig: MakeRig) -> None:
    """With slots for three or four of them, others wait or are preempted."""
    rig = make_rig("granite-4-h", "fp64", "q4h", window_slots=10, max_chunk_tokens=64)
    plain = make_rig("granite-4-h", "fp64", "q4h")
    prompts = [some_ids(70 + 10 * number, seed=number) for number in range(6)]
    requests = [rig.request(prompt, 40) for prompt in prompts]
    for prompt, result in zip(prompts, rig.finish(*requests), strict=True):
        assert result.token_ids == plain.generate(prompt, 40).token_ids


def test_a_preempted_reply_goes_on_from_its_last_full_block(make_rig: MakeRig) -> None:
    rig, plain = make_rig("qwen3.5", "fp64", "q4h"), make_rig("qwen3.5", "fp64", "q4h")
    request = rig.request(some_ids(70), 60)
    while request.sequence.num_generated < 37:
        rig.step()
    rig.core.admission.preempt(request)
    num_computed = 70 + 36
    rig.step()
    assert request.sequence.num_computed - 1 >= num_computed // BLOCK_TOKENS * BLOCK_TOKENS
    (result,) = rig.finish(request)
    assert result.token_ids == plain.generate(some_ids(70), 60).token_ids


def test_a_prompt_that_is_preempted_between_chunks_goes_on_where_it_was(make_rig: MakeRig) -> None:
    """Though others take the slots that it has passed."""
    rig = make_rig("lfm2", "fp64", "q4h", window_slots=8, max_chunk_tokens=64, num_blocks=160)
    request = rig.request(some_ids(400), NEW)
    while request.sequence.num_computed < 256:
        rig.step()
    rig.core.admission.preempt(request)
    request.cancelled.set()
    rig.step()
    for other in range(4):
        rig.generate(some_ids(150, seed=50 + other), NEW)
    again = rig.generate(some_ids(400), NEW)
    assert again.report.reused_tokens >= 256
    assert again.token_ids == make_rig("lfm2", "fp64", "q4h").generate(some_ids(400), NEW).token_ids


def test_a_purge_beside_a_running_reply_leaves_its_state(make_rig: MakeRig) -> None:
    rig, plain = make_rig("qwen3.5", "fp64", "q4h"), make_rig("qwen3.5", "fp64", "q4h")
    request = rig.request(some_ids(70), 30)
    while request.sequence.num_generated < 5:
        rig.step()
    live = request.sequence.table.blocks[-1]
    before = [tensor[rig.arena.row(1, live)].clone() for tensor in rig.arena.states(0)]
    assert any(tensor.any() for tensor in before)
    wipe(rig.core, HotPurge(Purge("default", "ada"), frozenset(), frozenset(), frozenset()))
    after = [tensor[rig.arena.row(1, live)] for tensor in rig.arena.states(0)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    (result,) = rig.finish(request)
    assert result.token_ids == plain.generate(some_ids(70), 30).token_ids


def test_chunks_end_where_blocks_do(make_rig: MakeRig) -> None:
    """However few rows fit, a prompt gets to the end of a block with every step."""
    rig = make_rig("qwen3.5", "fp64", "q4h", max_chunk_tokens=40)
    request = rig.request(some_ids(150), NEW)
    ends = []
    while not request.sequence.num_generated:
        rig.step()
        ends.append(request.sequence.num_computed)
    assert ends == [32, 64, 96, 128, 150]


def test_nothing_is_drafted_for_a_state_that_cannot_go_back() -> None:
    assert max_draft("auto", is_steady=True) > 0
    assert max_draft("auto", is_steady=True, has_states=True) == 0


def test_a_snapshot_that_left_memory_is_read_from_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig("lfm2", "fp64", "q4h", store_dir=tmp_path)
    result = rig.generate(some_ids(90), NEW)
    rig.save()
    (slots,) = rig.pool.windows
    for block in rig.pool.idle_blocks():
        slots.drop(block)
    ids = [*some_ids(90), *result.token_ids, *some_ids(20, seed=5)]
    again = rig.generate(ids, NEW)
    assert again.report.reused_tokens == 80
    assert again.token_ids == make_rig("lfm2", "fp64", "q4h").generate(ids, NEW).token_ids
    rig.close()


def test_a_hundred_conversations_stay_within_their_slots(make_rig: MakeRig, tmp_path: Path) -> None:
    """The least recently used snapshots leave memory; those on disk bring their conversations back."""
    rig = make_rig("lfm2", "fp64", "q4h", window_slots=20, num_blocks=800, store_dir=tmp_path)
    prompts = [some_ids(40, seed=number) for number in range(100)]
    replies = [rig.generate(prompt, NEW).token_ids for prompt in prompts]
    (slots,) = rig.pool.windows
    assert slots.num_kept <= 20
    rig.save()
    assert rows_of(rig) <= 200
    for prompt, reply in zip(prompts[:10], replies, strict=False):
        again = rig.generate(prompt, NEW)
        assert again.token_ids == reply and again.report.reused_tokens == 32
    rig.close()
