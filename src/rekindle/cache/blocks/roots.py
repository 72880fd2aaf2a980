"""Parents that are not blocks of a pool: one for each namespace, salt and model that has a block there.

Owns their hashes and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.cache.blocks.hashing import BlockHash


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
