"""Where a conversation can be resumed in a model with recurrent layers: after tokens whose states are stored.

Owns how these points are found, in memory and on disk, and how one is brought into memory. After how many tokens the
state of a full block is, is known once that is in memory: until then a point says how many at most. Called on the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, tail_hash
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.sequence import Sequence
from rekindle.store.values import StoredBlock
from rekindle_backends.llama.snapshots import Snapshots

MOST_KEPT = 3  # of a conversation, in addition to its end: a state is as large as the KV of hundreds of tokens


@dataclass(frozen=True, slots=True)
class Point:
    """After `num_tokens` at most, in the block `last`, which may have more tokens than the conversation shares."""

    num_tokens: int
    last: BlockHash


class Points:
    """The points of conversations in this cache; false for models whose rows are all there is."""

    def __init__(self, cache: PrefixCache) -> None:
        self.snapshots = Snapshots(cache.arena)
        self._cache = cache
        self._size = cache.pool.block_tokens

    def __bool__(self) -> bool:
        return bool(self.snapshots)

    def before(self, sequence: Sequence, most: int) -> Iterator[Point]:
        """Yield the points among the first `most` tokens of a sequence, the last one first."""
        level = most // self._size
        while level and not self._is_known(sequence.hash_at(level - 1)):
            level -= 1
        rest = sequence.ids[level * self._size : min(most, (level + 1) * self._size)]
        if len(rest):
            yield from self._inside(sequence, level, rest)
        for index in range(level, 0, -1):
            name = sequence.hash_at(index - 1)
            if self._has_state(sequence, name, index * self._size):
                yield Point(index * self._size, name)

    def _inside(self, sequence: Sequence, level: int, rest: np.ndarray) -> Iterator[Point]:
        """Yield the points in the block with the ids `rest`: tails that begin them, and what else shares the most."""
        parent, first = sequence.parent_of(level), level * self._size
        hot, cold = self._cache.pool.find_child(parent, rest), self._cache.stored_child(parent, rest)
        shared = max((each[1] for each in (hot, cold) if each is not None), default=0)
        names = {tail_hash(parent, rest[:end]): end for end in range(min(shared, self._size - 1), 0, -1)}
        longer = [] if hot is None else [(self._cache.pool.name(hot[0]), hot[1])]
        longer += [] if cold is None else [(cold[0].identity.hash, cold[1])]
        names |= {name: end for name, end in longer if name is not None and name not in names}
        for name, end in sorted(names.items(), key=lambda each: -each[1]):
            if self._has_state(sequence, name, first + end):
                yield Point(first + end, name)

    def has_near(self, sequence: Sequence, at: int) -> bool:
        """Whether the full block that these tokens of a sequence end in is in memory with a state among them."""
        index = (at - 1) // self._size
        if (index + 1) * self._size > sequence.num_tokens:
            return False
        block = self._cache.pool.block_of(sequence.hash_at(index))
        return block is not None and 0 < self.snapshots.end(block) <= at

    def earlier(self, sequence: Sequence, index: int, wanted: Collection[int]) -> int | None:
        """Return the hot block whose state block `index` of a sequence takes over: one that leaves its text after one
        of the `wanted` points, or the longest tail that begins it."""
        ids, parent = sequence.ids[index * self._size : (index + 1) * self._size], sequence.parent_of(index)
        child = self._cache.pool.find_child(parent, ids) if len(ids) else None
        if child is not None and index * self._size + child[1] >= (end := self.snapshots.end(child[0])) in wanted:
            return child[0]
        for end in range(min(len(ids), self._size - 1), 0, -1):
            block = self._cache.pool.peek(tail_hash(parent, ids[:end]), ids[:end], parent=parent)
            if block is not None and self.snapshots.end(block):
                return block
        return None

    def bring(self, sequence: Sequence, point: Point, *, alone: bool) -> list[int] | Literal["wait", "loading"] | None:
        """Return the blocks up to a point, held once each; "loading": they are read, and that will be reported.

        "wait": for a load, or for room next to others; None: they cannot be had.
        """
        pool = self._cache.pool
        index = (point.num_tokens - 1) // self._size
        blocks = pool.try_reuse_prefix(sequence.root, sequence.ids[: index * self._size])
        last = pool.block_of(point.last) if len(blocks) == index else None
        if last is not None:
            pool.share(last)
            blocks.append(last)
        wanted = self._to_read(sequence, point, index, len(blocks))
        if wanted is not None and not wanted:
            return blocks
        answer = self._read(sequence, blocks, wanted, alone=alone)
        if answer != "loading":
            pool.release_all(blocks)
        return answer

    def _to_read(self, sequence: Sequence, point: Point, index: int, num_hot: int) -> list[StoredBlock] | None:
        """What to read after so many hot blocks; None if it is not there."""
        assert self.snapshots.part is not None, "only models with recurrent layers have points"
        last = self._cache.pool.block_of(point.last)
        if num_hot > index and last is not None and self.snapshots.end(last):
            return []
        names = [*(sequence.hash_at(each) for each in range(num_hot, index)), point.last]
        parts = [{0}] * (len(names) - 1) + [{self.snapshots.part.index} | ({0} if num_hot <= index else set())]
        found = [None if name in sequence.tried_loads else self._cache.stored(name) for name in names]
        wanted = [each.only(which) for each, which in zip(found, parts, strict=True) if each is not None]
        is_whole = len(wanted) == len(names) and self.snapshots.part.index in wanted[-1].parts
        return wanted if is_whole else None

    def _read(
        self, sequence: Sequence, held: list[int], wanted: list[StoredBlock] | None, *, alone: bool
    ) -> Literal["wait", "loading"] | None:
        """Begin to read blocks that follow those held."""
        pool = self._cache.pool
        if wanted is None:
            return None
        if any(each.identity.hash in self._cache.loads for each in wanted):
            return "wait"
        (slots,) = pool.windows
        has_room = len(wanted) <= pool.num_free + pool.num_cached and slots.num_available > 0
        if has_room and self._cache.load(sequence, held, wanted):
            return "loading"
        return None if alone else "wait"

    def _is_known(self, name: BlockHash) -> bool:
        return self._cache.pool.block_of(name) is not None or self._cache.stored(name) is not None

    def _has_state(self, sequence: Sequence, name: BlockHash, most: int) -> bool:
        """Whether a block has a state after no more tokens than these in memory, or one on disk that is not damaged."""
        assert self.snapshots.part is not None, "only models with recurrent layers have points"
        block = self._cache.pool.block_of(name)
        end = 0 if block is None else self.snapshots.end(block)
        if end:
            return end <= most
        stored = None if name in sequence.tried_loads else self._cache.stored(name)
        return stored is not None and self.snapshots.part.index in stored.parts
