"""Chains of models with windows are computed again from their first token, and compared block by block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle.engine.core.chain_checks import MOST_TRIES, SHARE, ChainChecks
from rekindle.engine.core.scheduler import MIN_CHUNK
from rekindle.engine.types import Verdict
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart, Wait
from tests.exactness.conftest import MakeRig
from tests.exactness.rig import BLOCK_TOKENS, Rig
from tests.exactness.test_restored import BAD, IDS, NEW, NUM_BLOCKS, ForgingArena, idle_steps, saved

KINDS = ("gemma3", "gpt-oss", "gemma4")
CHUNK = 2 * BLOCK_TOKENS


class ForgingEnd(KVArena):
    """Saves another bit of the windows of the last full block, under a checksum that holds."""

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        wait = super().copy_out(parts)
        for each in parts:
            if (each.block, each.part) == (NUM_BLOCKS - 1, 1):
                each.payload[0] ^= 1
        return wait


def restored(make_rig: MakeRig, directory: Path, kind: str, **options: object) -> tuple[Rig, ChainChecks]:
    """A rig that has read the chain again, and its checks, for which that waits."""
    rig = make_rig(kind, "fp64", "q4h", store_dir=directory, **{"checked": 1, "max_chunk_tokens": CHUNK, **options})
    assert rig.generate(IDS, NEW).report.warm_tokens >= NUM_BLOCKS * BLOCK_TOKENS
    checks = rig.core.checks
    assert isinstance(checks, ChainChecks) and not checks.num_checked
    return rig, checks


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_as_computed_from_its_beginning(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    first, _ = saved(make_rig, tmp_path, kind=kind)
    rig, checks = restored(make_rig, tmp_path, kind)
    assert len(checks) == 1 and rig.core.counts.num_checking == 1
    assert idle_steps(rig) == NUM_BLOCKS * BLOCK_TOKENS // CHUNK, "a chunk a step"
    assert (checks.num_checked, checks.num_differed, len(checks)) == (NUM_BLOCKS, 0, 0)
    assert checks.verdicts.of(first.turns[0].hashes) == Verdict(NUM_BLOCKS, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_block_that_differs_is_dropped_with_what_follows(
    make_rig: MakeRig, tmp_path: Path, kind: str
) -> None:
    first, token_ids = saved(make_rig, tmp_path, kind=kind, arena_type=ForgingArena)
    rig, checks = restored(make_rig, tmp_path, kind)
    idle_steps(rig)
    assert (checks.num_checked, checks.num_differed) == (BAD + 1, 1)
    hashes = first.turns[0].hashes
    assert checks.verdicts.of(hashes) == Verdict(BAD, NUM_BLOCKS - BAD)
    assert rig.store is not None
    assert [rig.store.contains(each) for each in hashes] == [True] * BAD + [False] * (len(hashes) - BAD)
    assert rig.generate(IDS, NEW).token_ids == token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_were_restored_are_compared_too(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    saved(make_rig, tmp_path, kind=kind, arena_type=ForgingEnd)
    rig, checks = restored(make_rig, tmp_path, kind)
    idle_steps(rig)
    assert (checks.num_checked, checks.num_differed) == (NUM_BLOCKS, 1)


def test_a_request_gets_the_blocks_of_a_chain_at_once(make_rig: MakeRig, tmp_path: Path) -> None:
    saved(make_rig, tmp_path, kind="gemma3")
    rig, checks = restored(make_rig, tmp_path, "gemma3", max_chunk_tokens=MIN_CHUNK)
    for _ in range(MOST_TRIES):
        rig.step()
        assert rig.pool.num_held, "it is under way"
        request = rig.request(IDS[:20], 1, "off")
        rig.step()
        assert request.sequence.num_computed and not checks.num_checked and len(checks) == 1
        rig.finish(request)
    assert idle_steps(rig) == NUM_BLOCKS and checks.num_checked == NUM_BLOCKS
    rig.step()
    assert not rig.pool.num_held


def test_a_chain_that_is_never_done_is_given_up_and_one_of_somebody_who_left_is_forgotten(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    saved(make_rig, tmp_path, kind="gemma3")
    rig, checks = restored(make_rig, tmp_path, "gemma3", max_chunk_tokens=MIN_CHUNK)
    for _ in range(MOST_TRIES + 1):
        rig.step()
        rig.finish(rig.request(IDS[:20], 1, "off"))
    assert not len(checks) and not idle_steps(rig)
    turn = rig.turns[0]
    assert rig.cache.evict_chain(turn.root, turn.ids, turn.hashes)
    assert rig.generate(IDS, NEW).report.warm_tokens and len(checks)
    rig.step()
    assert rig.pool.num_held
    rig.core.forget("default", "a")
    assert not len(checks) and not rig.pool.num_held and not checks.num_checked


def test_one_block_of_so_many_is_computed_and_only_chains_that_have_room_are(make_rig: MakeRig, tmp_path: Path) -> None:
    saved(make_rig, tmp_path, kind="gemma3")
    rig, checks = restored(make_rig, tmp_path, "gemma3", checked=2)
    assert not len(checks), "half of what is due was restored"
    turn = rig.turns[0]
    assert rig.cache.evict_chain(turn.root, turn.ids, turn.hashes)
    rig.generate(IDS, NEW)
    assert len(checks) == 1
    idle_steps(rig)
    assert checks.num_checked == NUM_BLOCKS
    rig.close()
    crowded, checks = restored(make_rig, tmp_path, "gemma3", num_blocks=SHARE * NUM_BLOCKS - 1)
    assert len(checks) and idle_steps(crowded) <= 1 and not checks.num_checked


def test_a_chain_that_another_processor_began_is_not_checked(make_rig: MakeRig, tmp_path: Path) -> None:
    saved(make_rig, tmp_path, kind="gemma3")
    other, checks = restored(make_rig, tmp_path, "gemma3", computed_by=2)
    assert idle_steps(other) <= 1 and not checks.num_checked
