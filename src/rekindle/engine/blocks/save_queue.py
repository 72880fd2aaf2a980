"""Write-behind: blocks and turns on their way from hot memory to the store, in the order they must arrive.

Owns the queue of what the store has not accepted yet. Queued blocks are not pinned: one that is evicted before the
staging buffer has room for it, or cannot be copied there, is counted, and its descendants are not saved. Called by the
engine thread only; never blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable, Published
from rekindle.errors import RekindleError
from rekindle.kv.arena import KVArena
from rekindle.kv.copies import BlockPart
from rekindle.store.commands import Delete, Purge, StoreChange, StoreCommand
from rekindle.store.warm import SavingBlock, SequenceRecord, WarmStore
from rekindle.worker import fail


class SaveQueue:
    """Parents before children, blocks before the turn that depends on them. Without a store nothing is queued."""

    def __init__(self, *, pool: BlockPool, arena: KVArena, store: WarmStore | None) -> None:
        self._pool = pool
        self._arena = arena
        self._store = store
        self._items: deque[Published | StoreCommand] = deque()
        self._queued: set[BlockHash] = set()
        self._deferred: dict[BlockHash, Published] = {}
        # Deletions the store has not carried out yet: blocks on disk may be about to disappear.
        self._ends: list[Future[Any]] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_deferred(self) -> int:
        """Blocks that are saved only when a turn depends on them."""
        return len(self._deferred)

    def add_block(self, published: Published) -> None:
        """Queue a newly hashed block: its first part; those of windows are queued where a turn may be resumed."""
        if self._store is not None:
            self._items.append(published)
            self._queued.add(published.identity.hash)

    def add_parts(self, block: int, parts: Collection[int], root: BlockHash) -> None:
        """Queue those of these window parts of a published block that are not on disk."""
        block_hash, parent = self._pool.name(block), self._pool.parent(block)
        if self._store is None or block_hash is None or parent is None:
            return
        lacking = sorted(parts if self._is_deleting() else set(parts) - self._store.parts(block_hash))
        if lacking:
            identity = BlockIdentity(block_hash, parent, root, self._pool.ids(block))
            self._items.append(Published(block, identity, tuple(lacking)))

    def defer(self, published: Published) -> None:
        """Note a newly hashed block that is saved only once a turn depends on it."""
        if self._store is None:
            return
        self._deferred[published.identity.hash] = published
        if len(self._deferred) > self._pool.num_blocks:
            self._drop_gone()

    def _drop_gone(self) -> None:
        """Forget the deferred blocks that were evicted."""
        deferred = self._deferred.items()
        self._deferred = {
            block_hash: item for block_hash, item in deferred if self._pool.name(item.block) == block_hash
        }

    def flush_deferred(self, blocks: Sequence[int]) -> None:
        """Queue those of these blocks, parents first, that were deferred: a turn depends on them now."""
        for block in blocks if self._deferred else ():
            block_hash = self._pool.name(block)
            item = self._deferred.pop(block_hash, None) if block_hash is not None else None
            if item is not None and item.block == block:
                self.add_block(item)

    def add_missing(self, table: BlockTable, root: BlockHash, *, most: int | None = None) -> None:
        """Queue the full blocks of a sequence, the first `most` (None: all), that are neither on disk nor queued.

        Each was queued when it was published, but a later deletion of an agent, or a failed save, can remove blocks
        that other sequences depend on from the disk. Costs one lookup when nothing is missing.
        """
        if self._store is None:
            return
        names = table.names[:most]
        for index in range(self._num_here(names), len(names)):
            self._add_named(table.blocks[index], table.names[index], table.names[index - 1] if index else root, root)

    def add_again(self, blocks: Sequence[int], root: BlockHash) -> None:
        """Queue those of these blocks, parents first, that are neither on disk nor queued.

        All of them while a deletion is in flight: it may remove them, and the store keeps none twice.
        """
        if self._store is None:
            return
        is_certain = not self._is_deleting()
        for block in blocks:
            block_hash, parent = self._pool.name(block), self._pool.parent(block)
            assert block_hash is not None and parent is not None, f"block {block} has no hash"
            if not (is_certain and (block_hash in self._queued or self._store.num_known([block_hash]))):
                self._add_named(block, block_hash, parent, root)

    def _add_named(self, block: int, block_hash: BlockHash, parent: BlockHash, root: BlockHash) -> None:
        self._deferred.pop(block_hash, None)
        self.add_block(Published(block, BlockIdentity(block_hash, parent, root, self._pool.ids(block))))

    def _num_here(self, hashes: Sequence[BlockHash]) -> int:
        """Count the leading blocks that need not be queued again: all up to the last one on disk or queued.

        0 while a deletion is in flight: it may remove their ancestors.
        """
        assert self._store is not None
        if self._is_deleting():
            return 0
        num_here, certain = len(hashes), len(hashes)
        while num_here:
            block_hash = hashes[num_here - 1]
            if block_hash not in self._queued:  # a queued block cannot be in the index yet
                if self._store.contains(block_hash):
                    break
                if not self._store.num_known([block_hash]):
                    certain = num_here - 1
            num_here -= 1
        return certain

    def _is_deleting(self) -> bool:
        """Whether the store has deletions to carry out, those that are queued here included."""
        self._ends = [end for end in self._ends if not end.done()]
        return bool(self._ends) or any(isinstance(item, Delete | Purge) for item in self._items)

    def add(self, command: StoreCommand) -> None:
        """Queue a command: a sequence after its blocks, or its deletion after its last save."""
        if self._store is not None:
            self._items.append(command)

    def pump(self) -> None:
        """Pass on what there is room for: blocks are copied to the staging buffer, turns follow them."""
        store = self._store
        while self._items and store is not None:
            item = self._items[0]
            if isinstance(item, Published):
                if not self._stage(store):
                    return
                continue
            if isinstance(item, SequenceRecord):
                store.save_turn(item)
            else:
                store.submit(item)
                if isinstance(item, Delete | Purge):
                    self._ends.append(item.done)
            self._items.popleft()

    def _stage(self, store: WarmStore) -> bool:
        """Pass on what is still in memory of the blocks before the next command, in one copy; False if there is no room
        for all of them.
        """
        taken: list[tuple[Published, dict[int, int]]] = []
        is_full, takes_blocks = False, store.takes_blocks
        while self._items and isinstance(item := self._items[0], Published):
            block_hash, has_first = item.identity.hash, 0 in item.parts
            if not takes_blocks:
                store.postpone()
            elif self._pool.name(item.block) == block_hash:
                parts = [part for part in item.parts if self._arena.has(part, item.block)]
                rows = store.staging.take(parts)
                if rows is None:
                    is_full = True
                    break
                taken.append((item, rows))
            elif has_first:
                store.skip(block_hash)
            self._items.popleft()
            if has_first:
                self._queued.discard(block_hash)
        if taken:
            self._copy(store, taken)
        return not is_full

    def _copy(self, store: WarmStore, taken: Sequence[tuple[Published, dict[int, int]]]) -> None:
        """Copy the bytes of blocks to their rows of the staging buffer, from where they are saved.

        Where that fails, the blocks count as not saved; the next turn that depends on them queues them again.
        """
        try:
            wait = self._arena.copy_out(
                [
                    BlockPart(item.block, part, item.identity.num_tokens, store.staging.payload(part, row))
                    for item, rows in taken
                    for part, row in rows.items()
                ]
            )
        except BaseException:
            for item, rows in taken:
                store.staging.give_back(rows)
                if 0 in item.parts:
                    store.skip(item.identity.hash)
            raise
        store.save_blocks([SavingBlock(item.identity, rows, wait) for item, rows in taken if rows])

    def close(self, error: RekindleError) -> None:
        """Pass on what there is room for; callers waiting for anything left get the error."""
        try:
            self.pump()
        finally:
            for item in self._items:
                refuse(item, error)
            self._items.clear()
            self._queued.clear()

    def drop(self, command: Purge, hashes: Collection[BlockHash]) -> None:
        """Remove from the queue what precedes a purge: the agent's sequences, and blocks with these hashes.

        Deferred blocks that were evicted are forgotten, too.
        """
        self._drop_gone()
        if command not in self._items:
            return
        end = self._items.index(command)
        left = [item for at, item in enumerate(self._items) if at >= end or not _is_of(item, command, hashes)]
        self._items = deque(left)
        self._queued = {item.identity.hash for item in left if isinstance(item, Published) and 0 in item.parts}

    def is_queued(self, block_hash: BlockHash) -> bool:
        """Whether the block waits here for the store."""
        return block_hash in self._queued

    def check(self) -> None:
        """Assert that `_queued` matches the queue, and that deferred blocks are bounded and kept by their hash."""
        waiting = {item.identity.hash for item in self._items if isinstance(item, Published)}
        assert self._queued <= waiting, f"{len(self._queued - waiting)} blocks are marked as queued and are not"
        assert all(key == item.identity.hash for key, item in self._deferred.items()), "deferred under another hash"
        assert self.num_deferred <= self._pool.num_blocks, f"{self.num_deferred} blocks are deferred"


def _is_of(item: Published | StoreCommand, command: Purge, hashes: Collection[BlockHash]) -> bool:
    if isinstance(item, Published):
        return item.identity.hash in hashes
    return isinstance(item, SequenceRecord) and (item.namespace, item.agent) == (command.namespace, command.agent)


def refuse(item: Published | StoreCommand, error: RekindleError) -> None:
    """Fail a command that never reached the store."""
    if isinstance(item, StoreChange):
        fail(item.done, error)
