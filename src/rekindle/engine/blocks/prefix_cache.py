"""Blocks for sequences: found hot, loaded from warm, published when full, handed to the store.

Owns the pool, the arena and the loads in flight; only the engine thread calls it. A sequence resumes where its match
ends, or before, where the parts that end are at hand (see `rekindle.parts`).

    attach   hot full blocks, then warm ones (see `loads`), then the child with the longest common ids, shared
    publish  after the forward pass: newly full blocks get their hashes and are queued for the store, parents first
    detach   the end of a sequence: the tail gets its hash, references are dropped, everything stays cached
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, root_hash, tail_hash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable, Published
from rekindle.engine.blocks.ending_parts import EndingParts
from rekindle.engine.blocks.loads import Load, Loads
from rekindle.engine.blocks.save_queue import SaveQueue
from rekindle.engine.blocks.score_cache import ScoreCache
from rekindle.engine.sequence import Ended, Head, Sequence
from rekindle.kv.arena import KVArena
from rekindle.store.warm import StoredBlock, WarmStore

Attached = Literal["ready", "wait", "short", "loading"]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What continues a sequence's hot blocks: blocks to load, else a child and how many of its ids are the sequence's.

    `outcome` other than "ready" says why the sequence has to wait.
    """

    outcome: Literal["ready", "wait", "short"]
    on_disk: list[StoredBlock] = field(default_factory=list)
    child: tuple[int, int] | None = None
    num_matched: int = 0  # tokens that are stored, in memory and on disk


@dataclass(frozen=True, slots=True)
class _Match:
    """What is stored of a sequence: hot blocks, then those on disk; a hot child instead, if it has one."""

    hot: list[int]
    on_disk: list[StoredBlock]
    child: tuple[int, int] | None
    num_tokens: int


class PrefixCache:
    """Finds, loads, publishes and saves the blocks of sequences. `report_load` is called from reader threads."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        arena: KVArena,
        store: WarmStore | None,
        fingerprint: bytes,
        secret: bytes,
        min_reuse_tokens: int,
        report_load: Callable[[Load, int], None],
        namespace_share: float = 1.0,
    ) -> None:
        self.pool = pool
        self.arena = arena
        self.saving = SaveQueue(pool=pool, arena=arena, store=store)
        self._store = store
        self._fingerprint = fingerprint
        self.secret = secret
        self._min_reuse_tokens = min_reuse_tokens
        self._most_of_namespace = max(1, int(namespace_share * pool.num_blocks)) if namespace_share < 1 else None
        self._bounded: set[BlockHash] = set()
        self.loads = Loads(pool=pool, arena=arena, report=report_load)
        self.ending = EndingParts(pool, arena.layout)
        self.scores = ScoreCache()

    def root(self, namespace: str) -> BlockHash:
        """Return the parent of a sequence's first block: model, tenant and store. Any thread."""
        return root_hash(fingerprint=self._fingerprint, namespace=namespace, cache_salt="", secret=self.secret)

    def _bound(self, root: BlockHash) -> None:
        """Set a namespace's quota of the pool before its first block is allocated."""
        if self._most_of_namespace is not None and root not in self._bounded:
            self._bounded.add(root)
            self.pool.set_quota(root, self._most_of_namespace)

    def attach(self, sequence: Sequence, computing: Collection[BlockHash], *, alone: bool = True) -> Attached:
        """Give the sequence the longest stored prefix of its ids.

        "ready": its table holds what was found (possibly nothing). "wait": its next block is being loaded or is in
        `computing`; try again next step. "loading": a load was started for it and will report. "short": its blocks on
        disk do not fit next to other sequences (`alone`: there are no others, so the load may use all memory).
        """
        assert not sequence.table.blocks, "attach comes before any block"
        if sequence.reuse == "off":
            return "ready"
        self.scores.fill(sequence)
        if self._is_scored_elsewhere(sequence, computing):
            return "wait"
        hot = self.pool.try_reuse_prefix(sequence.root, sequence.ids)
        found = self._find_rest(sequence, hot, computing, alone=alone)
        if found.outcome != "ready":
            self.pool.release_all(hot)
            return found.outcome
        held = hot if found.child is None else [*hot, found.child[0]]
        if found.child is not None:
            self.pool.share(found.child[0])
        if found.on_disk and self.load(sequence, held, found.on_disk):
            return "loading"
        self._adopt(sequence, hot, found.child, num_stored=0 if found.on_disk else found.num_matched)
        return "ready"

    def _find_rest(
        self, sequence: Sequence, hot: list[int], computing: Collection[BlockHash], *, alone: bool
    ) -> Attachment:
        """Find what continues the hot blocks of a sequence, without taking a reference."""
        match = self._match(sequence, hot, computing)
        if match is None:
            return Attachment("wait")
        usable = self._usable(sequence, match.num_tokens)
        wanted = self.ending.to_load(match.hot, match.on_disk, usable, lambda block: self._stored(sequence, block))
        on_disk = wanted.blocks
        if any(stored.identity.hash in self.loads for stored in on_disk):
            return Attachment("wait")
        if on_disk and not self.ending.reserve(wanted):
            return Attachment("ready", [], match.child) if alone else Attachment("short")
        if on_disk and not alone:
            fitting = self._fitting(sequence, on_disk, len(hot))
            if fitting is None:
                return Attachment("short")
            on_disk = fitting
        return Attachment("ready", on_disk, match.child, match.num_tokens if on_disk == wanted.blocks else 0)

    def _is_scored_elsewhere(self, sequence: Sequence, computing: Collection[BlockHash]) -> bool:
        """Whether another sequence is computing the block with the first score that this one lacks."""
        if sequence.scores is None or sequence.scores.is_complete:
            return False
        index = sequence.scores.num_known // sequence.block_tokens
        return index < sequence.num_prompt // sequence.block_tokens and sequence.hash_at(index) in computing

    def _usable(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many matched tokens a resume point can have. Windows and states have no rows before it, which a
        score may need."""
        if sequence.is_scored and self.ending:
            num_tokens = min(num_tokens, sequence.num_resumable)
        return self.ending.usable(num_tokens, sequence.num_resumable)

    def _match(self, sequence: Sequence, hot: list[int], computing: Collection[BlockHash]) -> _Match | None:
        """Find how much of a sequence is stored after its full hot blocks; None if its next block is on its way."""
        size, num_hot, on_disk = self.pool.block_tokens, len(hot), list[StoredBlock]()
        if num_hot < sequence.num_tokens // size:
            next_hash = sequence.hash_at(num_hot)
            if next_hash in self.loads or next_hash in computing:
                return None
            on_disk = self._warm(sequence, num_hot)
        rest = sequence.ids[num_hot * size : (num_hot + 1) * size]
        child = self.pool.find_child(sequence.parent_of(num_hot), rest) if len(rest) else None
        num_shared = child[1] if child and not on_disk else 0
        nearest = self._nearest_on_disk(sequence, num_hot + len(on_disk), num_shared)
        if nearest is not None and nearest[0].identity.hash in self.loads:
            if not on_disk:
                return None
            nearest = None
        num_tokens = (num_hot + len(on_disk)) * size + (num_shared if nearest is None else nearest[1])
        found = on_disk if nearest is None else [*on_disk, nearest[0]]
        return _Match(hot if child is None or found else [*hot, child[0]], found, child, num_tokens)

    def _nearest_on_disk(self, sequence: Sequence, index: int, num_shared: int) -> tuple[StoredBlock, int] | None:
        """Find the block on disk that shares more ids than that with block `index`, which may have its window's end."""
        size = self.pool.block_tokens
        rest = sequence.ids[index * size : (index + 1) * size]
        nearest = self.stored_child(sequence.parent_of(index), rest) if num_shared < len(rest) else None
        if nearest is None or nearest[1] <= num_shared or nearest[0].identity.hash in sequence.tried_loads:
            return None
        return nearest

    def _stored(self, sequence: Sequence, block: int) -> StoredBlock | None:
        """Look up a hot block on disk, unless the sequence found it damaged there."""
        block_hash = self.pool.name(block)
        return None if block_hash is None or block_hash in sequence.tried_loads else self.stored(block_hash)

    def stored(self, block_hash: BlockHash) -> StoredBlock | None:
        """Where a block is on disk; None if it is not."""
        return None if self._store is None else self._store.stored(block_hash)

    def stored_child(self, parent: BlockHash, ids: np.ndarray) -> tuple[StoredBlock, int] | None:
        """The block on disk after a parent that shares the most of these ids, and how many."""
        return None if self._store is None else self._store.child(parent, ids)

    def load(self, sequence: Sequence, held: list[int], blocks: list[StoredBlock]) -> bool:
        """Read blocks for a sequence, which follow those `held`; False without room for one. It will report."""
        self._bound(sequence.root)
        return self._store is not None and self.loads.start(self._store, sequence, held, blocks)

    def share_prompt(self, sequence: Sequence, computed: Sequence) -> None:
        """Give a sequence the blocks of one that has computed the same prompt; the first to write copies the tail."""
        count, rest = divmod(sequence.num_prompt, self.pool.block_tokens)
        blocks = computed.table.blocks[: count + (rest > 0)]
        for block in blocks:
            self.pool.share(block)
        self._adopt(sequence, blocks[:count], (blocks[-1], rest) if rest else None)

    def _fitting(self, sequence: Sequence, found: list[StoredBlock], num_held: int) -> list[StoredBlock] | None:
        """Select which of these blocks to read next to other sequences; None when they do not fit.

        A sequence also needs room for its next token, in addition to its `num_held` blocks. Idle work and "load" tasks
        come last: they take at most half of the blocks that nobody holds; a "load" task reads once, as many as fit.
        """
        room = self.pool.num_free + self.pool.num_cached
        if sequence.task == "load":
            return [] if sequence.loaded else found[: room // 2]
        if sequence.task == "idle":
            return found if len(found) <= room // 2 else None
        needed = -(-(sequence.num_tokens + 1) // self.pool.block_tokens) - num_held
        return found if needed <= room else None

    def _warm(self, sequence: Sequence, first: int) -> list[StoredBlock]:
        """Locate the full blocks from `first` on disk, up to the first gap."""
        if self._store is None or sequence.hash_at(first) in sequence.tried_loads:
            return []
        size = self.pool.block_tokens
        last = sequence.num_tokens // size
        hashes = [sequence.hash_at(index) for index in range(first, last)]
        ids = sequence.ids[first * size : last * size]
        found = self._store.locate(hashes, parent=sequence.parent_of(first), ids=ids)
        for index, stored in enumerate(found):
            if stored.identity.hash in self.loads or stored.identity.hash in sequence.tried_loads:
                return list(found[:index])
        return list(found)

    def _adopt(self, sequence: Sequence, hot: list[int], child: tuple[int, int] | None, *, num_stored: int = 0) -> None:
        """Add shared blocks to the table, up to where they can be resumed, and count the reused tokens; release them if
        they are too few. With those on disk, `num_stored` tokens are stored.
        """
        size = self.pool.block_tokens
        matched = len(hot) * size + (child[1] if child else 0)
        blocks = [*hot, child[0]] if child else hot
        position = self.ending.resume_at(blocks, self._usable(sequence, matched))
        stored = position if position >= min(self._min_reuse_tokens, sequence.num_prompt - 1) else 0
        num_stored = max(num_stored, matched)
        is_early = self.ending.is_early(position, num_stored, sequence.num_resumable)
        sequence.note_resumed(stored, num_matched=num_stored if is_early else stored)
        if stored < matched:
            self.pool.release_all(blocks[-(-stored // size) :])
            blocks = blocks[: -(-stored // size)]
        if blocks:
            sequence.table.append_shared(blocks, stored)
            if sequence.saves_all:
                self.saving.flush_deferred(blocks[: stored // size])
        sequence.num_computed = min(stored, sequence.num_resumable)
        if sequence.num_preemptions:
            return  # preempted: it reports the reuse of its first start
        sequence.note_reused(min(stored, sequence.num_reusable), map(self.pool.name, blocks))

    def prepare(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve positions [0, num_tokens), copying a shared tail that will be written; False on a shortage."""
        self._bound(sequence.root)
        copies = sequence.table.prepare(num_tokens, sequence.resume_points, root=sequence.root)
        if copies is None:
            return False
        for copy in copies:
            self.arena.copy_tokens(copy.source, copy.target, copy.num_tokens)
        return True

    def publish(self, sequence: Sequence) -> None:
        """Hash the blocks that the last forward pass filled. Private runs (`reuse` off) publish nothing."""
        table = sequence.table
        num_stored = max(table.num_tokens, sequence.num_computed)
        if sequence.reuse == "off":
            table.num_tokens = num_stored
            table.end_parts()
            return
        before = table.num_tokens
        for published in table.publish(sequence.ids[:num_stored], sequence.root):
            self._save(sequence, published)
        self.ending.mark(table, [at for at in sequence.resume_points if before < at <= num_stored])
        table.end_parts()

    def _save(self, sequence: Sequence, published: Published) -> None:
        """Queue a newly hashed block; one that need not be saved is deferred until a turn depends on it."""
        if sequence.saves_all:
            self.saving.add_block(published)
        else:
            self.saving.defer(published)

    def end(self, sequence: Sequence, *, is_remembered: bool) -> Ended:
        """Detach a sequence that ends; return what is stored of it. Remembered is only what has a token."""
        table = sequence.table
        ids, hashes = sequence.ids[: table.num_tokens].copy(), tuple(table.names)
        return Ended(ids, hashes, self.detach(sequence, is_remembered=is_remembered and len(ids) > 0))

    def detach(self, sequence: Sequence, *, is_remembered: bool = False) -> Head:
        """Hash the tail, drop all references; return the head of the stored sequence (the root if it is empty).

        Window parts are saved only if it `is_remembered` as a turn, which covers them.
        """
        table = sequence.table
        sealed = None
        if table.blocks and sequence.reuse != "off":
            if sequence.is_turn:
                self.saving.add_missing(table, sequence.root, most=sequence.seen_blocks)
            sealed = table.seal(sequence.ids[: table.num_tokens], sequence.root)
        self._mark_end(table)
        if sealed is not None:
            self._save(sequence, sealed)
            head = Head(sealed.identity.hash, table.num_tokens)
        else:
            head = self._head_inside(sequence)
            if sequence.saves_all and table.blocks and head.hash == self.pool.name(table.blocks[-1]):
                self.saving.add_again(table.blocks[-1:], sequence.root)  # it may be deferred, or deleted with its agent
        if is_remembered:
            most, seen = table.num_tokens, sequence.seen_blocks
            end = most if seen is None else min(most, seen * self.pool.block_tokens)
            points = [at for at in sequence.resume_points if at <= end]
            self._save_windows(table.blocks, [*points, end] if end else [], sequence.root)
        table.release()
        return head

    def _mark_end(self, table: BlockTable) -> None:
        """Keep what resumes a sequence at its end, also one that continues it from there."""
        self.ending.mark(table, [table.num_tokens, table.num_tokens + 1])

    def _save_windows(self, blocks: list[int], positions: list[int], root: BlockHash) -> None:
        """Queue the window parts that these resume points need, as far as they are in memory."""
        for index, parts in self.ending.needed(blocks, positions):
            self.saving.add_parts(blocks[index], parts, root)

    def suspend(self, sequence: Sequence) -> None:
        """Drop all references of a sequence that attaches again later; its tail gets a hash and stays in memory."""
        table = sequence.table
        if table.blocks and sequence.reuse != "off":
            sealed = table.seal(sequence.ids[: table.num_tokens], sequence.root)
            self._mark_end(table)
            if sealed is not None:
                self.saving.defer(sealed)
        table.release()

    def _head_inside(self, sequence: Sequence) -> Head:
        """Return the head of a sequence that ends with a full block, or inside a longer block that already existed."""
        table = sequence.table
        last = self.pool.name(table.blocks[-1]) if table.blocks else None
        if last is not None and len(table.names) >= len(table.blocks) - 1:
            return Head(last, table.num_tokens)
        return Head(table.head(sequence.root), len(table.names) * self.pool.block_tokens)

    def evict_chain(self, root: BlockHash, ids: np.ndarray, hashes: tuple[BlockHash, ...]) -> int:
        """Evict the blocks of a sequence from memory, last first, up to the first that others hold or extend."""
        return sum(1 for _ in takewhile(self.pool.evict, reversed(self._hot_blocks(root, ids, hashes))))

    def num_hot_tokens(self, root: BlockHash, ids: np.ndarray, hashes: tuple[BlockHash, ...]) -> int:
        """Count the leading tokens of a sequence that are in memory under its own hashes."""
        return min(len(self._hot_blocks(root, ids, hashes)) * self.pool.block_tokens, len(ids))

    def _hot_blocks(self, root: BlockHash, ids: np.ndarray, hashes: tuple[BlockHash, ...]) -> list[int]:
        """Return the leading blocks of a sequence in memory, its tail included; does not update recency."""
        size, blocks = self.pool.block_tokens, []
        rest = ids[len(hashes) * size :]
        tail = [tail_hash(hashes[-1] if hashes else root, rest)] if len(rest) else []
        parent = root
        for index, block_hash in enumerate([*hashes, *tail]):
            block = self.pool.peek(block_hash, ids[index * size : (index + 1) * size], parent=parent)
            if block is None:
                break
            blocks.append(block)
            parent = block_hash
        return blocks

    def save_again(self, root: BlockHash, ids: np.ndarray, hashes: tuple[BlockHash, ...], head: BlockHash) -> None:
        """Queue the blocks of a sequence that are in memory and not on disk, up to its head: maybe a longer block."""
        blocks, last = self._hot_blocks(root, ids, hashes), self.pool.block_of(head)
        if last is not None and last not in blocks and len(blocks) == len(hashes):
            blocks.append(last)
        self.saving.add_again(blocks, root)
        self._save_windows(blocks, [len(ids)], root)

    def demote(self, root: BlockHash, ids: np.ndarray, hashes: tuple[BlockHash, ...], *, num_kept: int) -> None:
        """Make a superseded sequence the first to be evicted, except for its first `num_kept` blocks."""
        for block in reversed(self._hot_blocks(root, ids, hashes)[num_kept:]):
            self.pool.demote(block)

    def check(self) -> None:
        """Assert the invariants of the pool, the loads, the save queue and the scores."""
        self.pool.check()
        self.loads.check()
        self.saving.check()
        self.scores.check()

    def new_table(self) -> BlockTable:
        """An empty table on this pool."""
        return BlockTable(self.pool)
