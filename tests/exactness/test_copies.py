"""A device whose copies run beside its steps: many blocks at a time, and bytes that arrive once they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.errors import RequestFailed
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart, Wait
from rekindle.store.threads.readers import RUN_BLOCKS
from tests.exactness.conftest import MakeRig

NUM_TOKENS, NEW = 400, 3


class LateArena(KVArena):
    """Notes the copies, of how many parts each; what comes out has arrived once somebody has waited."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sizes: dict[str, list[int]] = {"in": [], "out": []}

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        self.sizes["out"].append(len(parts))
        taken = [replace(each, payload=np.empty_like(each.payload)) for each in parts]
        super().copy_out(taken)
        for each in parts:
            each.payload[:] = 0xEE

        def arrive() -> None:
            for each, source in zip(parts, taken, strict=True):
                each.payload[:] = source.payload

        return arrive

    def copy_in(self, parts: Sequence[BlockPart]) -> None:
        self.sizes["in"].append(len(parts))
        super().copy_in(parts)


class FailingArena(KVArena):
    """Copies nothing out once its device is said to be broken."""

    is_broken = False

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        if self.is_broken:
            raise RuntimeError("the device is gone")
        return super().copy_out(parts)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_blocks_travel_many_at_a_time_and_are_waited_for(make_rig: MakeRig, tmp_path: Path, kind: str) -> None:
    ids = np.random.default_rng(5).integers(3, 60, NUM_TOKENS).tolist()
    rig = make_rig(kind, "fp64", "q4h", store_dir=tmp_path, arena_type=LateArena)
    first = rig.generate(ids, NEW)
    wanted = rig.stored([*ids, *first.token_ids[:-1]])
    out = rig.arena.sizes["out"]
    reopened = rig.reopened()
    try:
        again = reopened.generate([*ids, *first.token_ids], NEW)
        assert again.report.warm_tokens == NUM_TOKENS + NEW - 1
        assert reopened.stored([*ids, *first.token_ids])[:-1] == wanted[:-1], "the bytes that were computed"
        num_blocks = len(wanted)
        assert max(out) > RUN_BLOCKS and len(out) < num_blocks, out
        came = reopened.arena.sizes["in"]
        assert num_blocks >= 2 * RUN_BLOCKS and len(came) <= -(-num_blocks // RUN_BLOCKS) + 1, came
    finally:
        reopened.close()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_blocks_that_cannot_be_copied_are_counted_and_saved_with_the_next_turn(
    make_rig: MakeRig, tmp_path: Path, kind: str
) -> None:
    ids = np.random.default_rng(6).integers(3, 60, NUM_TOKENS).tolist()
    rig = make_rig(kind, "fp64", "q4h", store_dir=tmp_path, arena_type=FailingArena)
    assert rig.store is not None and isinstance(rig.arena, FailingArena)
    rig.arena.is_broken = True
    with pytest.raises(RuntimeError, match="the device is gone"):
        rig.generate(ids, NEW)
    num_blocks = rig.store.stats().unsaved_evicted
    assert num_blocks >= NUM_TOKENS // rig.pool.block_tokens and not len(rig.cache.saving)
    assert rig.store.flush(30) and rig.store.staging.num_waiting == 0 and rig.store.stats().num_blocks == 0
    rig.core.fail_all(RequestFailed("the engine failed"))
    rig.arena.is_broken = False
    reply = rig.generate(ids, NEW)
    assert reply.report.reused_tokens >= NUM_TOKENS - rig.pool.block_tokens, "they are in memory all the same"
    reopened = rig.reopened()
    try:
        assert reopened.generate([*ids, *reply.token_ids], 1).report.warm_tokens == NUM_TOKENS + NEW - 1
    finally:
        reopened.close()
