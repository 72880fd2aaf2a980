"""Blocks on their way from disk to memory.

Owns which blocks are being read, where to, and for which sequence. A load owns its target blocks and holds their
ancestors until the last of its readers reports, even if the sequence has ended. Called by the engine thread; the bytes
arrive on the store's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.windows import WindowSlots
from rekindle.engine.sequence import Sequence
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart
from rekindle.store.values import Bytes
from rekindle.store.warm import StoredBlock, WarmStore


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Parts of blocks on their way from disk. Owns its target blocks, and holds the blocks that they follow, until it
    reports.

    Window parts of a block that is held also have a target of their own, so that nobody sees them early.
    """

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
        for stored in blocks:
            target = self._reserve(stored)
            if target is None:
                break
            targets.append(target)
        if not targets:
            return False
        load = Load(sequence, tuple(blocks[: len(targets)]), tuple(targets), tuple(held))
        for stored in load.blocks:
            self._by_hash[stored.identity.hash] = load

        def room(first: int, run: Run[StoredBlock]) -> list[dict[int, Bytes]]:
            return [
                {part: self._arena.room(targets[index], part) for part in stored.parts}
                for index, stored in enumerate(run, first)
            ]

        def deliver(first: int, run: Run[Mapping[int, Bytes]]) -> None:
            self._arena.copy_in(
                [
                    BlockPart(targets[index], part, load.blocks[index].identity.num_tokens, payload)
                    for index, payloads in enumerate(run, first)
                    for part, payload in payloads.items()
                ]
            )

        store.load(load.blocks, deliver, lambda num_good: self._report(load, num_good), room)
        return True

    def _reserve(self, stored: StoredBlock) -> int | None:
        """Return a block with slots for its window parts, all held; None on a shortage."""
        target = self._pool.allocate()
        if target is None:
            return None
        for taken, slots in enumerate(windows := self._windows(stored)):
            if not slots.take(target, self._pool.group(stored.identity.root)):
                for other in windows[:taken]:
                    other.release(target)
                self._pool.release(target)
                return None
        return target

    def _windows(self, stored: StoredBlock) -> list[WindowSlots]:
        """Return the slots of the parts that are read of a block and end with a window."""
        ending = self._arena.layout.ending
        return [slots for slots, part in zip(self._pool.windows, ending, strict=True) if part in stored.parts]

    def finish(self, load: Load, num_good: int) -> None:
        """Publish the good blocks, release the rest; a bad record ends the run and is not tried again."""
        for index, (stored, target) in enumerate(zip(load.blocks, load.targets, strict=True)):
            identity = stored.identity
            del self._by_hash[identity.hash]
            is_good = index < num_good and (0 in stored.parts or self._pool.block_of(identity.hash) is not None)
            block = self._published(stored, target) if is_good else target
            for slots in self._windows(stored):
                if is_good:
                    slots.mark(block)
                slots.release(block)
            if is_good and 0 in stored.parts:
                load.sequence.loaded.add(identity.hash)
            self._pool.release(block)
        if num_good < len(load.blocks):
            load.sequence.tried_loads.add(load.blocks[num_good].identity.hash)
        self._pool.release_all(list(load.held))

    def _published(self, stored: StoredBlock, target: int) -> int:
        """Publish what was read; return the block that has it now, held."""
        identity = stored.identity
        if identity.num_tokens == self._pool.block_tokens:
            return self._pool.register(target, identity.hash, identity.parent, identity.ids)
        return self._pool.register_tail(target, identity.parent, identity.ids)

    def check(self) -> None:
        """Assert that every target is held."""
        for load in self._by_hash.values():
            for target in load.targets:
                assert self._pool.refs(target) >= 1, f"target {target} of a load has no reference"
