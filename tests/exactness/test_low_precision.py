"""Invariant 1 in the precisions that are served.

bf16, the same with weights in int8 or int4, and fp32: where the self-test promises `bitwise`, every path gives the same
bytes and tokens as one cold run in one piece; float64 would hide a matrix product of another shape. fp32 too: the KV
that every path leaves behind, read by teacher forcing, gives logits within 1e-3 of the largest of what `transformers`
computes in one eager pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle.model.batch import SequenceStep
from tests.engine.quoting import quoting, spoilt
from tests.exactness.conftest import KINDS, Loader, MakeRig
from tests.exactness.rig import BLOCK_TOKENS, ROUNDED, Rig, load
from tests.exactness.test_against_transformers import reference
from tests.exactness.test_paths import some_ids
from tests.kernels.native import needs_kernels
from tests.tiny_models import tiny_model_dir

FORMATS = ("native", "q4h")
NEW = 6
FP32_TOLERANCE = 1e-3
Way = Callable[[MakeRig, Path, str, str, str, list[int]], Rig]


def whole(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """Cold, in one piece."""
    rig = make_rig(kind, dtype, kv)
    rig.generate(ids, 1)
    return rig


def chunked(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """Cold, in chunks of 16 and a rest of one row."""
    rig = make_rig(kind, dtype, kv, max_chunk_tokens=16)
    rig.generate(ids, 1)
    return rig


def extended(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """In turns of odd lengths, the shortest of one token."""
    rig = make_rig(kind, dtype, kv)
    for end in (1, 2, 5, 33, 34, 61, len(ids)):
        rig.generate(ids[:end], 1)
    return rig


def exact(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """Twice the same: the second time one row, not written."""
    rig = make_rig(kind, dtype, kv)
    rig.generate(ids, 1)
    assert rig.generate(ids, 1).report.computed_tokens == 1
    return rig


def diverged(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """On top of another sequence that begins alike and ends inside a block."""
    rig = make_rig(kind, dtype, kv)
    rig.generate([*ids[:37], *some_ids(30, seed=5)], 1)
    assert rig.generate(ids, 1).report.reused_tokens == 37
    return rig


def packed(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """Beside others that start, prefill and decode in the same steps."""
    rig = make_rig(kind, dtype, kv, max_chunk_tokens=32)
    requests = []
    for prompt in (some_ids(41, seed=6), ids, some_ids(3, seed=7)):
        requests.append(rig.request(prompt, 4 if prompt is not ids else 1))
        rig.step()
    rig.finish(*requests)
    return rig


def restored(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """From disk, after reopening, and extended there."""
    first = make_rig(kind, dtype, kv, store_dir=directory)
    first.generate(ids[:59], 1)
    rig = first.reopened()
    assert rig.generate(ids, 1).report.warm_tokens == 59
    return rig


def forked(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """One of three that go on from the same tail at the same time."""
    rig = make_rig(kind, dtype, kv)
    rig.generate(ids[:43], 1)
    twins = [[*ids[:43], *some_ids(len(ids) - 43, seed=seed)] for seed in (8, 9)]
    rig.finish(*[rig.request(prompt, 1) for prompt in (twins[0], ids, twins[1])])
    return rig


def preempted(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """Thrown out while it answers by an older one that grows, and computed again where blocks were taken."""
    rig = make_rig(kind, dtype, kv, num_blocks=-(-len(ids) // BLOCK_TOKENS) + 4, max_chunk_tokens=32)
    older = rig.request(some_ids(31, seed=10), 70)
    rig.step()
    request = rig.request(ids, 30)
    rig.finish(older)
    assert request.sequence.num_preemptions == 1
    assert rig.num_hot(ids) < len(ids) - BLOCK_TOKENS
    rig.finish(request)
    return rig


def packed_warm(make_rig: MakeRig, directory: Path, kind: str, dtype: str, kv: str, ids: list[int]) -> Rig:
    """From disk as far as it lies there, beside one that prefills meanwhile and one that loads as well."""
    first = make_rig(kind, dtype, kv, store_dir=directory / "packed", max_chunk_tokens=32)
    neighbour = some_ids(23, seed=11)
    first.finish(first.request(ids[:59], 1), first.request(neighbour, 1))
    rig = first.reopened()
    requests = [rig.request(prompt, 4) for prompt in (some_ids(70, seed=12), [*neighbour, 5, 6, 7])]
    requests.append(rig.request(ids, 1))
    results = rig.finish(*requests)
    assert [result.report.warm_tokens for result in results] == [0, 23, 59]
    return rig


PATHS: dict[str, Way] = {
    item.__name__: item
    for item in (whole, chunked, extended, exact, diverged, packed, restored, forked, preempted, packed_warm)
}
EVERY_CASE = pytest.mark.parametrize(
    ("dtype", "kind", "kv"),
    [
        *((dtype, kind, "q4h") for dtype in ("bf16", "fp32") for kind in KINDS),
        *((dtype, kind, "native") for dtype in ("bf16", "fp32") for kind in ("llama", "gemma3")),
        *(
            pytest.param(weights, kind, "q4h", marks=needs_kernels)
            for weights in ROUNDED
            for kind in ("llama", "gemma3", "mixtral")
        ),
    ],
)
# Every path for layers with and without windows, each other architecture where most comes together.
EVERY_PATH = pytest.mark.parametrize(
    ("kind", "path"),
    [
        *((kind, path) for kind in ("llama", "gemma3") for path in PATHS),
        *((kind, path) for kind in ("qwen3", "mixtral", "phi3") for path in ("chunked", "preempted", "packed_warm")),
    ],
)


@EVERY_CASE
def test_bitwise_is_promised(loaded: Loader, kind: str, kv: str, dtype: str) -> None:
    found = loaded(kind, dtype, kv)
    assert found.promise == "bitwise", found.notes


@EVERY_CASE
def test_bytes_are_the_same_on_every_path(make_rig: MakeRig, tmp_path: Path, kind: str, kv: str, dtype: str) -> None:
    ids = some_ids(81)
    expected = whole(make_rig, tmp_path, kind, dtype, kv, ids).stored(ids)
    for name, path in PATHS.items():
        rig = path(make_rig, tmp_path, kind, dtype, kv, ids)
        differing = [index for index, (a, b) in enumerate(zip(rig.stored(ids), expected, strict=True)) if a != b]
        rig.close()
        assert not differing, f"{name}: blocks {differing} have other bytes than one cold run"


@EVERY_CASE
def test_answers_are_the_same_on_every_path(make_rig: MakeRig, kind: str, kv: str, dtype: str) -> None:
    ids = some_ids(50)
    first = make_rig(kind, dtype, kv)
    answer = first.generate(ids, NEW).token_ids
    assert first.generate(ids, NEW).token_ids == answer
    pieces = make_rig(kind, dtype, kv, max_chunk_tokens=16)
    beside = pieces.request(some_ids(30, seed=2), 20)
    assert pieces.generate(ids, NEW).token_ids == answer
    pieces.finish(beside)
    assert pieces.generate(ids, NEW, reuse="off").token_ids == answer


@EVERY_CASE
def test_answers_and_bytes_are_the_same_with_drafts(make_rig: MakeRig, kind: str, kv: str, dtype: str) -> None:
    prompts, plain = [some_ids(50), some_ids(31, seed=2), some_ids(9, seed=3)], make_rig(kind, dtype, kv)
    answers = [plain.generate(prompt, 30).token_ids for prompt in prompts]
    for together in (1, 3):
        rig = make_rig(kind, dtype, kv, max_draft=7)
        requests = [
            quoting(rig, prompt, 30, [*prompt, *spoilt(answer)])
            for prompt, answer in zip(prompts[:together], answers, strict=False)
        ]
        assert [result.token_ids for result in rig.finish(*requests)] == answers[:together]
        assert rig.core.speculation.num_drafted > rig.core.speculation.num_accepted > 10 * together
        for prompt, answer in zip(prompts[:together], answers, strict=False):
            known = [*prompt, *answer[:-1]]
            assert rig.stored(known) == plain.stored(known)


@EVERY_CASE
def test_logits_are_the_same_in_every_cut(make_rig: MakeRig, kind: str, kv: str, dtype: str) -> None:
    same_in_every_cut(make_rig(kind, dtype, kv))


@pytest.mark.parametrize("kv", FORMATS)
def test_bf16_logits_of_wide_layers_are_the_same_in_every_cut(tmp_path: Path, kv: str) -> None:
    # A bf16 product of one row is summed in another order where more than 1,024 numbers are summed, and there one
    # result in five thousand differs: narrow layers show nothing.
    directory = tiny_model_dir("llama", "bf16", tmp_path, hidden_size=512, intermediate_size=2048)
    same_in_every_cut(Rig(load(directory, "bf16", kv)))


def same_in_every_cut(rig: Rig) -> None:
    """Teacher-forced logits and KV of one sequence, bit for bit, however it is cut into steps."""
    ids = some_ids(61)
    logits, blocks = rig.compute(ids, [61])
    for pieces in ([1] * 61, [2] * 30 + [1], [3] * 20 + [1], [7, 1, 13, 2, 3, 35], [60, 1]):
        same_logits, same_blocks = rig.compute(ids, pieces)
        assert torch.equal(same_logits, logits), f"pieces {pieces[:6]} give other logits"
        assert same_blocks == blocks, f"pieces {pieces[:6]} leave other bytes"


def continued_logits(rig: Rig, ids: Sequence[int], num_stored: int) -> torch.Tensor:
    """Logits of ids[num_stored:] computed on the stored KV of what is before them, which must be in memory."""
    array, size = np.asarray(ids, dtype=np.uint32), rig.pool.block_tokens
    root, table = rig.cache.root("default"), rig.cache.new_table()
    blocks = rig.pool.try_reuse_prefix(root, array[:num_stored])
    rest = array[len(blocks) * size : num_stored]
    if len(rest):
        parent = rig.pool.name(blocks[-1]) if blocks else root
        assert parent is not None
        child = rig.pool.find_child(parent, rest)
        assert child is not None and child[1] == len(rest), "the stored tail is not in memory"
        rig.pool.share(child[0])
        blocks.append(child[0])
    table.append_shared(blocks, num_stored)
    copies = table.prepare(len(array))
    assert copies is not None
    for copy in copies:
        rig.arena.copy_tokens(copy.source, copy.target, copy.num_tokens)
    logits = rig.runner.forward([SequenceStep(array[num_stored:], num_stored, table.blocks, num_stored, logits="all")])
    table.release()
    return logits


@EVERY_PATH
@torch.inference_mode()
def test_fp32_kv_of_every_path_gives_the_logits_of_transformers(
    make_rig: MakeRig, loaded: Loader, tmp_path: Path, kind: str, path: str
) -> None:
    ids, following = some_ids(75), some_ids(20, seed=4)
    wanted = _eager_logits(loaded, kind, (*ids, *following))[len(ids) :]
    rig = PATHS[path](make_rig, tmp_path, kind, "fp32", "native", ids)
    got = continued_logits(rig, [*ids, *following], len(ids))
    rig.close()
    worst = float((got - wanted).abs().max() / wanted.abs().max())
    assert worst <= FP32_TOLERANCE, f"logits differ by {worst:.1e} of the largest"


@lru_cache(maxsize=len(KINDS))
def _eager_logits(loaded: Loader, kind: str, ids: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = reference(loaded, kind, "fp32")(torch.tensor([ids])).logits[0]
    return logits


@EVERY_PATH
def test_fp32_q4h_of_every_path_gives_the_logits_of_one_cold_run(
    make_rig: MakeRig, tmp_path: Path, kind: str, path: str
) -> None:
    ids, following = some_ids(75), some_ids(20, seed=4)
    rig = PATHS[path](make_rig, tmp_path, kind, "fp32", "q4h", ids)
    got = continued_logits(rig, [*ids, *following], len(ids))
    rig.close()
    wanted = make_rig(kind, "fp32", "q4h").logits([*ids, *following], [len(ids) + len(following)])[len(ids) :]
    worst = float((got - wanted).abs().max() / wanted.abs().max())
    assert worst <= FP32_TOLERANCE, f"logits differ by {worst:.1e} of the largest"
