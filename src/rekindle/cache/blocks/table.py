"""The blocks of one sequence, in order, and which of them it may write.

Owns the list of blocks with one reference on each, the number of stored positions and the hashes of its full blocks.
Does not know bytes: it returns which tokens to copy, the arena copies them. All blocks of a table come from one pool.

    blocks     [ full  ][ full  ][ tail   ·  ][ reserved ]
    positions  0 ........................num_tokens ......capacity
               stored, written once           prepared, not stored yet

One step is: `prepare(n)`, copy what it returns, the forward pass, `publish(ids)`, `end_parts()`. At the end of a
turn: `seal`. Invariants: the block that holds the next position is private; blocks before it are never written again.
Parts that end (see `rekindle.parts`) are held as far back as the next token needs them, and until they are passed those
that were written for resume points.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from rekindle.cache.blocks.contents import BlockCopy as BlockCopy
from rekindle.cache.blocks.contents import check_hash
from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, Ids, TokenIds, token_ids
from rekindle.cache.blocks.pool import BlockPool


@dataclass(frozen=True, slots=True)
class Published:
    """A published block of the pool, its identity, and which of its parts are new: the first one, if it is."""

    block: int
    identity: BlockIdentity
    parts: tuple[int, ...] = (0,)


class BlockTable:
    """The block table of one sequence; empty when created and after `release`.

    The source of a copy stays held by this table until the next call of `prepare`, `publish`, `seal`, `truncate` or
    `release`. Until then no allocation, by this table or another, can return it, so the copy may run any time before.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.num_tokens = 0
        self.names: list[BlockHash] = []  # hashes of the leading full blocks, as far as they are published
        self._sources: list[int] = []
        self._source_parts: list[tuple[int, int]] = []  # of the sources: kind, block
        self._held: list[deque[int]] = [deque() for _ in pool.windows]  # per kind: indices of blocks with held parts

    @property
    def capacity_tokens(self) -> int:
        """Number of positions that its blocks have room for."""
        return len(self.blocks) * self.pool.block_tokens

    @property
    def num_parts_held(self) -> list[int]:
        """Number of parts that it holds of each kind that ends."""
        return [len(held) for held in self._held]

    def head(self, root: BlockHash) -> BlockHash:
        """Return the hash of the last published full block, or `root` if there is none."""
        return self.names[-1] if self.names else root

    def append_shared(self, blocks: list[int], num_tokens: int) -> None:
        """Append blocks, taking over one reference on each; the whole table then has `num_tokens` stored positions.

        The last block may be used in part, whatever else it holds. Blocks reserved before are released. The blocks in
        the windows before the new end must have their parts.
        """
        self.truncate(self.num_tokens)
        block_tokens = self.pool.block_tokens
        assert self.num_tokens == self.capacity_tokens, f"{self.num_tokens} stored tokens end inside a block"
        self.blocks += blocks
        assert -(-num_tokens // block_tokens) == len(self.blocks), f"{num_tokens} tokens, {len(self.blocks)} blocks"
        self.num_tokens = num_tokens
        for block in self.blocks[len(self.names) : num_tokens // block_tokens]:
            block_hash = self.pool.name(block)
            if block_hash is None:
                break
            self.names.append(block_hash)
        num_before = len(self.blocks) - len(blocks)
        self.end_parts()
        for which, slots in enumerate(self.pool.windows):
            needed, first = (at(num_tokens, block_tokens) for at in (slots.kind.first_needed, slots.kind.first_held))
            for index in range(max(num_before, first), len(self.blocks)):
                if index >= needed or slots.has(self.blocks[index]):
                    slots.hold(self.blocks[index])
                    self._held[which].append(index)

    def prepare(
        self, num_tokens: int, resume_points: Collection[int] = (), *, root: BlockHash | None = None
    ) -> list[BlockCopy] | None:
        """Make positions `self.num_tokens` to `num_tokens - 1` writable and return the copies to make first.

        A last block that is shared or published is replaced by a private one that takes over its stored tokens: at most
        one copy, to be made before any other call on this table. None is a shortage, and leaves the table unchanged.
        No effect if there is nothing to write. Of kinds that not every block needs, parts are kept for those
        `resume_points` among the positions, if there are slots for all of them. The quota of `root` counts all parts.
        """
        self._release_sources()
        if num_tokens <= self.num_tokens:
            return []
        block_tokens = self.pool.block_tokens
        last = self.num_tokens // block_tokens
        must_copy = last < len(self.blocks) and not self.pool.is_private(self.blocks[last])
        num_new = max(0, -(-num_tokens // block_tokens) - len(self.blocks))
        if num_new + must_copy > self.pool.num_free + self.pool.num_cached:
            return None
        lacking = [
            self._lacking(which, num_tokens, resume_points, must_copy=must_copy)
            for which in range(len(self.pool.windows))
        ]
        for slots, wanted in zip(self.pool.windows, lacking, strict=True):
            if len(wanted) > slots.num_available and slots.kind.can_skip_resume_points:
                del wanted[:-1]
            if len(wanted) > slots.num_available:
                return None
        copy = self.pool.copy_on_write(self.blocks[last], self.num_tokens % block_tokens) if must_copy else None
        fresh = None if must_copy and copy is None else self.pool.allocate_many(num_new)
        if fresh is None:
            self.pool.release_all([copy.target] if copy is not None else [])
            return None
        if copy is not None:
            self._sources.append(copy.source)
            for which, held in enumerate(self._held):
                if last in held:
                    self._source_parts.append((which, copy.source))
                    held.remove(last)
            self.blocks[last] = copy.target
        self.blocks += fresh
        for which, (slots, indices) in enumerate(zip(self.pool.windows, lacking, strict=True)):
            for index in indices:
                slots.take(self.blocks[index], self.pool.group(root))
            held = self._held[which]
            in_order = not (held and indices) or held[-1] < indices[0]
            held.extend(indices)
            if not in_order:
                self._held[which] = deque(sorted(held))
        return [copy] if copy is not None else []

    def _lacking(self, which: int, num_tokens: int, resume_points: Collection[int], *, must_copy: bool) -> list[int]:
        """Return the indices of blocks that need a slot of a window to be written up to `num_tokens`."""
        size, held = self.pool.block_tokens, self._held[which]
        first, kind = self.num_tokens // size, self.pool.windows[which].kind
        wanted = kind.written_blocks(first, -(-num_tokens // size), size, resume_points)
        last = held[-1] if held else -1
        lacking = [index for index in wanted if index > last or index not in held]
        return [first, *(index for index in lacking if index > first)] if must_copy else lacking

    def publish(self, ids: Ids, root: BlockHash) -> list[Published]:
        """Record that positions [0, len(ids)) are stored, publish the blocks that became full, and return them.

        A block whose hash is already in the pool is replaced by the existing one and is not returned; `names` has the
        hashes of all. Publishing stops at a hash collision for as long as it lasts. Call it after the forward pass that
        computed the ids. Costs one hash per new full block, however long the sequence.
        """
        check_hash(root)
        ids = token_ids(ids)
        if not self.num_tokens <= len(ids) <= self.capacity_tokens:
            raise ValueError(f"{len(ids)} ids for {self.num_tokens} stored tokens and room for {self.capacity_tokens}")
        self._release_sources()
        self.num_tokens = len(ids)
        published: list[Published] = []
        block_tokens = self.pool.block_tokens
        while len(self.names) < self.num_tokens // block_tokens:
            index = len(self.names)
            part = ids[index * block_tokens : (index + 1) * block_tokens]
            parent = self.head(root)
            block_hash = self.pool.hash_fn(parent, part)
            block, was_published = self.blocks[index], self.pool.name(self.blocks[index]) == block_hash
            self.blocks[index] = self.pool.register(block, block_hash, parent, part)
            if not self._is_at(index, block_hash, parent, part):  # blocks after a collision would be found in its place
                break
            self.names.append(block_hash)
            if self.blocks[index] == block and not was_published:
                published.append(Published(block, BlockIdentity(block_hash, parent, root, part.copy())))
        return published

    def end_parts(self, points: Collection[int] = ()) -> None:
        """Release the parts that no token from the end on needs; what resume points need was marked before.

        Those that a token after one of these `points` needs stay held until this is called again.
        """
        size = self.pool.block_tokens
        for slots, held in zip(self.pool.windows, self._held, strict=True):
            first = slots.kind.first_held(self.num_tokens, size)
            needed = {index for at in points for index in range(slots.kind.first_held(at, size), -(-at // size))}
            ended = [held.popleft() for _ in range(sum(index < first for index in held))]
            for index in ended:
                if index not in needed:
                    slots.release(self.blocks[index])
            held.extendleft(index for index in reversed(ended) if index in needed)

    def seal(self, ids: Ids, root: BlockHash) -> Published | None:
        """Publish the tail at the end of a turn, release reserved blocks, and return the tail.

        `ids` are those of all stored positions, published before. None if they end with a full block, after a
        collision, or if the tail's block is published as another tail already: as a longer one (so nothing new was
        computed), or as a shorter one, by a fork that was truncated and sealed first; the rest is then recomputed.
        """
        ids = token_ids(ids)
        if len(ids) != self.num_tokens:
            raise ValueError(f"{len(ids)} ids for {self.num_tokens} stored tokens")
        self.truncate(self.num_tokens)
        num_rows = self.num_tokens % self.pool.block_tokens
        if not num_rows or len(self.names) < len(self.blocks) - 1:
            return None
        parent, part = self.head(root), ids[-num_rows:]
        block_hash = self.pool.tail_hash_fn(parent, part)
        if self.pool.name(self.blocks[-1]) not in (None, block_hash):
            return None
        self.blocks[-1] = self.pool.register_tail(self.blocks[-1], parent, part)
        if not self._is_at(-1, block_hash, parent, part):
            return None
        return Published(self.blocks[-1], BlockIdentity(block_hash, parent, root, part.copy()))

    def fork(self) -> BlockTable:
        """Return a table of the same stored positions on the same blocks; the table that writes first copies the tail.

        Fork between steps: the fork does not get blocks this table has reserved.
        """
        forked = BlockTable(self.pool)
        forked.blocks = self.blocks[: -(-self.num_tokens // self.pool.block_tokens)]
        forked.num_tokens = self.num_tokens
        forked.names = self.names.copy()
        for block in forked.blocks:
            self.pool.share(block)
        for slots, held, own in zip(self.pool.windows, self._held, forked._held, strict=True):
            own.extend(index for index in held if index < len(forked.blocks))
            for index in own:
                slots.hold(forked.blocks[index])
        return forked

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` stored positions; reserved blocks are released in any case.

        Parts of windows that were passed do not come back: nothing can be computed after a shorter end with them.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot keep {num_tokens} of {self.num_tokens} tokens")
        self._release_sources()
        num_blocks = -(-num_tokens // self.pool.block_tokens)
        for slots, held in zip(self.pool.windows, self._held, strict=True):
            while held and held[-1] >= num_blocks:
                slots.release(self.blocks[held.pop()])
        self.pool.release_all(self.blocks[num_blocks:])
        del self.blocks[num_blocks:]
        self.num_tokens = num_tokens
        del self.names[num_tokens // self.pool.block_tokens :]

    def release(self) -> None:
        """Release all blocks, leaving the table empty. Releasing twice is safe."""
        self.truncate(0)

    def check(self) -> None:
        """Assert that every block is held, that hashes agree with the pool's, and that reserved blocks are private."""
        block_tokens = self.pool.block_tokens
        assert 0 <= self.num_tokens <= self.capacity_tokens, f"{self.num_tokens} tokens in {len(self.blocks)} blocks"
        num_full = self.num_tokens // block_tokens
        assert len(self.names) <= num_full, f"{len(self.names)} hashes for {num_full} full blocks"
        for block in (*self.blocks, *self._sources):
            assert self.pool.refs(block) > 0, f"block {block} of the table is not held"
        for index, block_hash in enumerate(self.names):
            block = self.blocks[index]
            assert self.pool.name(block) == block_hash, f"block {block} at {index} has another hash"
            follows = index == 0 or self.pool.parent(block) == self.names[index - 1]
            assert follows, f"block {block} at {index} has another parent"
        for block in self.blocks[-(-self.num_tokens // block_tokens) :]:
            assert self.pool.is_private(block), f"reserved block {block} is not private"
        for slots, held in zip(self.pool.windows, self._held, strict=True):
            lacking = [index for index in held if not slots.is_held(self.blocks[index])]
            assert not lacking, f"block {lacking[:1]} of the table does not hold its part of a window"
            assert list(held) == sorted(set(held)), f"parts of blocks {list(held)} are held out of order"

    def _is_at(self, index: int, block_hash: BlockHash, parent: BlockHash, ids: TokenIds) -> bool:
        """Return whether the block at `index` is the pool's block of this hash, parent and ids."""
        return self.pool.peek(block_hash, ids, parent=parent) == self.blocks[index]

    def _release_sources(self) -> None:
        for which, block in self._source_parts:
            self.pool.windows[which].release(block)
        self._source_parts.clear()
        self.pool.release_all(self._sources)
        self._sources.clear()
