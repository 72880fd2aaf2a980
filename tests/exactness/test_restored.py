"""Restored blocks are computed again in idle time: equal bits count, others leave memory and disk with what follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.core.scheduler import MIN_CHUNK
from rekindle.engine.core.verdicts import Verdicts
from rekindle.engine.types import Verdict
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart, Wait
from tests.exactness.conftest import Loader, MakeRig
from tests.exactness.rig import BLOCK_TOKENS, Rig

NUM_BLOCKS, NEW, BAD = 6, 3, 2
OTHER = [*range(20, 50), *range(20, 30)]
IDS = np.random.default_rng(7).integers(3, 60, NUM_BLOCKS * BLOCK_TOKENS + 5).tolist()


class ForgingArena(KVArena):
    """Saves another bit of one block than it has, under a checksum that holds."""

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        wait = super().copy_out(parts)
        for each in parts:
            if each.block == self.forged:
                each.payload[0] ^= 1
        return wait

    forged = -1


def saved(make_rig: MakeRig, directory: Path, kind: str = "llama", **options: Any) -> tuple[Rig, tuple[int, ...]]:
    """A rig that has saved a turn of `IDS` and is closed, and what it answered."""
    rig = make_rig(kind, "fp64", "q4h", store_dir=directory, checked=1, **options)
    if isinstance(rig.arena, ForgingArena):
        rig.arena.forged = BAD  # the blocks of an empty pool are taken in order
    reply = rig.generate(IDS, NEW)
    rig.generate([*IDS[:BLOCK_TOKENS], *OTHER], NEW)
    rig.save()
    rig.close()
    return rig, reply.token_ids


def idle_steps(rig: Rig) -> int:
    """Step until nothing waits to be checked; return how many steps that took."""
    count = 0
    while rig.core.has_work:
        rig.step()
        count += 1
    assert not rig.pool.num_held, "nothing is held between two checks"
    return count


def test_restored_blocks_are_equal_and_wait_for_requests(make_rig: MakeRig, tmp_path: Path) -> None:
    _, token_ids = saved(make_rig, tmp_path)
    rig = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1)
    assert rig.generate(IDS, NEW).token_ids == token_ids
    checks = rig.core.checks
    assert len(checks) == NUM_BLOCKS and not checks.num_checked, "while a request runs none is checked"
    request = rig.request(IDS[:20], NEW, "off")
    rig.step()
    assert len(checks) == NUM_BLOCKS and request.sequence.num_computed, "it is computed at once"
    rig.finish(request)
    assert idle_steps(rig) == NUM_BLOCKS, "a block a step"
    assert (checks.num_checked, checks.num_differed, len(checks)) == (NUM_BLOCKS, 0, 0)
    assert rig.core.verdicts is not None
    assert rig.core.verdicts.of(rig.turns[0].hashes[1:4] * 2) == Verdict(3, 0), "each block once"
    counts = rig.core.counts
    assert (counts.num_checked, counts.num_differed, counts.num_checking) == (NUM_BLOCKS, 0, 0)

    turn = rig.turns[0]
    assert rig.cache.evict_chain(turn.root, turn.ids, turn.hashes)
    again = rig.generate(IDS, NEW)
    assert again.report.warm_tokens and len(checks)
    rig.core.forget("default", "a")
    assert not len(checks), "an agent is forgotten with its token ids"


def test_a_block_with_another_bit_leaves_memory_and_disk_with_what_follows_it(
    make_rig: MakeRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, token_ids = saved(make_rig, tmp_path, arena_type=ForgingArena)
    hashes = first.turns[0].hashes
    rig = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1)
    assert rig.store is not None
    assert rig.generate(IDS, NEW).report.warm_tokens > NUM_BLOCKS * BLOCK_TOKENS - 1, "every checksum holds"
    with caplog.at_level(logging.ERROR):
        idle_steps(rig)
    assert rig.core.checks.num_differed == 1 and rig.core.verdicts is not None
    assert rig.core.verdicts.of(hashes) == Verdict(BAD, NUM_BLOCKS - BAD), "what came after it differs, too"
    assert f"block {hashes[BAD].hex()} is dropped" in caplog.text and "has other bits" in caplog.text
    assert rig.num_hot(IDS) == BAD * BLOCK_TOKENS, "nothing after it is in memory"
    assert [rig.store.contains(each) for each in hashes] == [True] * BAD + [False] * (len(hashes) - BAD)
    assert rig.store.stats().bad_records == 1 and rig.store.flush(30)
    left = {each.agent: each.num_tokens for each in rig.store.sequences()}
    assert left == {"a0": BAD * BLOCK_TOKENS, "a1": BLOCK_TOKENS + len(OTHER) + NEW - 1}, (
        "it ends before; the other not"
    )
    rig.store.check("records")
    rig.close()

    last = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1)
    assert last.store is not None
    assert not any(map(last.store.contains, hashes[BAD:])), "nor after a restart"
    again = last.generate(IDS, NEW)
    assert again.token_ids == token_ids and again.report.reused_tokens == BAD * BLOCK_TOKENS
    last.save()
    last.store.check("records")
    last.close()
    right = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1)
    assert right.generate(IDS, NEW).report.warm_tokens > NUM_BLOCKS * BLOCK_TOKENS - 1
    idle_steps(right)
    assert (right.core.checks.num_checked, right.core.checks.num_differed) == (NUM_BLOCKS, 0)


def test_a_large_block_is_checked_a_chunk_a_step(loaded: Loader, tmp_path: Path) -> None:
    small = loaded("llama", "fp64", "q4h")
    large = replace(small, spec=replace(small.spec, layout=replace(small.spec.layout, block_tokens=2 * MIN_CHUNK)))
    first = Rig(large, store_dir=tmp_path)
    first.generate(IDS, NEW)
    first.save()
    first.close()
    rig = Rig(large, store_dir=tmp_path, checked=1, max_chunk_tokens=MIN_CHUNK)
    rig.generate(IDS, NEW)
    num_blocks = len(IDS) // (2 * MIN_CHUNK)
    assert len(rig.core.checks) == num_blocks and idle_steps(rig) == 2 * num_blocks
    assert (rig.core.checks.num_checked, rig.core.checks.num_differed) == (num_blocks, 0)
    rig.close()


def test_only_what_computes_now_is_checked(make_rig: MakeRig, tmp_path: Path) -> None:
    saved(make_rig, tmp_path)
    other = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1, computed_by=2)
    other.generate(IDS, NEW)
    assert not len(other.core.checks), "another processor saved them"
    more = [*IDS, *IDS[:BLOCK_TOKENS]]
    other.generate(more, NEW)
    other.save()
    other.close()
    same = make_rig("llama", "fp64", "q4h", store_dir=tmp_path, checked=1, computed_by=2)
    same.generate(more, NEW)
    assert 0 < len(same.core.checks) < NUM_BLOCKS, "those that it has saved itself"
    idle_steps(same)
    assert (same.core.checks.num_differed, same.core.counts.num_checked) == (0, same.core.checks.num_checked)
    one_in = make_rig("llama", "fp64", "q4h", store_dir=tmp_path / "none")
    assert one_in.core.counts.num_checked is None and one_in.core.verdicts is None, "off"


def test_the_last_verdicts_are_kept() -> None:
    names = [BlockHash(bytes([number]) * 32) for number in range(4)]
    verdicts = Verdicts(most=2)
    for name in (*names[:2], names[0], names[2]):
        verdicts.note([name], differed=name == names[0])
    assert verdicts.of(names) == Verdict(1, 1), "what was noted again stays longer"
    verdicts.note([names[2]], differed=True)
    assert verdicts.of(names) == Verdict(0, 2)
