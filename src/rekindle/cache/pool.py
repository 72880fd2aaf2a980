"""The bookkeeping of the hot tier: which block is free, held, or kept under a name for whoever comes next.

Owns reference counts, names, parents and token ids of blocks, and who leaves next. Does not know the bytes of a block,
nor whose table holds it. One thread owns a pool.

    free ──allocate──▶ private ──commit, commit_tail──▶ named ──last release──▶ cached ──evict──▶ free
                          └──────last release──▶ free      ◀──────share────────────┘

Invariants: free + cached + held = all. A named block is never written. A name is given to one block at most, and a
block is found under it only if its token ids agree too. A cached block leaves only when it has no child in the pool.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rekindle.cache.eviction import LeafLRU
from rekindle.cache.hashing import HASH_BYTES, BlockHash, TokenIds, block_hash, id_bytes, tail_name
from rekindle.cache.radix import RadixTree


class BlockPool:
    """`num_blocks` blocks of `block_tokens` tokens, by index. All operations are O(1) or O(log num_blocks).

    `on_evict` is told each name that leaves the pool, evicted or forgotten; it must not call the pool.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        assert num_blocks > 0 and block_tokens > 0, f"{num_blocks} blocks of {block_tokens} tokens"
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.on_evict: Callable[[BlockHash], None] | None = None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._parents: list[BlockHash | None] = [None] * num_blocks
        self._ids: list[bytes] = [b""] * num_blocks  # of named blocks
        self._by_name: dict[BlockHash, int] = {}
        self._children: RadixTree[int] = RadixTree()  # parent ++ ids of every named block
        self._order: LeafLRU[BlockHash] = LeafLRU()  # every named block
        self._num_uses = 0
        self._used: set[int] = set()  # handed out since `take_used_free` returned them
        self.num_evictions = 0  # to make room; not those that were asked for

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that are named and held by nobody."""
        return self._order.num_idle

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def refs(self, block: int) -> int:
        return self._refs[block]

    def name(self, block: int) -> BlockHash | None:
        """Return the name of a full block or the tail name of a partial one; None while it has none."""
        return self._names[block]

    def parent(self, block: int) -> BlockHash | None:
        return self._parents[block]

    def ids(self, block: int) -> TokenIds:
        """Return the token ids of a named block, read-only; none for a block without a name."""
        return np.frombuffer(self._ids[block], dtype="<u4")

    def is_private(self, block: int) -> bool:
        """Say whether one holder has the block to itself and may write it."""
        return self._refs[block] == 1 and self._names[block] is None

    def allocate(self) -> int | None:
        """Return a private block, evicting the least recently used leaf if none is free; None is a shortage."""
        if not self._free:
            name = self._order.pop()
            if name is None:
                return None
            self._drop_name(self._by_name[name])
            self.num_evictions += 1
        block = self._free.pop()
        self._refs[block] = 1
        self._used.add(block)
        return block

    def allocate_many(self, count: int) -> list[int] | None:
        """Return `count` private blocks; None when there are not so many, and then nothing is held."""
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

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or cached."""
        name = self._names[block]
        assert self._refs[block] or name is not None, f"block {block} is free"
        if name is not None and not self._refs[block]:
            self._order.hold(name)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Let go of one reference; with the last one a named block becomes cached, any other is free."""
        assert self._refs[block] > 0, f"block {block} is held by nobody"
        self._refs[block] -= 1
        if self._refs[block]:
            return
        name = self._names[block]
        if name is None:
            self._free.append(block)
        else:
            self._order.release(name, self._next_use())

    def release_all(self, blocks: list[int]) -> None:
        for block in blocks:
            self.release(block)

    def commit(self, block: int, name: BlockHash, parent: BlockHash, ids: TokenIds) -> int:
        """Publish a full block and return the one to use from now on.

        When the name is there already, with the same parent and ids: `block` is released and the one that was there
        returned, shared. With others (a collision of names): `block` stays as it is, without a name, and is returned.
        """
        assert len(ids) == self.block_tokens, f"a full block holds {self.block_tokens} ids, not {len(ids)}"
        return self._publish(block, name, parent, id_bytes(ids))

    def commit_tail(self, block: int, parent: BlockHash, ids: TokenIds) -> int:
        """Name a partial block, so that it is kept and never written again; return the one to use, as `commit` does."""
        assert 0 < len(ids) < self.block_tokens, f"a tail holds 1 to {self.block_tokens - 1} ids, not {len(ids)}"
        return self._publish(block, tail_name(parent, ids), parent, id_bytes(ids))

    def find(self, name: BlockHash, ids: TokenIds) -> int | None:
        """Return the block of this name that holds these ids, and note the use; it is not shared."""
        block = self.peek(name, ids)
        if block is not None and not self._refs[block]:
            self._order.touch(name, self._next_use())
        return block

    def peek(self, name: BlockHash, ids: TokenIds) -> int | None:
        """As `find`, without a use: for whoever counts what is here, so that counting does not keep it here."""
        block = self._by_name.get(name)
        return block if block is not None and self._ids[block] == id_bytes(ids) else None

    def find_child(self, parent: BlockHash, ids: TokenIds) -> tuple[int, int] | None:
        """Return the child of `parent`, full or tail, with the most leading ids in common, and how many; not shared.

        None when no child has even the first. The cost does not depend on how many children there are.
        """
        length, block = self._children.longest_prefix(parent + id_bytes(ids[: self.block_tokens]))
        num_common = (length - HASH_BYTES) // 4
        return (block, num_common) if block is not None and num_common > 0 else None

    def try_reuse_prefix(self, root: BlockHash, ids: TokenIds) -> list[int]:
        """Share and return the blocks of the longest prefix of `ids` that is here, whole blocks only."""
        blocks: list[int] = []
        parent = root
        for start in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            part = ids[start : start + self.block_tokens]
            parent = block_hash(parent, part)
            block = self.find(parent, part)
            if block is None:
                break
            self.share(block)
            blocks.append(block)
        return blocks

    def demote(self, block: int) -> bool:
        """Make a cached block the next to leave, until it is used again; False when it is held or has no name.

        One with children leaves as soon as they have; demote a superseded chain from its end.
        """
        name = self._names[block]
        return name is not None and self._order.demote(name)

    def evict(self, block: int) -> bool:
        """Free a cached block that has no child in the pool; False, and nothing happens, for any other."""
        name = self._names[block]
        if name is None or self._refs[block] or not self._order.is_leaf(name):
            return False
        self._order.remove(name)
        self._drop_name(block)
        return True

    def block_of(self, name: BlockHash) -> int | None:
        """Return the block that bears this name, whatever its ids; no use of it."""
        return self._by_name.get(name)

    def idle_blocks(self) -> list[int]:
        """Return all cached blocks."""
        return [block for block in self._by_name.values() if not self._refs[block]]

    def take_used_free(self) -> list[int]:
        """Return the free blocks whose bytes may be somebody's: handed out since they were last returned here."""
        used = [block for block in self._free if block in self._used]
        self._used.difference_update(used)
        return used

    def forget(self, block: int) -> None:
        """Take the name away at once, so that nobody finds the block; it is free when its last holder lets go.

        Its children keep their names, which still stand for all ids before them.
        """
        name = self._names[block]
        if name is not None:
            self._order.remove(name)
            self._drop_name(block)

    def check(self) -> None:
        """Derive from the counts and names everything else that is kept, and assert that it agrees."""
        self._order.check()
        self._children.check()
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert self._used | free == set(range(self.num_blocks)), "a block was handed out and is not noted as used"
        for block, name in enumerate(self._names):
            is_free = not self._refs[block] and name is None
            assert self._refs[block] >= 0, f"block {block} has {self._refs[block]} references"
            assert is_free == (block in free), f"block {block}: {self._refs[block]} refs, name {name!r}, wrong list"
            if name is None:
                assert not self._ids[block] and self._parents[block] is None, f"block {block} has ids and no name"
                continue
            assert self._by_name.get(name) == block, f"block {block} is not found under its name"
            assert self._children.get(self._child_key(block)) == block, f"block {block} is not its parent's child"
            parent, ids = self._parents[block], self.ids(block)
            assert parent is not None and 0 < len(ids) <= self.block_tokens, f"block {block} is half-named"
            is_tail = len(ids) < self.block_tokens
            assert name == (tail_name if is_tail else block_hash)(parent, ids), f"block {block} bears a wrong name"
        num_named = self.num_blocks - self._names.count(None)
        assert num_named == len(self._by_name) == len(self._children) == len(self._order), "names without blocks"
        num_cached = sum(name is not None and not refs for name, refs in zip(self._names, self._refs, strict=True))
        assert num_cached == self.num_cached, f"num_cached is {self.num_cached}, {num_cached} are"

    def _publish(self, block: int, name: BlockHash, parent: BlockHash, data: bytes) -> int:
        assert self._refs[block] > 0, f"block {block} is held by nobody"
        existing = self._by_name.get(name)
        if existing is None:
            assert self._names[block] is None, f"block {block} has a name and cannot take another"
            self._names[block], self._parents[block], self._ids[block] = name, parent, data
            self._by_name[name] = block
            self._children.insert(self._child_key(block), block)
            self._order.add(name, parent)
            return block
        if existing == block or (self._parents[existing], self._ids[existing]) != (parent, data):
            return block
        self.share(existing)
        self.release(block)
        return existing

    def _drop_name(self, block: int) -> None:
        """Forget everything said of the block but its references; it has left the order already."""
        name = self._names[block]
        assert name is not None
        self._children.remove(self._child_key(block))
        del self._by_name[name]
        self._names[block], self._parents[block], self._ids[block] = None, None, b""
        if not self._refs[block]:
            self._free.append(block)
        if self.on_evict is not None:
            self.on_evict(name)

    def _child_key(self, block: int) -> bytes:
        parent = self._parents[block]
        assert parent is not None
        return parent + self._ids[block]

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses
