"""Blocks of a store for who takes them elsewhere: where those of a text are, and what they hold. Waits for the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from rekindle.cache.blocks.hashing import BlockIdentity
from rekindle.store.values import Bytes, StoredBlock
from rekindle.store.warm import WarmStore

LOAD_S = 60.0  # until the store's readers have answered


def located(store: WarmStore, blocks: Sequence[BlockIdentity]) -> list[StoredBlock]:
    """Return where the leading run of a branch's blocks is, its partial one included."""
    found: list[StoredBlock] = []
    for block in blocks:
        stored = store.stored(block.hash)
        if stored is None or 0 not in stored.parts:
            break
        found.append(stored)
    return found


def payloads_of(store: WarmStore, blocks: Sequence[StoredBlock]) -> list[Mapping[int, Bytes]]:
    """Return the payloads of blocks by part; those before the first damaged one."""
    read: dict[int, Mapping[int, Bytes]] = {}
    num_good: Future[int] = Future()
    store.load(blocks, lambda first, run: read.update(enumerate(run, first)), num_good.set_result)
    with contextlib.suppress(TimeoutError):
        return [read[number] for number in range(num_good.result(LOAD_S))]
    return []
