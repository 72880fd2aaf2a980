"""What stands in named blocks: name, parent and token ids, in arrays, found by name or by what comes next.

Owns these three of every named block. Does not know who holds a block, nor who leaves next.
Invariants: a block has all three or none. No two blocks have the same name, nor the same parent and ids. No block
bears a root's name. A block is emptied after its children.

A parent is a number: that of its block, or one from `num_blocks` on for a root, which is any name that no block bore
when it got its first child. It stays a root while it has one, so that nobody's children become another's.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.cache.blocks.children import ChildIndex
from rekindle.cache.blocks.hash_column import NameTable, no_name
from rekindle.cache.blocks.hashing import HASH_BYTES, BlockHash, TokenIds, id_bytes
from rekindle.cache.blocks.id_column import IdRows
from rekindle.cache.blocks.roots import Roots

HashFn = Callable[[BlockHash, TokenIds], BlockHash]


def check_name(name: BlockHash) -> None:
    """Refuse what can be no name, for whoever lets names in."""
    if type(name) is not bytes or len(name) != HASH_BYTES:
        raise no_name(name)


class BlockContents:
    """Of the named ones of `num_blocks` blocks of `block_tokens` tokens; a block with fewer ids is a tail."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._names = NameTable(num_blocks)
        self._rows = IdRows(num_blocks, block_tokens)
        self._lengths = self._rows.lengths
        self._children = ChildIndex(num_blocks, self._rows)
        self._roots = Roots(num_blocks)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, block: int) -> bool:
        return self._lengths[block] > 0

    @property
    def nbytes(self) -> int:
        return self._names.nbytes + self._rows.nbytes + self._children.nbytes

    def blocks(self) -> list[int]:
        """Return all named blocks, ascending."""
        return list(self._names)

    def find(self, name: BlockHash) -> int | None:
        """Return the block that bears the name, whatever its ids."""
        block = self._names.find(name)
        return None if block < 0 else block

    def match(self, name: BlockHash, data: bytes, parent: BlockHash | None) -> int | None:
        """Return the block that bears the name, holds these ids and, if one is given, is this parent's child."""
        block = self._names.find(name)
        if block < 0 or not self._rows.holds(block, data):
            return None
        return block if parent is None or self._bears(self._children.parent(block), parent) else None

    def prefix(self, root: BlockHash, ids: TokenIds, hash_fn: HashFn) -> list[int]:
        """Return the full blocks of the longest prefix of `ids`, each its predecessor's child, the first the root's."""
        size = self._block_tokens
        blocks: list[int] = []
        parent = root
        for start in range(0, len(ids) - size + 1, size):
            part = ids[start : start + size]
            name = hash_fn(parent, part)
            block = self.match(name, id_bytes(part), parent)
            if block is None:
                break
            blocks.append(block)
            parent = name
        return blocks

    def find_child(self, parent: BlockHash, data: bytes) -> tuple[int, int] | None:
        """Return the child with the most leading ids in common with `data`, of several the last added, and how many."""
        number = self._names.find(parent)
        if number < 0:
            number = self._roots.find(parent)
        found = self._children.find(number, data) if number >= 0 else None
        return found if found is not None and found[1] > 0 else None

    def above(self, block: int) -> int:
        """Return the block that is a block's parent, -1 when that is a root."""
        number = self._children.parent(block)
        return number if number < self._num_blocks else -1

    def name(self, block: int) -> BlockHash | None:
        name = self._names.name(block)
        return None if name is None else BlockHash(name)

    def parent(self, block: int) -> BlockHash | None:
        number = self._children.parent(block)
        if number < 0:
            return None
        return self.name(number) if number < self._num_blocks else self._roots.name(number)

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the block's ids; none when it has no name."""
        return self._rows.ids(block)

    def add(self, block: int, name: BlockHash, parent: BlockHash, data: bytes) -> bool:
        """Name a block by a name that no block bears.

        False, and nothing happens, if the name is a root's, its own parent's, or its ids are here under another.
        """
        if name in self._roots or name == parent:
            return False
        self._rows.put(block, data)
        number = self._names.find(parent)
        if number < 0:
            number = self._roots.take(parent)
        if not self._children.add(block, number):
            self._rows.drop(block)
            return False
        self._names.put(block, name)
        return True

    def remove(self, block: int) -> BlockHash:
        """Forget what is said of a named block without children, and return the name it had."""
        assert not self._children.has_children(block), f"block {block} leaves before its children"
        number = self._children.parent(block)
        self._children.remove(block)
        if number >= self._num_blocks and not self._children.has_children(number):
            self._roots.drop(number)
        self._rows.drop(block)
        return BlockHash(self._names.drop(block))

    def check(self, hash_fn: HashFn, tail_hash_fn: HashFn) -> None:
        """Assert that all parts agree, and that every name is that of its parent and ids."""
        for part in (self._names, self._children, self._roots):
            part.check()
        for block, length in enumerate(self._lengths):
            name, parent = self.name(block), self.parent(block)
            if not length:
                assert name is None and parent is None, f"block {block} has no ids, and name {name!r}, {parent!r}"
                continue
            assert name is not None and parent is not None, f"block {block} is half-named"
            right = (hash_fn if length == self._block_tokens else tail_hash_fn)(parent, self.ids(block))
            assert name == right, f"block {block} bears a wrong name"
        for number in self._roots:
            assert self._children.has_children(number), f"root {number} has no children, and keeps its name"
            name = self._roots.name(number)
            assert name is None or self._names.find(name) < 0, f"root {number} is a block of the pool"

    def _bears(self, number: int, name: BlockHash) -> bool:
        """Say whether a parent has this name."""
        if number < self._num_blocks:
            return self._names.bears(number, name)
        return self._roots.name(number) == name
