"""The KV cache groups of an engine: which part of a record each one holds, and where its tokens are in its blocks.

A *piece* is the largest run of tokens that lies in one record and in one block of a group, whatever their sizes: the
`n`-th piece of a block has the id `block * pieces of a block + n`. Of states a piece is a block, which has one. A
record has the pieces of all groups that hold its part, group by group. Knows no tensors and no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm

from rekindle.parts import FULL, STATE, FullPart, Part, StatePart, WindowPart
from rekindle_vllm.steps import ABSENT, Blocks

NULL = 0  # the block that an engine puts where a request needs none
Tables = Sequence[Sequence[int]]  # a request's blocks by group, in the order of its tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with blocks of their own that hold `part` of a record, or some layers of it.

    A block has K and V of `block_tokens` tokens, of which the engine keeps what its `kind` says, or the state after as
    many.
    """

    part: int
    block_tokens: int
    kind: Part = FULL


class Groups:
    """The groups of an engine in its order, for records of `record_tokens` tokens.

    `resume_tokens`: an engine can go on after multiples of these only, where blocks of all groups and a record end.
    """

    def __init__(self, groups: Sequence[Group], record_tokens: int) -> None:
        self.record_tokens = record_tokens
        self.resume_tokens = lcm(record_tokens, *(group.block_tokens for group in groups))
        self._groups = tuple(groups)
        self._of_part: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            self._of_part.setdefault(group.part, []).append(number)
        self.kinds = {part: groups[numbers[0]].kind for part, numbers in sorted(self._of_part.items())}
        self.parts = tuple(self.kinds)
        assert self.parts == tuple(range(len(self.parts))), "a part has no group"
        self.state_groups = [number for number, group in enumerate(groups) if group.kind == STATE]
        for group in groups:
            assert group.kind != STATE or group.block_tokens % record_tokens == 0, "a state is inside a record"

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def ending_parts(self) -> tuple[int, ...]:
        """The parts that an engine keeps near the end of a sequence only."""
        return tuple(part for part, kind in self.kinds.items() if kind != FULL)

    def block_tokens(self, group: int) -> int:
        """Tokens of a block of a group."""
        return self._groups[group].block_tokens

    def pieces_per_block(self, group: int) -> int:
        """Pieces of a block of a group, 1 for states."""
        size = self._groups[group].block_tokens
        return 1 if self._groups[group].kind == STATE else size // gcd(size, self.record_tokens)

    def columns(self, group: int) -> slice:
        """Which of the pieces of a record's part are those of a group."""
        start = 0
        for number in self._of_part[self._groups[group].part]:
            if number == group:
                break
            start += self._pieces_per_record(number)
        return slice(start, start + self._pieces_per_record(group))

    def needed(self, part: int, point: int) -> range:
        """The records whose part an engine needs to go on after `point` tokens, a multiple of `resume_tokens`.

        Of windows all that lie in blocks that it keeps there: what it does not need itself of those is stored for
        others that share them.
        """
        end = point // self.record_tokens
        match self.kinds[part]:
            case FullPart():
                return range(end)
            case StatePart():
                return range(end - 1, end)
            case WindowPart(window):
                sizes = (self._groups[group].block_tokens for group in self._of_part[part])
                first = min(max(0, point - window + 1) // size * size for size in sizes)
                return range(first // self.record_tokens, end)

    def needs(self, point: int) -> set[tuple[int, int]]:
        """The parts that end, each with the number of its record, that an engine needs after `point` tokens."""
        return {(part, record) for part in self.ending_parts for record in self.needed(part, point)}

    def positions(self, point: int) -> set[int]:
        """The positions that a store has to keep parts for, so that a point has all records that it needs.

        A store keeps for each a window before it and one record more, and an engine needs all that is in its blocks.
        """
        found = {point + 1}  # the token that is computed first
        for part, kind in self.kinds.items():
            first, size = self.needed(part, point).start, self.record_tokens
            if isinstance(kind, WindowPart) and (point + 1 - size - kind.window) // size > first:
                found.update(range((first + 1) * size + kind.window, point + 1, kind.window))
        return found

    def pieces(self, part: int, record: int, tables: Tables, start: int = 0, end: int = 1 << 62) -> Blocks:
        """The pieces of a record's part, `ABSENT` those that the request has no block for or that are not wholly in
        the tokens `start` to `end`."""
        return tuple(
            piece for group in self._of_part[part] for piece in self._pieces(group, record, tables[group], start, end)
        )

    def _pieces_per_record(self, group: int) -> int:
        size = self._groups[group].block_tokens
        return 1 if self._groups[group].kind == STATE else self.record_tokens // gcd(size, self.record_tokens)

    def _pieces(self, group: int, record: int, table: Sequence[int], start: int, end: int) -> Iterable[int]:
        size = self._groups[group].block_tokens
        if self._groups[group].kind == STATE:
            last = (record + 1) * self.record_tokens
            number = last // size - 1
            yield table[number] if last % size == 0 and table[number] != NULL and start < last <= end else ABSENT
            return
        tokens, per_block = gcd(size, self.record_tokens), self.pieces_per_block(group)
        for first in range(record * self.record_tokens, (record + 1) * self.record_tokens, tokens):
            number, inside = divmod(first, size)
            is_there = start <= first and first + tokens <= end and number < len(table) and table[number] != NULL
            yield table[number] * per_block + inside // tokens if is_there else ABSENT
