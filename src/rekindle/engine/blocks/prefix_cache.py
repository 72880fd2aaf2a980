"""Blocks for requests: found hot, loaded from warm, published when full, handed to the store.

Owns the pool, the arena and the loads in flight; only the engine thread calls it.

    attach   hot full blocks, then warm ones (see `loads`), then the child with the longest common ids, shared
    publish  after the forward pass: newly full blocks get their hashes and are queued for the store, parents first
    detach   the end of a request: the tail gets its hash, references are dropped, everything stays cached
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, root_hash, tail_hash
from rekindle.cache.blocks.pool import BlockPool
from rekindle.cache.blocks.table import BlockTable, Published
from rekindle.engine.blocks.loads import Load, Loads
from rekindle.engine.blocks.save_queue import SaveQueue
from rekindle.engine.request import Request
from rekindle.kv.arena import KVArena
from rekindle.store.warm import StoredBlock, WarmStore

Attached = Literal["ready", "wait", "short", "loading"]


@dataclass(frozen=True, slots=True)
class Head:
    """The block a sequence ends in, full, tail or longer than the sequence, and how much of the sequence it covers."""

    hash: BlockHash
    num_tokens: int


class PrefixCache:
    """Finds, loads, publishes and saves the blocks of requests. `report_load` is called from reader threads."""

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
        min_reuse_ratio: float = 0.0,
        namespace_share: float = 1.0,
    ) -> None:
        self.pool = pool
        self.arena = arena
        self.saving = SaveQueue(pool=pool, arena=arena, store=store)
        self._store = store
        self._fingerprint = fingerprint
        self._secret = secret
        self._min_reuse_tokens = min_reuse_tokens
        self._min_reuse_ratio = min_reuse_ratio
        self._most_of_namespace = max(1, int(namespace_share * pool.num_blocks)) if namespace_share < 1 else None
        self._bounded: set[BlockHash] = set()
        self.loads = Loads(pool=pool, arena=arena, report=report_load)

    def root(self, namespace: str) -> BlockHash:
        """Return the parent of a sequence's first block: model, tenant and store. Any thread."""
        return root_hash(fingerprint=self._fingerprint, namespace=namespace, cache_salt="", secret=self._secret)

    def _bound(self, root: BlockHash) -> None:
        """Set a namespace's quota of the pool before its first block is allocated."""
        if self._most_of_namespace is not None and root not in self._bounded:
            self._bounded.add(root)
            self.pool.set_quota(root, self._most_of_namespace)

    def attach(self, request: Request, computing: Collection[BlockHash], *, alone: bool = True) -> Attached:
        """Give the request the longest stored prefix of its ids.

        "ready": its table holds what was found (possibly nothing). "wait": its next block is being loaded or is in
        `computing`; try again next step. "loading": a load was started for it and will report. "short": its blocks on
        disk do not fit next to other requests (`alone`: there are no others, so the load may use all memory).
        """
        assert not request.table.blocks, "attach comes before any block"
        if request.reuse == "off":
            return "ready"
        self._bound(request.root)
        size = self.pool.block_tokens
        hot = self.pool.try_reuse_prefix(request.root, request.ids)
        following: list[StoredBlock] = []
        if len(hot) < request.num_tokens // size:
            next_hash = request.hash_at(len(hot))
            if next_hash in self.loads or next_hash in computing:
                self.pool.release_all(hot)
                return "wait"
            following = self._warm(request, len(hot))
        rest = request.ids[len(hot) * size : (len(hot) + 1) * size]
        parent = request.parent_of(len(hot))
        child = self.pool.find_child(parent, rest) if len(rest) else None
        if not following and self._store is not None and (child[1] if child else 0) < len(rest):
            nearest = self._store.child(parent, rest)
            if nearest is not None and nearest[1] > (child[1] if child else 0):
                if nearest[0].identity.hash in self.loads:
                    self.pool.release_all(hot)
                    return "wait"
                if nearest[0].identity.hash not in request.tried_loads:
                    following = [nearest[0]]
        if following and not alone:
            fitting = self._fitting(request, following, len(hot))
            if fitting is None:
                self.pool.release_all(hot)
                return "short"
            following = fitting
        if following and self._store is not None and self.loads.start(self._store, request, hot, following):
            return "loading"
        if child is not None:
            self.pool.share(child[0])
        self._adopt(request, hot, child)
        return "ready"

    def share_prompt(self, request: Request, computed: Request) -> None:
        """Give a request the blocks of one that has computed the same prompt; the first to write copies the tail."""
        count, rest = divmod(request.num_prompt, self.pool.block_tokens)
        blocks = computed.table.blocks[: count + (rest > 0)]
        for block in blocks:
            self.pool.share(block)
        self._adopt(request, blocks[:count], (blocks[-1], rest) if rest else None)

    def _fitting(self, request: Request, found: list[StoredBlock], num_held: int) -> list[StoredBlock] | None:
        """Select which of these blocks to read next to other requests; None when they do not fit.

        A request also needs room for its next token, in addition to its `num_held` blocks. Idle work and "load" tasks
        come last: they take at most half of the blocks that nobody holds; a "load" task reads once, as many as fit.
        """
        room = self.pool.num_free + self.pool.num_cached
        if request.task == "load":
            return [] if request.loaded else found[: room // 2]
        if request.background:
            return found if len(found) <= room // 2 else None
        needed = -(-(request.num_tokens + 1) // self.pool.block_tokens) - num_held
        return found if needed <= room else None

    def _warm(self, request: Request, first: int) -> list[StoredBlock]:
        """Locate the full blocks from `first` on disk, up to the first gap."""
        if self._store is None or request.hash_at(first) in request.tried_loads:
            return []
        size = self.pool.block_tokens
        last = request.num_tokens // size
        hashes = [request.hash_at(index) for index in range(first, last)]
        found = self._store.locate(hashes, parent=request.parent_of(first), ids=request.ids[first * size : last * size])
        for index, stored in enumerate(found):
            if stored.identity.hash in self.loads or stored.identity.hash in request.tried_loads:
                return list(found[:index])
        return list(found)

    def _adopt(self, request: Request, hot: list[int], child: tuple[int, int] | None) -> None:
        """Add shared blocks to the table and count the reused tokens; release them if they are too few."""
        size = self.pool.block_tokens
        stored = len(hot) * size + (child[1] if child else 0)
        blocks = [*hot, child[0]] if child else hot
        if stored < self._least(request):
            self.pool.release_all(blocks)
            blocks, stored = [], 0
        if blocks:
            request.table.append_shared(blocks, stored)
            if request.is_turn:
                self.saving.flush_deferred(hot)
        request.num_computed = min(stored, request.num_tokens - (request.task == "generate"))
        if request.times.admitted is not None:
            return  # preempted: it reports the reuse of its first start
        reused = min(stored, request.num_reusable)
        request.warm_tokens = 0
        for index, block in enumerate(blocks):
            covered = min((index + 1) * size, reused) - index * size
            if covered > 0 and self.pool.name(block) in request.loaded:
                request.warm_tokens += covered
        request.hot_tokens = reused - request.warm_tokens

    def _least(self, request: Request) -> float:
        """Return the fewest tokens worth reusing; the ratio does not apply to a request that ran before."""
        ratio = self._min_reuse_ratio if request.times.admitted is None else 0.0
        return max(min(self._min_reuse_tokens, request.num_prompt - 1), ratio * request.num_prompt)

    def prepare(self, request: Request, num_tokens: int) -> bool:
        """Reserve positions [0, num_tokens), copying a shared tail that will be written; False on a shortage."""
        copies = request.table.prepare(num_tokens)
        if copies is None:
            return False
        for copy in copies:
            self.arena.copy_tokens(copy.source, copy.target, copy.num_tokens)
        return True

    def publish(self, request: Request) -> None:
        """Hash the blocks that the last forward pass filled. Private runs (`reuse` off) publish nothing."""
        table = request.table
        num_stored = max(table.num_tokens, request.num_computed)
        if request.reuse == "off":
            table.num_tokens = num_stored
            return
        for published in table.publish(request.ids[:num_stored], request.root):
            self._save(request, published)

    def _save(self, request: Request, published: Published) -> None:
        """Queue a newly hashed block; one that is not part of a turn is deferred until a turn depends on it."""
        if request.is_turn:
            self.saving.add_block(published)
        else:
            self.saving.defer(published)

    def detach(self, request: Request) -> Head:
        """Hash the tail, drop all references; return the head of the stored sequence (the root if it is empty)."""
        table = request.table
        sealed = None
        if table.blocks and request.reuse != "off":
            if request.is_turn:
                self.saving.add_missing(table, request.root)
            sealed = table.seal(request.ids[: table.num_tokens], request.root)
        if sealed is not None:
            self._save(request, sealed)
            head = Head(sealed.identity.hash, table.num_tokens)
        else:
            head = self._head_inside(request)
        table.release()
        return head

    def suspend(self, request: Request) -> None:
        """Drop all references of a request that attaches again later; its tail gets a hash and stays in memory."""
        table = request.table
        if table.blocks and request.reuse != "off":
            sealed = table.seal(request.ids[: table.num_tokens], request.root)
            if sealed is not None:
                self.saving.defer(sealed)
        table.release()

    def _head_inside(self, request: Request) -> Head:
        """Return the head of a sequence that ends with a full block, or inside a longer block that already existed."""
        table = request.table
        last = self.pool.name(table.blocks[-1]) if table.blocks else None
        if last is not None and len(table.names) >= len(table.blocks) - 1:
            return Head(last, table.num_tokens)
        return Head(table.head(request.root), len(table.names) * self.pool.block_tokens)

    def evict_chain(self, root: BlockHash, ids: np.ndarray, hashes: Sequence[BlockHash]) -> int:
        """Evict the blocks of a sequence from memory, last first, up to the first that others hold or extend."""
        freed = 0
        for block in reversed(self._hot_blocks(root, ids, hashes)):
            if not self.pool.evict(block):
                break
            freed += 1
        return freed

    def num_hot_tokens(self, root: BlockHash, ids: np.ndarray, hashes: Sequence[BlockHash]) -> int:
        """Count the leading tokens of a sequence that are in memory under its own hashes."""
        return min(len(self._hot_blocks(root, ids, hashes)) * self.pool.block_tokens, len(ids))

    def _hot_blocks(self, root: BlockHash, ids: np.ndarray, hashes: Sequence[BlockHash]) -> list[int]:
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

    def save_again(self, root: BlockHash, ids: np.ndarray, hashes: Sequence[BlockHash]) -> None:
        """Queue the blocks of a sequence that are in memory and not on disk."""
        self.saving.add_again(self._hot_blocks(root, ids, hashes), root)

    def demote(self, root: BlockHash, ids: np.ndarray, hashes: Sequence[BlockHash], *, num_kept: int) -> None:
        """Make a superseded sequence the first to be evicted, except for its first `num_kept` blocks."""
        for block in reversed(self._hot_blocks(root, ids, hashes)[num_kept:]):
            self.pool.demote(block)

    def check(self) -> None:
        """Assert the invariants of the pool, the loads and the save queue."""
        self.pool.check()
        self.loads.check()
        self.saving.check()

    def new_table(self) -> BlockTable:
        """An empty table on this pool."""
        return BlockTable(self.pool)
