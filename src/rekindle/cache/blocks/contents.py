"""The contents of published blocks: hash, parent and token ids, in arrays, found by hash or by parent and next ids.

Owns these three of every published block. Does not know which blocks are held, nor what is evicted next.
Invariants: a block has all three or none. No two blocks have the same hash, nor the same parent and ids. No block has a
root's hash. A block is emptied after its children.

A parent is a number: that of its block, or one from `num_blocks` up for a root. A root is any hash that no block had
when it got its first child; it stays a root while it has one, so that children never change parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rekindle.cache.blocks.children import ChildIndex
from rekindle.cache.blocks.columns import HashColumn, IdRows, not_a_hash
from rekindle.cache.blocks.hashing import HASH_BYTES, BlockHash, TokenIds, id_bytes

HashFn = Callable[[BlockHash, TokenIds], BlockHash]


# Parents that are not blocks of a pool: one for each namespace, salt and model that has a block there.
#
# Owns their hashes and numbers.


class Roots:
    """Root hashes by number, from `first` up; dropped numbers are reused."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._numbers: dict[BlockHash, int] = {}
        self._hashes: list[BlockHash | None] = []
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.values())

    def __contains__(self, root: BlockHash) -> bool:
        return root in self._numbers

    def find(self, root: BlockHash) -> int:
        """Return the number of a root, -1 if it has none."""
        return self._numbers.get(root, -1)

    def get(self, number: int) -> BlockHash | None:
        return self._hashes[number - self._first]

    def take(self, root: BlockHash) -> int:
        """Return the number of a root, assigning one if it has none."""
        number = self._numbers.get(root, -1)
        if number >= 0:
            return number
        if self._spare:
            number = self._spare.pop()
        else:
            number = self._first + len(self._hashes)
            self._hashes.append(None)
        self._numbers[root] = number
        self._hashes[number - self._first] = root
        return number

    def drop(self, number: int) -> None:
        root = self._hashes[number - self._first]
        assert root is not None, f"no root has the number {number}"
        del self._numbers[root]
        self._hashes[number - self._first] = None
        self._spare.append(number)

    def check(self) -> None:
        """Assert that hashes and numbers agree, and that no number is lost."""
        for root, number in self._numbers.items():
            assert self.get(number) == root, f"{root!r} has the number {number}, which is that of {self.get(number)!r}"
        assert len(self._numbers) + len(self._spare) == len(self._hashes), f"{len(self._hashes)} numbers, some are lost"


def check_hash(value: BlockHash) -> None:
    """Raise ValueError unless the value is a hash; for validating arguments."""
    if type(value) is not bytes or len(value) != HASH_BYTES:
        raise not_a_hash(value)


class BlockContents:
    """Contents of the published ones of `num_blocks` blocks of `block_tokens` tokens; one with fewer ids is a tail."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._hashes = HashColumn(num_blocks)
        self._rows = IdRows(num_blocks, block_tokens)
        self._lengths = self._rows.lengths
        self._children = ChildIndex(num_blocks, self._rows)
        self._roots = Roots(num_blocks)

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, block: int) -> bool:
        return self._lengths[block] > 0

    @property
    def nbytes(self) -> int:
        return self._hashes.nbytes + self._rows.nbytes + self._children.nbytes

    def blocks(self) -> list[int]:
        """Return all published blocks, ascending."""
        return list(self._hashes)

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with this hash, whatever its ids."""
        block = self._hashes.find(block_hash)
        return None if block < 0 else block

    def match(self, block_hash: BlockHash, data: bytes, parent: BlockHash | None) -> int | None:
        """Return the block with this hash and these ids and, if `parent` is given, with this parent."""
        block = self._hashes.find(block_hash)
        if block < 0 or not self._rows.holds(block, data):
            return None
        return block if parent is None or self._has_hash(self._children.parent(block), parent) else None

    def prefix(self, root: BlockHash, ids: TokenIds, hash_fn: HashFn) -> list[int]:
        """Return the full blocks of the longest prefix of `ids`, each its predecessor's child, the first the root's."""
        size = self._block_tokens
        blocks: list[int] = []
        parent = root
        for start in range(0, len(ids) - size + 1, size):
            part = ids[start : start + size]
            block_hash = hash_fn(parent, part)
            block = self.match(block_hash, id_bytes(part), parent)
            if block is None:
                break
            blocks.append(block)
            parent = block_hash
        return blocks

    def find_child(self, parent: BlockHash, data: bytes) -> tuple[int, int] | None:
        """Return the child with the most leading ids in common with `data` (ties: the last added), and how many."""
        number = self._hashes.find(parent)
        if number < 0:
            number = self._roots.find(parent)
        found = self._children.find(number, data) if number >= 0 else None
        return found if found is not None and found[1] > 0 else None

    def above(self, block: int) -> int:
        """Return the block that is a block's parent, -1 if that is a root."""
        number = self._children.parent(block)
        return number if number < self._num_blocks else -1

    def hash(self, block: int) -> BlockHash | None:
        found = self._hashes.get(block)
        return None if found is None else BlockHash(found)

    def parent(self, block: int) -> BlockHash | None:
        number = self._children.parent(block)
        if number < 0:
            return None
        return self.hash(number) if number < self._num_blocks else self._roots.get(number)

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the block's ids; empty if it is unpublished."""
        return self._rows.ids(block)

    def add(self, block: int, block_hash: BlockHash, parent: BlockHash, data: bytes) -> bool:
        """Give a block a hash that no block has.

        False, with no effect, if the hash is a root's or the parent's, or if the parent has a child with these ids.
        """
        if block_hash in self._roots or block_hash == parent:
            return False
        self._rows.put(block, data)
        number = self._hashes.find(parent)
        if number < 0:
            number = self._roots.take(parent)
        if not self._children.add(block, number):
            self._rows.drop(block)
            return False
        self._hashes.put(block, block_hash)
        return True

    def remove(self, block: int) -> BlockHash:
        """Empty a published block without children, and return the hash it had."""
        assert not self._children.has_children(block), f"block {block} is removed before its children"
        number = self._children.parent(block)
        self._children.remove(block)
        if number >= self._num_blocks and not self._children.has_children(number):
            self._roots.drop(number)
        self._rows.drop(block)
        return BlockHash(self._hashes.drop(block))

    def check(self, hash_fn: HashFn, tail_hash_fn: HashFn) -> None:
        """Assert that all parts agree, and that every hash is that of its parent and ids."""
        for part in (self._hashes, self._children, self._roots):
            part.check()
        for block, length in enumerate(self._lengths):
            found, parent = self.hash(block), self.parent(block)
            if not length:
                assert found is None and parent is None, f"block {block} has no ids, but hash {found!r}, {parent!r}"
                continue
            assert found is not None and parent is not None, f"block {block} lacks a hash or a parent"
            right = (hash_fn if length == self._block_tokens else tail_hash_fn)(parent, self.ids(block))
            assert found == right, f"block {block} has a wrong hash"
        for number in self._roots:
            assert self._children.has_children(number), f"root {number} has no children, but still a hash"
            found = self._roots.get(number)
            assert found is None or self._hashes.find(found) < 0, f"root {number} is a block of the pool"

    def _has_hash(self, number: int, value: BlockHash) -> bool:
        """Return whether the parent with this number has this hash."""
        if number < self._num_blocks:
            return self._hashes.has(number, value)
        return self._roots.get(number) == value


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` tokens of block `source` to block `target`, all parts and layers."""

    source: int
    target: int
    num_tokens: int
