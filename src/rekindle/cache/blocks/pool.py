"""The bookkeeping of the hot tier: which block is free, held, or kept under a name for whoever comes next.

Owns reference counts; `free` has the free blocks, `contents` what is in the others, `eviction` who leaves next. Does
not know the bytes of a block, nor whose table holds it. All of it lies in arrays. One thread owns a pool.

    free ──allocate──▶ private ──register, register_tail──▶ named ──last release──▶ cached ──evict, expire──▶ free
                          └──────last release──▶ free          ◀──────share────────────┘

Invariants: free + cached + held = all. A named block is never written. A name is given to one block at most, and a
block is found under it only if its token ids agree too. A cached block leaves only when it has no child in the pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import count
from operator import index
from typing import Any

from rekindle.cache.blocks.contents import BlockContents, HashFn, check_name
from rekindle.cache.blocks.copying import BlockCopy
from rekindle.cache.blocks.free import FreeList
from rekindle.cache.blocks.hashing import BlockHash, Ids, TokenIds, block_hash, id_bytes, tail_hash, token_ids
from rekindle.cache.blocks.id_column import ID_BYTES
from rekindle.cache.eviction.hints import Hints
from rekindle.cache.eviction.order import EvictionOrder
from rekindle.cache.eviction.policies import Policy


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

    `policy` says which cached leaf makes room, by its last use: as counted, or by `clock`. `ttl` is a lifetime from the
    last use, in units of the clock; `expire` ends it. `on_evict` is told each name that leaves the pool, evicted
    or expired; it must not call the pool.

    Ids are arrays u32 [n]; other integer arrays and sequences of ints are copied into one. ValueError, and nothing has
    happened, for a block that the pool does not have, that is free where it must be held, or has a name where it must
    have none, and for what is no name, no id and no count.

    Other names than BLAKE2b-256 may come in: ids and parents are compared, so that names that collide cost reuse and
    never yield other ids. Roots must be strong names, as `root_hash` gives, that no block bears.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        *,
        policy: Policy | str = "lru",
        clock: Callable[[], float] | None = None,
        ttl: float | None = None,
        hash_fn: HashFn = block_hash,
        tail_hash_fn: HashFn = tail_hash,
    ) -> None:
        if not (_is_count(num_blocks, 1) and _is_count(block_tokens, 1)):
            raise ValueError(f"a pool needs a block of a token at least, not {num_blocks} of {block_tokens} tokens")
        num_blocks, block_tokens = index(num_blocks), index(block_tokens)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.hash_fn = hash_fn
        self.tail_hash_fn = tail_hash_fn
        self.on_evict: Callable[[BlockHash], None] | None = None
        self._free = FreeList(num_blocks)
        self._refs = [0] * num_blocks
        self._contents = BlockContents(num_blocks, block_tokens)
        self._order = EvictionOrder(policy, capacity=num_blocks, ttl=ttl)  # every named block
        self._clock = clock
        self._use: Callable[[], float] = clock or count(1).__next__
        self._group_of_root: dict[BlockHash, int] = {}  # those with a quota; all others are group 0
        self.num_evictions = 0  # to make room; not those that were asked for

    def __repr__(self) -> str:
        held = f"{self.num_free:,} free, {self.num_cached:,} cached, {self.num_held:,} held"
        return f"<BlockPool of {self.num_blocks:,} blocks of {self.block_tokens} tokens: {held}>"

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds and that have no name."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are named and held by nobody."""
        return self._order.num_idle

    @property
    def num_held(self) -> int:
        """Blocks with a reference at least."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the pool."""
        return sys.getsizeof(self._refs) + self._free.nbytes + self._contents.nbytes + self._order.nbytes

    def refs(self, block: int) -> int:
        """Return how many references there are on a block."""
        return self._refs[self._known(block)]

    def name(self, block: int) -> BlockHash | None:
        """Return the name of a full block or the tail name of a partial one; None while it has none."""
        try:
            if block >= 0:
                return self._contents.name(block)
        except (IndexError, TypeError):
            pass
        raise self._unknown(block)

    def parent(self, block: int) -> BlockHash | None:
        """Return the name of a named block's parent, which may be a root; None for a block without a name."""
        return self._contents.parent(self._known(block))

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the token ids of a named block; none for a block without a name."""
        return self._contents.ids(self._known(block))

    def is_private(self, block: int) -> bool:
        """Say whether one holder has the block to itself and may write it."""
        try:
            if block >= 0:
                return self._refs[block] == 1 and block not in self._contents
        except (IndexError, TypeError):
            pass
        raise self._unknown(block)

    def allocate(self) -> int | None:
        """Return a private block, evicting the leaf that the policy gives up if none is free; None is a shortage."""
        if self._free:
            block: int | None = self._free.pop()
        elif (block := self._order.pop(None if self._clock is None else self._clock())) is not None:
            self._drop_name(block)
            self.num_evictions += 1
        if block is not None:
            self._refs[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int] | None:
        """Return `count` private blocks; None when there are not so many, and then nothing is held."""
        if not _is_count(count, 0):
            raise ValueError(f"count must be a whole number from 0 up, not {count!r}")
        if count > self.num_free + self.num_cached:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            block = self.allocate()
            if block is None:  # cached ancestors of held blocks cannot leave
                self.release_all(blocks)
                return None
            blocks.append(block)
        return blocks

    def copy_on_write(self, block: int, num_tokens: int) -> BlockCopy | None:
        """Return a private block to write in place of `block`, and the copy of its first tokens to be made before.

        A private block is its own target, and there is nothing to copy. The reference on a source stays with its
        holder: release it once the copy is made. None is a shortage.
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

    def release(self, block: int, *, hints: Hints | None = None) -> None:
        """Let go of one reference; with the last one a named block becomes cached, any other is free.

        `hints` of the last one count, and last until others are given.
        """
        refs = self._refs
        try:
            num_refs = refs[block]
        except (IndexError, TypeError):
            raise self._unknown(block) from None
        if num_refs < 1 or block < 0:
            self._check_held(block)
        if num_refs == 1:
            if block not in self._contents:
                self._free.append(block)
            elif hints is None or isinstance(hints, Hints):
                self._order.release(block, self._use(), hints=hints)  # raises for a wrong time: nothing has happened
            else:
                raise ValueError(f"hints are rekindle.cache.Hints, not {type(hints).__name__}")
        refs[block] = num_refs - 1

    def release_all(self, blocks: Iterable[int]) -> None:
        """Release each in turn, as far as the first that `release` refuses."""
        for block in blocks:
            self.release(block)

    def register(self, block: int, name: BlockHash, parent: BlockHash, ids: Ids) -> int:
        """Publish a full block and return the one to use from now on.

        Parents first: `parent` is a root, or the name of the block that these ids follow, which the caller holds. A
        name that has children and no block counts as a root, and is given to no block while it has them.

        When the name is there already, with the same parent and ids: `block` is released and the one that was there
        returned, shared. With others (a collision of names), or these under another name, or when the name is a
        root's: `block` stays as it is, without a name, and is returned.
        """
        data = id_bytes(ids)
        if len(data) != self.block_tokens * ID_BYTES:
            raise ValueError(f"a full block holds {self.block_tokens} ids, not {len(ids)}")
        check_name(parent)
        return self._publish(block, name, parent, data)

    def register_tail(self, block: int, parent: BlockHash, ids: Ids) -> int:
        """Name a partial block, so that it is kept and never written again; return the one to use, as `register`."""
        ids = token_ids(ids)
        if not 0 < len(ids) < self.block_tokens:
            raise ValueError(
                f"a tail of blocks of {self.block_tokens} holds fewer ids, and one at least: not {len(ids)}"
            )
        check_name(parent)
        return self._publish(block, self.tail_hash_fn(parent, ids), parent, id_bytes(ids))

    def find(self, name: BlockHash, ids: Ids, *, parent: BlockHash | None = None) -> int | None:
        """Return the block of this name that holds these ids, and note the use; it is not shared.

        With a `parent`, it must be that one's child: whoever follows a chain by names that could collide says so.
        """
        block = self._contents.match(name, id_bytes(ids), parent)
        if block is not None and not self._refs[block]:
            self._order.touch(block, self._use())
        return block

    def peek(self, name: BlockHash, ids: Ids, *, parent: BlockHash | None = None) -> int | None:
        """As `find`, without a use: for whoever counts what is here, so that counting does not keep it here."""
        return self._contents.match(name, id_bytes(ids), parent)

    def find_child(self, parent: BlockHash, ids: Ids) -> tuple[int, int] | None:
        """Return the child of `parent`, full or tail, with the most leading ids in common, and how many; not shared.

        Of several the one registered last; None when no child has even the first. Costs some log2 of the children.
        """
        return self._contents.find_child(parent, token_ids(ids)[: self.block_tokens].tobytes())

    def try_reuse_prefix(self, root: BlockHash, ids: Ids) -> list[int]:
        """Share and return the blocks of the longest prefix of `ids`, whole blocks only; their release is the use."""
        check_name(root)
        blocks = self._contents.prefix(root, token_ids(ids), self.hash_fn)
        for block in blocks:
            self.share(block)
        return blocks

    def demote(self, block: int) -> bool:
        """Make a cached block the next leaf to leave, until it is used; False when it is held or has no name.

        Demote a chain from its end: one with children waits for them.
        """
        return self._known(block) in self._contents and self._order.demote(block)

    def evict(self, block: int) -> bool:
        """Free a cached block that has no child in the pool; False, and nothing happens, for any other."""
        if self._known(block) not in self._contents or self._refs[block] or not self._order.is_leaf(block):
            return False
        self._order.remove(block)
        self._drop_name(block)
        self._free.append(block)
        return True

    def expire(self, now: float) -> int:
        """Free the cached leaves whose lifetime is over, then those they stood on; return how many blocks that were."""
        num_expired = 0
        while (block := self._order.pop_expired(now)) is not None:
            self._drop_name(block)
            self._free.append(block)
            num_expired += 1
        return num_expired

    def set_quota(self, root: BlockHash, most: int | None) -> None:
        """While a root has more than `most` blocks, its leaves make room before others'; None takes that back.

        Set it before the first block of a namespace: those that are here already do not count.
        """
        check_name(root)
        if most is not None and not _is_count(most, 0):
            raise ValueError(f"most must be None or a whole number from 0 up, not {most!r}")
        group = self._group_of_root.setdefault(root, len(self._group_of_root) + 1)
        self._order.set_quota(group, most)

    def block_of(self, name: BlockHash) -> int | None:
        """Return the block that bears this name, whatever its ids; no use of it."""
        return self._contents.find(name)

    def idle_blocks(self) -> list[int]:
        """Return all cached blocks."""
        return [block for block in self._contents.blocks() if not self._refs[block]]

    def take_used_free(self) -> list[int]:
        """Return the free blocks whose bytes may be somebody's: handed out since they were last returned here."""
        return self._free.take_used()

    def check(self) -> None:
        """Derive from the counts and names everything else that is kept, and assert that it agrees."""
        self._order.check()
        self._contents.check(self.hash_fn, self.tail_hash_fn)
        self._free.check({block for block, refs in enumerate(self._refs) if not refs and block not in self._contents})
        assert len(self._contents) == len(self._order), "names without blocks"
        for block, refs in enumerate(self._refs):
            assert refs >= 0, f"block {block} has {refs} references"
            if block in self._contents:
                assert block in self._order, f"block {block} has a name, and is not in the order"
                assert self._order.is_held(block) == bool(refs), f"block {block} has {refs} references, held otherwise"
                assert self._order.parent(block) == self._contents.above(block), f"block {block} has another parent"

    def _known(self, block: int) -> int:
        """Return a block that the pool has; ValueError for any other."""
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
        raise ValueError(f"block {self._known(block)} is held by nobody")

    def _publish(self, block: int, name: BlockHash, parent: BlockHash, data: bytes) -> int:
        self._check_held(block)
        if self._contents.find(name) is None:
            if block in self._contents:
                raise ValueError(f"block {block} has a name and cannot take another")
            if self._contents.add(block, name, parent, data):
                self._place(block, name, parent)
            return block
        existing = self._contents.match(name, data, parent)
        if existing is None or existing == block:
            return block
        self.share(existing)
        self.release(block)
        return existing

    def _place(self, block: int, name: BlockHash, parent: BlockHash) -> None:
        """Take a block that has just got its name into the order, below its parent."""
        above = self._contents.above(block)
        group = 0
        if self._group_of_root:
            group = self._order.group(above) if above >= 0 else self._group_of_root.get(parent, 0)
        self._order.add(block, above, group=group, key=int.from_bytes(name[:8], "little"))

    def _drop_name(self, block: int) -> None:
        """Empty a cached block, which has left the order already."""
        name = self._contents.remove(block)
        if self.on_evict is not None:
            self.on_evict(name)


def _is_count(value: Any, least: int) -> bool:
    """Say whether this is a whole number from `least` up."""
    try:
        return index(value) >= least
    except TypeError:
        return False
