"""Invariant 1 where windows end: a sequence resumed at any point gives the answers of one that reuses nothing.

In float64. Windows have 24 tokens and blocks 16, so a resume point needs the parts of at most four blocks.
"""

from __future__ import annotations

import queue
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from rekindle.engine.blocks.loads import Load
from rekindle.engine.request import State
from tests.exactness.conftest import MakeRig
from tests.exactness.rig import BLOCK_TOKENS, LOAD_TIMEOUT_S, Rig
from tests.exactness.test_paths import some_ids
from tests.tiny_models import WINDOW

KINDS = ("gemma3", "gpt-oss", "gemma4")
RECURRENT = ("lfm2", "qwen3.5", "granite-4-h", "falcon-h1")
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


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, seed) for kind in KINDS for seed in range(2)),
        *((kind, 0) for kind in RECURRENT),
    ],
)
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
def test_parts_of_windows_end_with_the_window_before_each_resume_point(
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
    assert result.report.reused_tokens < 100 - BLOCK_TOKENS
    assert result.report.explanation is not None and result.report.explanation.cause == "window_ended"
    expected = f"(matched 100 tokens, resumed at {result.report.reused_tokens})"
    assert result.report.explanation.detail.endswith(expected)
    third = rig.generate([*common, *some_ids(50, seed=4)], NEW)
    assert third.report.reused_tokens == 100
    assert (
        third.token_ids == make_rig("gemma3", "fp64", "q4h").generate([*common, *some_ids(50, seed=4)], NEW).token_ids
    )


def named(rig: Rig, common: list[int]) -> None:
    """Run a long prompt with a resume point after what others have in common with it, as after a system text."""
    first = rig.unqueued([*common, *some_ids(150, seed=2)], NEW)
    first.sequence.resume_points.add(len(common))
    rig.core.add(first)
    rig.finish(first)


def test_a_named_resume_point_outlives_what_the_sequence_passed(make_rig: MakeRig) -> None:
    rig, common = make_rig("gemma3", "fp64", "q4h", window_slots=24, max_chunk_tokens=64), some_ids(100)
    named(rig, common)
    for other in range(5):  # they need most slots that the first has passed
        rig.generate(some_ids(60, seed=20 + other), NEW)
    assert rig.generate([*common, *some_ids(50, seed=3)], NEW).report.reused_tokens == 100


def test_a_named_resume_point_is_on_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig("gemma3", "fp64", "q4h", max_chunk_tokens=64, store_dir=tmp_path)
    named(rig, some_ids(100))
    rig = rig.reopened()
    assert rig.generate([*some_ids(100), *some_ids(50, seed=4)], NEW).report.warm_tokens == 100
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


@dataclass
class Tail:
    """A finished conversation whose last block, a tail, has lost its part of the window; on disk it is whole."""

    rig: Rig
    ids: list[int]
    block: int

    @classmethod
    def of(cls, rig: Rig) -> Tail:
        result = rig.generate(some_ids(70), NEW)
        rig.save()
        ids = [*some_ids(70), *result.token_ids[:-1]]
        blocks = rig.pool.try_reuse_prefix(rig.cache.root("default"), ids)
        rig.pool.release_all(blocks)
        parent = rig.pool.name(blocks[-1])
        assert parent is not None
        child = rig.pool.find_child(parent, ids[len(blocks) * BLOCK_TOKENS :])
        assert child is not None
        rig.pool.windows[0].drop(child[0])
        return cls(rig, ids, child[0])


def test_a_tail_stays_while_its_window_is_read(make_rig: MakeRig, tmp_path: Path) -> None:
    """If it left, its other part would be that of another block."""
    reports: queue.SimpleQueue[tuple[Load, int]] = queue.SimpleQueue()
    rig = make_rig(
        *("gemma3", "fp64", "q4h"),
        num_blocks=60,
        store_dir=tmp_path,
        report_load=lambda load, good: reports.put((load, good)),
    )
    tail = Tail.of(rig)
    request = rig.request([*tail.ids, *some_ids(20, seed=9)], NEW)
    rig.step()
    load, num_good = reports.get(timeout=LOAD_TIMEOUT_S)
    assert [sorted(block.parts) for block in load.blocks] == [[1]]
    taken = []
    while (block := rig.pool.allocate()) is not None:
        taken.append(block)
    rig.pool.release_all(taken)
    assert rig.pool.name(tail.block) is not None, "it is held"
    rig.core.finish_load(load, num_good)
    (result,) = rig.finish(request)
    assert result.report.reused_tokens == len(tail.ids)
    assert not rig.pool.num_held, "it is held no longer"
    expected = make_rig("gemma3", "fp64", "q4h").generate([*tail.ids, *some_ids(20, seed=9)], NEW, "off")
    assert result.token_ids == expected.token_ids


def test_a_load_that_finds_no_slot_leaves_what_was_found(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig("gemma3", "fp64", "q4h", num_blocks=60, window_slots=30, store_dir=tmp_path)
    tail, (slots,) = Tail.of(rig), rig.pool.windows
    held = []
    while rig.pool.num_free:
        held.append(rig.pool.allocate())
        if slots.num_available:
            slots.take(held[-1])
    while slots.num_available:  # those that conversations have kept
        held.append(rig.pool.allocate())
        slots.take(held[-1])
    sequence = rig.unqueued([*tail.ids, *some_ids(20, seed=9)], NEW).sequence
    assert rig.cache.attach(sequence, (), alone=False) == "short"
    assert rig.cache.attach(sequence, (), alone=True) == "ready"
    assert sequence.table.num_tokens == 0 and sequence.num_unresumed == len(tail.ids)
    sequence.table.release()


def test_a_cancelled_prompt_leaves_no_window_on_disk(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig("gemma3", "fp64", "q4h", num_blocks=120, store_dir=tmp_path, max_chunk_tokens=64)
    ids = some_ids(200)
    rig.generate(ids, NEW)
    rig.save()
    before = rows_of(rig)
    for cut in (48, 112, 176):
        request = rig.request([*ids[:cut], *some_ids(200, seed=cut)], NEW)
        while request.sequence.table.num_tokens < cut + 100:
            rig.step()
        request.cancelled.set()
        rig.step()
    rig.save()
    assert rows_of(rig) == before


def test_a_long_prompt_needs_slots_for_a_chunk_at_a_time(make_rig: MakeRig) -> None:
    """Not for all of its blocks: it starts next to a reply that runs."""
    rig = make_rig("gemma3", "fp64", "q4h", num_blocks=120, window_slots=22, max_chunk_tokens=64)
    running = rig.request(some_ids(100), 60)
    while not running.sequence.num_generated:
        rig.step()
    long = rig.request(some_ids(600, seed=2), NEW)
    rig.step()
    assert long.state is State.RUNNING and running.state is State.RUNNING
    rig.finish(running, long)
    assert not rig.core.num_preemptions


def test_what_was_said_of_a_first_try_is_not_said_of_the_next(make_rig: MakeRig) -> None:
    rig, ids = make_rig("gemma3", "fp64", "q4h", num_blocks=120), some_ids(96)
    rig.generate([*ids, *some_ids(5, seed=2)], NEW)
    request, (slots,) = rig.unqueued([*ids, *some_ids(30, seed=3)], NEW), rig.pool.windows
    blocks = rig.pool.try_reuse_prefix(request.sequence.root, request.sequence.ids)
    rig.pool.release_all(blocks)
    lost = [block for block in blocks if slots.has(block)]
    for block in lost:
        slots.drop(block)
    assert rig.cache.attach(request.sequence, ()) == "ready"
    assert request.sequence.num_unresumed == 96
    request.sequence.table.release()  # there was no room for it
    request.sequence.num_computed = 0
    for block in lost:
        slots.take(block)
        slots.release(block)
    rig.core.add(request)
    (result,) = rig.finish(request)
    assert result.report.reused_tokens == 96 and result.report.explanation is None


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
