"""The bookkeeping of the hot tier: which blocks are free, held, or cached for reuse.

Owns reference counts; `free` has the free blocks, `contents` the contents of the others, `eviction` the eviction order.
Does not know the bytes of a block, nor which table holds it. All state is in arrays. One thread owns a pool.

    free ──allocate──▶ private ──register, register_tail──▶ published ──last release──▶ cached ──evict, expire──▶ free
                          └──────last release──▶ free            ◀────────share────────────┘

Invariants: free + cached + held = all. A published block is never written. A hash belongs to one block at most, and a
lookup by hash succeeds only if the token ids agree too. A cached block is evicted only if it has no child in the pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import index
from typing import Any

from rekindle.cache.blocks.columns import ID_BYTES, FreeList
from rekindle.cache.blocks.contents import BlockContents, BlockCopy, HashFn, check_hash
from rekindle.cache.blocks.hashing import BlockHash, Ids, TokenIds, block_hash, id_bytes, tail_hash, token_ids
from rekindle.cache.blocks.windows import WindowSlots
from rekindle.cache.eviction.order import EvictionOrder


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens, by index. All operations are O(1) or O(log num_blocks).

        from rekindle.cache import BlockPool, block_hash, root_hash

        pool = BlockPool(num_blocks=8, block_tokens=4)
        root = root_hash(fingerprint=b"", namespace="", cache_salt="", secret=b"")
        block, ids = pool.allocate(), [1, 2, 3, 4]
        block = pool.register(block, block_hash(root, ids), root, ids)
        pool.release(block)
        assert pool.try_reuse_prefix(root, [1, 2, 3, 4, 5]) == [block]
        print(pool)

    The least recently used cached leaf is evicted; uses are counted, or timed by `clock`. `ttl` is a lifetime from the
    last use, in units of the clock, enforced by `expire`. `on_evict` is called with the hash of each evicted or expired
    block; it must not call the pool. `windows` say where parts that end are.

    Ids are arrays u32 [n]; other integer arrays and sequences of ints are copied into one. ValueError, with no effect,
    for a block that the pool does not have, one that is free but must be held, one that is already published, and for
    invalid hashes, ids and counts.

    Hashes other than BLAKE2b-256 are allowed: ids and parents are compared, so collisions cost reuse but never yield
    other ids. Roots must be strong hashes, as from `root_hash`, that no block has.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        clock: Callable[[], float] | None = None,
        ttl: float | None = None,
        on_evict: Callable[[BlockHash], None] | None = None,
        hash_fn: HashFn = block_hash,
        tail_hash_fn: HashFn = tail_hash,
        windows: Sequence[WindowSlots] = (),
    ) -> None:
        if not (_is_count(num_blocks, 1) and _is_count(block_tokens, 1)):
            raise ValueError(f"a pool needs one block of one token at least, not {num_blocks} of {block_tokens} tokens")
        num_blocks, block_tokens = index(num_blocks), index(block_tokens)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.windows = tuple(windows)
        self.hash_fn = hash_fn
        self.tail_hash_fn = tail_hash_fn
        self._on_evict = on_evict
        self._free = FreeList(num_blocks)
        self._refs = [0] * num_blocks
        self._contents = BlockContents(num_blocks, block_tokens)
        self._order = EvictionOrder(capacity=num_blocks, ttl=ttl)  # every published block
        self._clock = clock
        self._use: Callable[[], float] = clock or count(1).__next__
        self._group_of_root: dict[BlockHash, int] = {}  # of roots with a quota; all others are group 0
        self.num_evictions = 0  # to make room; `evict` and `expire` do not count

    def __repr__(self) -> str:
        held = f"{self.num_free:,} free, {self.num_cached:,} cached, {self.num_held:,} held"
        return f"<BlockPool of {self.num_blocks:,} blocks of {self.block_tokens} tokens: {held}>"

    @property
    def num_free(self) -> int:
        """Number of blocks neither held nor published."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks published and not held."""
        return self._order.num_idle

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one reference."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the pool."""
        return sys.getsizeof(self._refs) + self._free.nbytes + self._contents.nbytes + self._order.nbytes

    def refs(self, block: int) -> int:
        """Return the number of references on a block."""
        return self._refs[self._known(block)]

    def name(self, block: int) -> BlockHash | None:
        """Return the hash of a published block, full or tail; None for an unpublished one."""
        try:
            if block >= 0:
                return self._contents.hash(block)
        except (IndexError, TypeError):
            pass
        raise self._unknown(block)

    def parent(self, block: int) -> BlockHash | None:
        """Return the hash of a published block's parent, which may be a root; None for an unpublished block."""
        return self._contents.parent(self._known(block))

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the token ids of a published block; empty for an unpublished one."""
        return self._contents.ids(self._known(block))

    def is_private(self, block: int) -> bool:
        """Return whether the block has a single holder, which may write it."""
        try:
            if block >= 0:
                return self._refs[block] == 1 and block not in self._contents
        except (IndexError, TypeError):
            pass
        raise self._unknown(block)

    def allocate(self) -> int | None:
        """Return a private block, evicting the least recently used leaf if none is free; None is a shortage."""
        if self._free:
            block: int | None = self._free.pop()
        elif (block := self._order.pop(None if self._clock is None else self._clock())) is not None:
            self._empty(block)
            self.num_evictions += 1
        if block is not None:
            self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int] | None:
        """Return `count` private blocks, or None and allocate nothing if there are too few."""
        if not _is_count(count, 0):
            raise ValueError(f"count must be a whole number from 0 up, not {count!r}")
        if count > self.num_free + self.num_cached:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            block = self.allocate()
            if block is None:  # cached ancestors of held blocks cannot be evicted
                self.release_all(blocks)
                return None
            blocks.append(block)
        return blocks

    def copy_on_write(self, block: int, num_tokens: int) -> BlockCopy | None:
        """Return the copy of the first tokens of `block` to a private block that can be written in its place.

        A private block is its own target, with nothing to copy. The reference on the source stays with its holder:
        release it once the copy is made. None is a shortage.
        """
        self._check_held(block)
        if not (_is_count(num_tokens, 0) and num_tokens <= self.block_tokens):
            raise ValueError(f"num_tokens must be from 0 to {self.block_tokens}, not {num_tokens!r}")
        if self.is_private(block):
            return BlockCopy(block, block, 0)
        target = self.allocate()
        return None if target is None else BlockCopy(block, target, num_tokens)

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or cached."""
        refs = self._refs
        try:
            num_refs = refs[block]
        except (IndexError, TypeError):
            raise self._unknown(block) from None
        if block < 0:
            raise self._unknown(block)
        if not num_refs:
            if block not in self._contents:
                raise ValueError(f"block {block} is free")
            self._order.hold(block)
        refs[block] = num_refs + 1

    def release(self, block: int) -> None:
        """Release one reference; with the last one a published block becomes cached, any other free."""
        refs = self._refs
        try:
            num_refs = refs[block]
        except (IndexError, TypeError):
            raise self._unknown(block) from None
        if num_refs < 1 or block < 0:
            self._check_held(block)
        if num_refs == 1:
            if block not in self._contents:
                for slots in self.windows:
                    slots.drop(block)
                self._free.append(block)
            else:
                self._order.release(block, self._use())  # raises for an invalid time, before any change
        refs[block] = num_refs - 1

    def release_all(self, blocks: Iterable[int]) -> None:
        """Release each in turn, up to the first that `release` refuses."""
        for block in blocks:
            self.release(block)

    def register(self, block: int, name: BlockHash, parent: BlockHash, ids: Ids) -> int:
        """Publish a full block and return the one to use from now on.

        Register parents first: `parent` is a root, or the hash of the block that these ids follow, which the caller
        holds. A hash that has children but no block counts as a root, and no block can take it while it has them.

        If a block with hash `name`, this parent and these ids exists, `block` is released and the existing one is
        shared and returned. If that block has another parent or ids (a collision), if a sibling has these ids under
        another hash, or if the hash is a root's, `block` stays unpublished and is returned.
        """
        data = id_bytes(ids)
        if len(data) != self.block_tokens * ID_BYTES:
            raise ValueError(f"a full block holds {self.block_tokens} ids, not {len(ids)}")
        check_hash(parent)
        return self._publish(block, name, parent, data)

    def register_tail(self, block: int, parent: BlockHash, ids: Ids) -> int:
        """Publish a partial block, so that it is cached and never written again; returns a block like `register`."""
        ids = token_ids(ids)
        if not 0 < len(ids) < self.block_tokens:
            raise ValueError(
                f"a tail of blocks of {self.block_tokens} holds fewer ids, and one at least: not {len(ids)}"
            )
        check_hash(parent)
        return self._publish(block, self.tail_hash_fn(parent, ids), parent, id_bytes(ids))

    def find(self, name: BlockHash, ids: Ids, *, parent: BlockHash | None = None) -> int | None:
        """Return the block with the hash `name` and these ids, and record a use; it is not shared.

        With a `parent`, it must be that parent's child; pass it when following a chain whose hashes could collide.
        """
        block = self._contents.match(name, id_bytes(ids), parent)
        if block is not None and not self._refs[block]:
            self._order.touch(block, self._use())
        return block

    def peek(self, name: BlockHash, ids: Ids, *, parent: BlockHash | None = None) -> int | None:
        """As `find`, but without recording a use, so that counting cached blocks does not keep them cached."""
        return self._contents.match(name, id_bytes(ids), parent)

    def find_child(self, parent: BlockHash, ids: Ids) -> tuple[int, int] | None:
        """Return the child of `parent`, full or tail, with the most leading ids in common, and how many; not shared.

        Ties go to the one registered last; None if no child shares the first id. Costs about log2 of the children.
        """
        return self._contents.find_child(parent, token_ids(ids)[: self.block_tokens].tobytes())

    def try_reuse_prefix(self, root: BlockHash, ids: Ids) -> list[int]:
        """Share and return the full blocks of the longest cached prefix of `ids`; their release records the use."""
        check_hash(root)
        blocks = self._contents.prefix(root, token_ids(ids), self.hash_fn)
        for block in blocks:
            self.share(block)
        return blocks

    def demote(self, block: int) -> bool:
        """Make a cached block the next leaf to evict, until it is used; False if it is held or unpublished.

        Demote a chain from its end: a block with children waits for them.
        """
        return self._known(block) in self._contents and self._order.demote(block)

    def evict(self, block: int) -> bool:
        """Free a cached block that has no child in the pool; False, with no effect, for any other."""
        if self._known(block) not in self._contents or self._refs[block] or not self._order.is_leaf(block):
            return False
        self._order.remove(block)
        self._empty(block)
        self._free.append(block)
        return True

    def expire(self, now: float) -> int:
        """Free the expired cached leaves, then expired blocks that became leaves; return how many were freed."""
        num_expired = 0
        while (block := self._order.pop_expired(now)) is not None:
            self._empty(block)
            self._free.append(block)
            num_expired += 1
        return num_expired

    def set_quota(self, root: BlockHash, most: int | None) -> None:
        """Evict first from a root that has more than `most` blocks; None lifts the quota.

        The same share limits its slots of `windows`.
        Set it before the first block of a namespace: existing blocks do not count.
        """
        check_hash(root)
        if most is not None and not _is_count(most, 0):
            raise ValueError(f"most must be None or a whole number from 0 up, not {most!r}")
        group = self._group_of_root.setdefault(root, len(self._group_of_root) + 1)
        self._order.set_quota(group, most)
        for slots in self.windows:
            share = None if most is None else -(-most * (slots.num_slots - 1) // self.num_blocks)
            slots.set_quota(group, share)

    def group(self, root: BlockHash | None) -> int:
        """Return the number under which quotas count what follows a root; 0 for None, and for a root without one."""
        return 0 if root is None else self._group_of_root.get(root, 0)

    def block_of(self, name: BlockHash) -> int | None:
        """Return the block with the hash `name`, whatever its ids; does not update recency."""
        return self._contents.find(name)

    def idle_blocks(self) -> list[int]:
        """Return all cached blocks."""
        return [block for block in self._contents.blocks() if not self._refs[block]]

    def take_used_free(self) -> list[int]:
        """Return the free blocks that may still hold data: those allocated since this last returned them."""
        return self._free.take_used()

    def check(self) -> None:
        """Assert that all state agrees with the reference counts and contents."""
        self._order.check()
        groups = {block: self._order.group(block) for block in self._contents.blocks()}
        for slots in self.windows:
            slots.check([block for block, refs in enumerate(self._refs) if refs or block in groups], groups)
        self._contents.check(self.hash_fn, self.tail_hash_fn)
        self._free.check({block for block, refs in enumerate(self._refs) if not refs and block not in self._contents})
        assert len(self._contents) == len(self._order), "the order differs from the published blocks"
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} has {refs} references"
            if block in self._contents:
                assert block in self._order, f"block {block} is published, but not in the order"
                assert self._order.is_held(block) == bool(refs), f"block {block}: {refs} references and held disagree"
                assert self._order.parent(block) == self._contents.above(block), f"block {block} has another parent"

    def _known(self, block: int) -> int:
        """Return the block if the pool has it; ValueError otherwise."""
        if not (_is_count(block, 0) and block < self.num_blocks):
            raise self._unknown(block)
        return block

    def _unknown(self, block: object) -> ValueError:
        return ValueError(f"blocks of this pool are whole numbers from 0 to {self.num_blocks - 1}, not {block!r}")

    def _check_held(self, block: int) -> None:
        try:
            if block >= 0 and self._refs[block] > 0:
                return
        except (IndexError, TypeError):
            pass
        raise ValueError(f"block {self._known(block)} is not held")

    def _publish(self, block: int, name: BlockHash, parent: BlockHash, data: bytes) -> int:
        self._check_held(block)
        if self._contents.find(name) is None:
            if block in self._contents:
                raise ValueError(f"block {block} is published and cannot take another hash")
            if self._contents.add(block, name, parent, data):
                self._place(block, parent)
            return block
        existing = self._contents.match(name, data, parent)
        if existing is None or existing == block or (self.windows and self._refs[block] > 1):  # others hold its parts
            return block
        self.share(existing)
        for slots in self.windows:
            slots.move(block, existing)
        self.release(block)
        return existing

    def _place(self, block: int, parent: BlockHash) -> None:
        """Add a newly published block to the order, below its parent."""
        above = self._contents.above(block)
        group = 0
        if self._group_of_root:
            group = self._order.group(above) if above >= 0 else self.group(parent)
        self._order.add(block, above, group=group)

    def _empty(self, block: int) -> None:
        """Drop the contents of a cached block that was already removed from the order."""
        for slots in self.windows:
            slots.drop(block)
        removed = self._contents.remove(block)
        if self._on_evict is not None:
            self._on_evict(removed)


def _is_count(value: Any, least: int) -> bool:
    """Return whether this is a whole number from `least` up."""
    try:
        return index(value) >= least
    except TypeError:
        return False
