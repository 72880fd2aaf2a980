"""Purging hot memory: overwrite what is left of an agent.

Dropping hashes is not enough: rows of free blocks keep the bytes of their last owner, and so do the rows of a partly
filled block past its tokens. A purge evicts every block that only the purged agent used, every block that no remembered
sequence uses (its owner is unknown: a superseded tail, a cancelled prompt), and then overwrites all unused rows. Blocks
that a running request holds stay: they are the agent's new memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.engine.core.interface import Core
from rekindle.store.commands import Purge


@dataclass(frozen=True, slots=True)
class HotPurge:
    """An agent to purge: `own` are the blocks of its branches, `claimed` those of all other branches (at least their
    heads), `idle` those without a reference at the time of the request; `breakpoints` are the commands for its
    breakpoints."""

    command: Purge
    own: frozenset[BlockHash]
    claimed: frozenset[BlockHash]
    idle: frozenset[BlockHash]
    breakpoints: tuple[Purge, ...] = ()


def withdraw(core: Core, purge: HotPurge) -> None:
    """Remove the purged blocks that nobody holds from the save queue, so that they never reach the disk."""
    pool = core.cache.pool
    hashes = (purge.own & idle_hashes(pool)) - with_ancestors(pool, purge.claimed)
    core.cache.saving.drop(purge.command, hashes)


def wipe(core: Core, purge: HotPurge) -> int:
    """Remove the purged blocks from memory and from the save queue; return how many free blocks were overwritten."""
    pool, saving = core.cache.pool, core.cache.saving
    kept = with_ancestors(pool, purge.claimed)
    own = (purge.own | core.forget(purge.command.namespace, purge.command.agent)) - kept
    orphaned = {block_hash for block_hash in purge.idle - kept if not saving.is_queued(block_hash)}
    evict_hashes(pool, own | orphaned)
    core.cache.scores.clear()
    saving.drop(purge.command, {block_hash for block_hash in own if pool.block_of(block_hash) is None})
    return _overwrite(core)


def idle_hashes(pool: BlockPool) -> frozenset[BlockHash]:
    """Return the hashes of all blocks that nobody holds."""
    return frozenset(block_hash for block in pool.idle_blocks() if (block_hash := pool.name(block)) is not None)


def with_ancestors(pool: BlockPool, hashes: Iterable[BlockHash]) -> set[BlockHash]:
    """Return the hashes and those of all their ancestors in memory."""
    found: set[BlockHash] = set()
    for first in hashes:
        block_hash: BlockHash | None = first
        while block_hash is not None and block_hash not in found:
            found.add(block_hash)
            block = pool.block_of(block_hash)
            block_hash = None if block is None else pool.parent(block)
    return found


def with_descendants(pool: BlockPool, first: BlockHash) -> set[BlockHash]:
    """Return a hash and those of all cached blocks that follow it. O(cached blocks)."""
    found, others = {first}, set[BlockHash]()
    for block in pool.idle_blocks():
        path, block_hash = list[BlockHash](), pool.name(block)
        while block_hash is not None and block_hash not in found and block_hash not in others:
            path.append(block_hash)
            above = pool.block_of(block_hash)
            block_hash = None if above is None else pool.parent(above)
        (found if block_hash in found else others).update(path)
    return found


def evict_hashes(pool: BlockPool, hashes: Collection[BlockHash]) -> None:
    """Evict the cached blocks with these hashes, children before parents.

    A block that is held, or has a child that stays, stays with its ancestors.
    """
    for first in hashes:
        block_hash: BlockHash | None = first
        while block_hash is not None and block_hash in hashes:
            block = pool.block_of(block_hash)
            parent = None if block is None else pool.parent(block)
            if block is None or not pool.evict(block):
                break
            block_hash = parent


def _overwrite(core: Core) -> int:
    core.settle()  # a step that was launched ahead has written after the tokens that count as stored
    pool, arena = core.cache.pool, core.cache.arena
    free = pool.take_used_free()
    for block in free:
        arena.wipe(block)
    for slots, part in zip(pool.windows, arena.layout.ending, strict=True):
        for row in slots.take_used_free():
            arena.wipe_row(part, row)
    tails = [(block, len(pool.ids(block))) for block in pool.idle_blocks()]
    for block, num_tokens in (*tails, *_last_blocks(core)):
        if num_tokens < pool.block_tokens:
            arena.wipe(block, num_tokens)
    return len(free)


def _last_blocks(core: Core) -> Iterable[tuple[int, int]]:
    """Yield the blocks that running requests may still write, with the number of stored tokens of each."""
    size = core.cache.pool.block_tokens
    running = (request.sequence for request in core.scheduler.running)
    for sequence in (*running, *core.background.holders()):
        table = sequence.table
        for index in range(table.num_tokens // size, len(table.blocks)):
            if core.cache.pool.is_private(table.blocks[index]):
                yield table.blocks[index], max(0, table.num_tokens - index * size)
