"""Parents that are no blocks of a pool: one for each namespace, salt and model that has a block there.

Owns their names and numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.cache.blocks.hashing import BlockHash


class Roots:
    """Names by number, from `first` on; a number that was dropped is given again."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._numbers: dict[BlockHash, int] = {}
        self._names: list[BlockHash | None] = []
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.values())

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._numbers

    def find(self, name: BlockHash) -> int:
        """Return the number of a name, -1 when it has none."""
        return self._numbers.get(name, -1)

    def name(self, number: int) -> BlockHash | None:
        return self._names[number - self._first]

    def take(self, name: BlockHash) -> int:
        """Return the number of a name, a new one if it has none."""
        number = self._numbers.get(name, -1)
        if number >= 0:
            return number
        if self._spare:
            number = self._spare.pop()
        else:
            number = self._first + len(self._names)
            self._names.append(None)
        self._numbers[name] = number
        self._names[number - self._first] = name
        return number

    def drop(self, number: int) -> None:
        name = self._names[number - self._first]
        assert name is not None, f"nobody has the number {number}"
        del self._numbers[name]
        self._names[number - self._first] = None
        self._spare.append(number)

    def check(self) -> None:
        """Assert that names and numbers agree, and that no number is lost."""
        for name, number in self._numbers.items():
            assert self.name(number) == name, (
                f"{name!r} has the number {number}, which is that of {self.name(number)!r}"
            )
        assert len(self._numbers) + len(self._spare) == len(self._names), f"{len(self._names)} numbers, some are lost"
