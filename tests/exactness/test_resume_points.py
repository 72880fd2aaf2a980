"""Invariant 1 where windows end: a sequence resumed at any point gives the answers of one that reuses nothing.

In float64. Windows have 24 tokens and blocks 16, so a resume point needs the parts of at most four blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from rekindle.engine.request import State
from tests.exactness.conftest import MakeRig
from tests.exactness.rig import BLOCK_TOKENS, Rig
from tests.exactness.test_paths import some_ids
from tests.tiny_models import WINDOW

KINDS = ("gemma3", "gpt-oss", "gemma4")
COVER = -(-WINDOW // BLOCK_TOKENS) + 2  # blocks of a resume point
NEW = 5


def slots_of(rig: Rig) -> int:
    """How many window parts are held or kept in memory."""
    (slots,) = rig.pool.windows
    return slots.num_kept + slots.num_slots - 1 - slots.num_available


def rows_of(rig: Rig) -> int:
    """How many window parts are on disk."""
    assert rig.store is not None
    with rig.store.index.reading() as connection:
        return int(connection.execute("SELECT COUNT(*) FROM block WHERE part = 1").fetchone()[0])


@dataclass
class Stored:
    """A finished conversation: its ids, and the prompt's length, both resume points."""

    ids: list[int]
    num_prompt: int


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_turns_gives_the_answers_of_no_reuse(
    make_rig: MakeRig, tmp_path: Path, kind: str, seed: int
) -> None:
    """Extending, forking, diverging, sending again, concurrently and after a restart, with few slots for windows."""
    chooser = random.Random(seed)
    rig = make_rig(kind, "fp64", "q4h", num_blocks=120, window_slots=22, max_chunk_tokens=64, store_dir=tmp_path)
    plain = make_rig(kind, "fp64", "q4h", num_blocks=64)
    done: list[Stored] = []
    for turn in range(14):
        if turn in (5, 10):
            rig = rig.reopened()
        prompts = [prompt_of(chooser, done, turn) for _ in range(chooser.choice((1, 1, 2)))]
        results = rig.finish(*(rig.request(prompt, NEW) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == plain.generate(prompt, NEW, "off").token_ids, (turn, len(prompt))
            done.append(Stored([*prompt, *result.token_ids[:-1]], len(prompt)))
    rig.save()
    assert rig.store is not None
    rig.store.check("records")
    rig.close()


def prompt_of(chooser: random.Random, done: list[Stored], turn: int) -> list[int]:
    """A prompt that is new, or continues, diverges from or repeats a finished one."""
    fresh = some_ids(chooser.randrange(1, 60), seed=chooser.randrange(1 << 30))
    if not done or chooser.random() < 0.1:
        return some_ids(chooser.randrange(30, 180), seed=turn)
    earlier = chooser.choice(done[-6:])
    cuts = [len(earlier.ids), earlier.num_prompt, chooser.randrange(1, len(earlier.ids)), earlier.num_prompt - 2]
    return [*earlier.ids[: chooser.choice(cuts)], *fresh][:320]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["hot", "warm"])
def test_what_extends_a_turn_computes_its_new_tokens_only(
    make_rig: MakeRig, tmp_path: Path, kind: str, place: str
) -> None:
    rig = make_rig(kind, "fp64", "q4h", store_dir=tmp_path, max_chunk_tokens=64)
    ids = some_ids(200)
    for turn in range(6):
        result = rig.generate(ids, NEW)
        if turn:
            assert result.report.computed_tokens == 33, "a token of the reply and the new text"
            assert (result.report.hot_tokens if place == "hot" else result.report.warm_tokens) == len(ids) - 33
        ids = [*ids, *result.token_ids, *some_ids(32, seed=turn)]
        if place == "warm":
            rig = rig.reopened()
    rig.close()


@pytest.mark.parametrize("place", ["hot", "warm"])
def test_window_parts_end_with_the_window_before_each_resume_point(
    make_rig: MakeRig, tmp_path: Path, place: str
) -> None:
    """1,000 tokens in ten turns: what is kept, in memory and on disk, does not grow with the conversation."""
    rig = make_rig("gemma3", "fp64", "q4h", store_dir=tmp_path, max_chunk_tokens=64)
    ids = some_ids(60)
    for turn in range(10):
        ids = [*ids, *rig.generate(ids, NEW).token_ids, *some_ids(90, seed=turn)]
        del rig.turns[:-1]  # all turns are those of one agent
        rig.save()
        if place == "warm":
            rig = rig.reopened()
        assert rows_of(rig) <= 2 * COVER, "the end of the prompt, and of the reply"
        assert slots_of(rig) <= (turn + 1) * 2 * COVER
    assert len(ids) > 1000 - NEW and rig.store is not None
    assert rig.store.stats().num_blocks >= 900 // BLOCK_TOKENS
    rig.close()


def test_a_prompt_that_parts_early_resumes_where_one_parted_before(make_rig: MakeRig) -> None:
    """The first prompt to part somewhere computes all before it again; then that place is a resume point."""
    rig, common = make_rig("gemma3", "fp64", "q4h", window_slots=24, max_chunk_tokens=64), some_ids(100)
    rig.generate([*common, *some_ids(150, seed=2)], NEW)
    for other in range(9):  # of other agents: they need the slots that the first has passed
        rig.generate(some_ids(60, seed=20 + other), NEW)
    second = rig.request([*common, *some_ids(50, seed=3)], NEW)
    (result,) = rig.finish(second)
    assert second.sequence.num_matched == 100 and result.report.reused_tokens < 100 - BLOCK_TOKENS
    assert result.report.explanation is not None and result.report.explanation.cause == "window_ended"
    expected = f"(matched 100 tokens, resumed at {result.report.reused_tokens})"
    assert result.report.explanation.detail.endswith(expected)
    third = rig.generate([*common, *some_ids(50, seed=4)], NEW)
    assert third.report.reused_tokens == 100
    assert (
        third.token_ids == make_rig("gemma3", "fp64", "q4h").generate([*common, *some_ids(50, seed=4)], NEW).token_ids
    )


def test_a_named_resume_point_outlives_what_the_sequence_passed(make_rig: MakeRig, tmp_path: Path) -> None:
    """As the end of the system text is, and breakpoints are: kept in memory under pressure, and on disk."""
    rig = make_rig("gemma3", "fp64", "q4h", window_slots=24, max_chunk_tokens=64, store_dir=tmp_path)
    common = some_ids(100)
    first = rig.unqueued([*common, *some_ids(150, seed=2)], NEW)
    first.sequence.resume_points.add(100)
    rig.core.add(first)
    rig.finish(first)
    for other in range(2):
        rig.generate(some_ids(60, seed=20 + other), NEW)
    hot = rig.generate([*common, *some_ids(50, seed=3)], NEW)
    assert hot.report.hot_tokens == 100
    rig = rig.reopened()
    warm = rig.generate([*common, *some_ids(50, seed=4)], NEW)
    assert warm.report.warm_tokens == 100
    rig.close()


def test_requests_that_run_together_hold_their_windows(make_rig: MakeRig) -> None:
    """With slots for two of them, others wait or are preempted, and all give their own answers."""
    rig, plain = (
        make_rig("gpt-oss", "fp64", "q4h", window_slots=14, max_chunk_tokens=64),
        make_rig("gpt-oss", "fp64", "q4h"),
    )
    prompts = [some_ids(70 + 10 * number, seed=number) for number in range(5)]
    requests = [rig.request(prompt, 40) for prompt in prompts]
    for prompt, result in zip(prompts, rig.finish(*requests), strict=True):
        assert result.token_ids == plain.generate(prompt, 40).token_ids
    assert all(request.state is State.FINISHED for request in requests)


def test_conversations_that_come_back_together_take_turns_for_slots(make_rig: MakeRig, tmp_path: Path) -> None:
    """Each needs four slots to be loaded and eight for its chunks; there are fourteen."""
    rig = make_rig("gemma3", "fp64", "q4h", store_dir=tmp_path, window_slots=14, max_chunk_tokens=64)
    plain = make_rig("gemma3", "fp64", "q4h")
    histories = [some_ids(100 + 20 * number, seed=number) for number in range(5)]
    results = [rig.generate(ids, NEW) for ids in histories]
    rig = rig.reopened()
    prompts = [
        [*ids, *result.token_ids, *some_ids(30, seed=50)] for ids, result in zip(histories, results, strict=True)
    ]
    requests = [rig.request(prompt, 20) for prompt in prompts]
    for prompt, result in zip(prompts, rig.finish(*requests), strict=True):
        assert result.token_ids == plain.generate(prompt, 20, "off").token_ids
        assert result.report.warm_tokens == len(prompt) - 31
    rig.close()
