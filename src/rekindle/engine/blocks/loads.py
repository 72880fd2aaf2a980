"""Blocks on their way from disk to memory.

Owns which blocks are being read, and for which sequence. A load owns its target blocks and holds their ancestors until
its reader reports, even if the sequence has ended. Called by the engine thread; the bytes arrive on the store's
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.engine.sequence import Sequence
from rekindle.kv.arena import KVArena
from rekindle.store.warm import StoredBlock, WarmStore


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Blocks on their way from disk. Owns its target blocks, and holds their ancestors, until it reports."""

    sequence: Sequence
    blocks: tuple[StoredBlock, ...]
    targets: tuple[int, ...]
    held: tuple[int, ...]


class Loads:
    """The loads in flight. `report` is called from reader threads with a load and the number of its good blocks."""

    def __init__(self, *, pool: BlockPool, arena: KVArena, report: Callable[[Load, int], None]) -> None:
        self._pool = pool
        self._arena = arena
        self._report = report
        self._by_hash: dict[BlockHash, Load] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._by_hash

    def under_way(self) -> Collection[Load]:
        """Every load that has not reported."""
        return set(self._by_hash.values())

    def start(self, store: WarmStore, sequence: Sequence, held: list[int], blocks: list[StoredBlock]) -> bool:
        """Reserve target blocks and start the read in the store; False when no block is free."""
        targets: list[int] = []
        for _ in blocks:
            block = self._pool.allocate()
            if block is None:
                break
            targets.append(block)
        if not targets:
            return False
        load = Load(sequence, tuple(blocks[: len(targets)]), tuple(targets), tuple(held))
        for stored in load.blocks:
            self._by_hash[stored.identity.hash] = load

        def deliver(index: int, part: int, payload: np.ndarray) -> None:
            self._arena.write(targets[index], part, payload)

        store.load(load.blocks, deliver, lambda num_good: self._report(load, num_good))
        return True

    def finish(self, load: Load, num_good: int) -> None:
        """Publish the good blocks, release the rest; a bad record ends the run and is not tried again."""
        for index, (stored, target) in enumerate(zip(load.blocks, load.targets, strict=True)):
            identity = stored.identity
            del self._by_hash[identity.hash]
            if index >= num_good:
                self._pool.release(target)
                continue
            if identity.num_tokens == self._pool.block_tokens:
                block = self._pool.register(target, identity.hash, identity.parent, identity.ids)
            else:
                block = self._pool.register_tail(target, identity.parent, identity.ids)
            load.sequence.loaded.add(identity.hash)
            self._pool.release(block)
        if num_good < len(load.blocks):
            load.sequence.tried_loads.add(load.blocks[num_good].identity.hash)
        self._pool.release_all(list(load.held))

    def check(self) -> None:
        """Assert that every target is held."""
        for load in self._by_hash.values():
            for target in load.targets:
                assert self._pool.refs(target) >= 1, f"target {target} of a load has no reference"
