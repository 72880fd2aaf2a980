"""The blocks of one sequence, in order, and which of them it may write.

Owns the list of blocks with one reference on each, the number of stored positions and the names of its full blocks.
Does not know bytes: it says which tokens to copy, the arena copies. All blocks of a table come from one pool.

    blocks     [ named ][ named ][ tail   ·  ][ reserved ]
    positions  0 ........................num_tokens ......capacity
               stored, written once           prepared, not stored yet

One step is: `prepare(n)`, copy what it returns, the forward pass, `publish(ids)`. At the end of a turn: `seal`.
Invariants: only a private block lies where the next position is written; blocks before it are never written again.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.cache.blocks.contents import check_name
from rekindle.cache.blocks.copying import BlockCopy as BlockCopy
from rekindle.cache.blocks.hashing import BlockHash, Ids, TokenIds, token_ids
from rekindle.cache.blocks.identity import BlockIdentity
from rekindle.cache.blocks.pool import BlockPool


@dataclass(frozen=True, slots=True)
class Published:
    """A block of the pool that has got its hash."""

    block: int
    identity: BlockIdentity


class BlockTable:
    """The block table of one sequence; empty when made and after `release`.

    The source of a copy stays held by this table until the next call of `prepare`, `publish`, `seal`, `truncate` or
    `release`. Until then no allocation, of this table or another, can hand it out, so a copy may run any time before.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.names: list[BlockHash] = []  # of the leading full blocks, as far as they are published
        self._sources: list[int] = []

    @property
    def capacity_tokens(self) -> int:
        """Positions that its blocks have room for."""
        return len(self.blocks) * self.pool.block_tokens

    def head(self, root: BlockHash) -> BlockHash:
        """Return the name of the last published full block, `root` when there is none."""
        return self.names[-1] if self.names else root

    def append_shared(self, blocks: list[int], num_tokens: int) -> None:
        """Take over one reference on each block; their positions up to `num_tokens` of the whole table are stored.

        The last block may be used in part, whatever else it holds. Blocks reserved before are given back.
        """
        self.truncate(self.num_tokens)
        block_tokens = self.pool.block_tokens
        assert self.num_tokens == self.capacity_tokens, f"{self.num_tokens} stored tokens end inside a block"
        self.blocks += blocks
        assert -(-num_tokens // block_tokens) == len(self.blocks), f"{num_tokens} tokens, {len(self.blocks)} blocks"
        self.num_tokens = num_tokens
        for block in self.blocks[len(self.names) : num_tokens // block_tokens]:
            name = self.pool.name(block)
            if name is None:
                break
            self.names.append(name)

    def prepare(self, num_tokens: int) -> list[BlockCopy] | None:
        """Make positions `self.num_tokens` to `num_tokens - 1` writable and return the copies to make before.

        A last block that is shared or named is replaced by a private one that takes over its stored tokens: at most
        one copy, to be made before any other call on this table. None is a shortage, and then the table is as before.
        With nothing to write nothing is done.
        """
        self._let_go_sources()
        if num_tokens <= self.num_tokens:
            return []
        block_tokens = self.pool.block_tokens
        last = self.num_tokens // block_tokens
        must_copy = last < len(self.blocks) and not self.pool.is_private(self.blocks[last])
        num_new = max(0, -(-num_tokens // block_tokens) - len(self.blocks))
        if num_new + must_copy > self.pool.num_free + self.pool.num_cached:
            return None
        copy = self.pool.copy_on_write(self.blocks[last], self.num_tokens % block_tokens) if must_copy else None
        fresh = None if must_copy and copy is None else self.pool.allocate_many(num_new)
        if fresh is None:
            self.pool.release_all([copy.target] if copy is not None else [])
            return None
        if copy is not None:
            self._sources.append(copy.source)
            self.blocks[last] = copy.target
        self.blocks += fresh
        return [copy] if copy is not None else []

    def publish(self, ids: Ids, root: BlockHash) -> list[Published]:
        """Note that positions [0, len(ids)) are stored, name the blocks that became full, and return these in order.

        A block whose name is in the pool already is replaced by the one that is there, and is not returned: `names`
        has them all. Publishing stops at a collision of names for as long as it lasts. Call it after the forward pass
        that computed the ids. Costs one hash for each new full block, however long the sequence.
        """
        check_name(root)
        ids = token_ids(ids)
        if not self.num_tokens <= len(ids) <= self.capacity_tokens:
            raise ValueError(f"{len(ids)} ids for {self.num_tokens} stored tokens and room for {self.capacity_tokens}")
        self._let_go_sources()
        self.num_tokens = len(ids)
        published: list[Published] = []
        block_tokens = self.pool.block_tokens
        while len(self.names) < self.num_tokens // block_tokens:
            index = len(self.names)
            part = ids[index * block_tokens : (index + 1) * block_tokens]
            parent = self.head(root)
            name = self.pool.hash_fn(parent, part)
            block, was_named = self.blocks[index], self.pool.name(self.blocks[index]) == name
            self.blocks[index] = self.pool.register(block, name, parent, part)
            if not self._bears(index, name, parent, part):  # what follows a collision would be found in its place
                break
            self.names.append(name)
            if self.blocks[index] == block and not was_named:
                published.append(Published(block, BlockIdentity(name, parent, root, part.copy())))
        return published

    def seal(self, ids: Ids, root: BlockHash) -> Published | None:
        """Name the tail at the end of a turn, give reserved blocks back, and return the tail.

        `ids` are those of all stored positions, published before. None when they end with a block, and when the last
        rows are a part of a longer named block (nothing was computed that is not kept already) or follow a collision.
        """
        ids = token_ids(ids)
        if len(ids) != self.num_tokens:
            raise ValueError(f"{len(ids)} ids for {self.num_tokens} stored tokens")
        self.truncate(self.num_tokens)
        num_rows = self.num_tokens % self.pool.block_tokens
        if not num_rows or len(self.names) < len(self.blocks) - 1:
            return None
        parent, part = self.head(root), ids[-num_rows:]
        name = self.pool.tail_hash_fn(parent, part)
        if self.pool.name(self.blocks[-1]) not in (None, name):
            return None
        self.blocks[-1] = self.pool.register_tail(self.blocks[-1], parent, part)
        if not self._bears(-1, name, parent, part):
            return None
        return Published(self.blocks[-1], BlockIdentity(name, parent, root, part.copy()))

    def fork(self) -> BlockTable:
        """Return a table of the same stored positions on the same blocks; whoever writes first copies the tail.

        Fork between steps: blocks this table has reserved are not the fork's.
        """
        twin = BlockTable(self.pool)
        twin.blocks = self.blocks[: -(-self.num_tokens // self.pool.block_tokens)]
        twin.num_tokens = self.num_tokens
        twin.names = self.names.copy()
        for block in twin.blocks:
            self.pool.share(block)
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` stored positions only; reserved blocks are given back in any case."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} of {self.num_tokens} tokens")
        self._let_go_sources()
        num_blocks = -(-num_tokens // self.pool.block_tokens)
        self.pool.release_all(self.blocks[num_blocks:])
        del self.blocks[num_blocks:]
        self.num_tokens = num_tokens
        del self.names[num_tokens // self.pool.block_tokens :]

    def release(self) -> None:
        """Let go of all blocks; the table is empty again. Releasing twice is safe."""
        self.truncate(0)

    def check(self) -> None:
        """Assert that every block is held, that names agree with the pool's, and that reserved blocks are private."""
        block_tokens = self.pool.block_tokens
        assert 0 <= self.num_tokens <= self.capacity_tokens, f"{self.num_tokens} tokens in {len(self.blocks)} blocks"
        num_full = self.num_tokens // block_tokens
        assert len(self.names) <= num_full, f"{len(self.names)} names for {num_full} full blocks"
        for block in (*self.blocks, *self._sources):
            assert self.pool.refs(block) > 0, f"block {block} of the table is held by nobody"
        for index, name in enumerate(self.names):
            block = self.blocks[index]
            assert self.pool.name(block) == name, f"block {block} at {index} has another name"
            follows = index == 0 or self.pool.parent(block) == self.names[index - 1]
            assert follows, f"block {block} at {index} has another parent"
        for block in self.blocks[-(-self.num_tokens // block_tokens) :]:
            assert self.pool.is_private(block), f"reserved block {block} is not private"

    def _bears(self, index: int, name: BlockHash, parent: BlockHash, ids: TokenIds) -> bool:
        """Say whether the block at `index` is the one that has this name, under this parent and with these ids."""
        return self.pool.peek(name, ids, parent=parent) == self.blocks[index]

    def _let_go_sources(self) -> None:
        self.pool.release_all(self._sources)
        self._sources.clear()
