"""Slot files of llama-server from their description, byte by byte: what our reader and writer are held against.

Every byte of a row is a function of where it is, so that a row in the wrong place is seen.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

from hypothesis import strategies as st


@dataclass(frozen=True)
class Tensor:
    """ggml's type and the bytes of a row; in elements of so many bytes if V is transposed."""

    type: int
    row: int
    element: int = 1


@dataclass(frozen=True)
class Memory:
    """One memory of attention. `zeros`: positions whose rows are of zeros."""

    positions: tuple[int, ...]
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    is_transposed: bool = False
    has_extra: bool = False
    rotations: tuple[int, int] = (0, 0)
    zeros: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Example:
    """A file of one slot. Rows of the first `shared` positions do not depend on `seed`.

    `states`: the tensors of a recurrent state, after `state_end` tokens, or after all.
    """

    memories: tuple[Memory, ...]
    tokens: tuple[int, ...]
    slot: int = 0
    num_streams: int = 1
    seed: int = 0
    shared: int = 0
    states: tuple[Tensor, ...] = ()
    state_end: int | None = None

    def state(self, tensor: int) -> bytes:
        """The bytes of one tensor of the state."""
        end = len(self.tokens) if self.state_end is None else self.state_end
        seed = 0 if end <= self.shared else self.seed
        return hashlib.shake_128(f"{seed} state {tensor} {end}".encode()).digest(self.states[tensor].row)

    def row(self, memory: int, layer: int, kind: str, position: int) -> bytes:
        """The bytes of K or V ("k", "v") of a token, or the 12 of its cell ("x")."""
        own = self.memories[memory]
        size = 12 if kind == "x" else (own.k if kind == "k" else own.v)[layer].row
        if position in own.zeros and kind != "x":
            return bytes(size)
        place = "all" if kind == "x" else memory  # a token has the same cell in all memories
        seed = 0 if position < self.shared else self.seed
        return hashlib.shake_128(f"{seed} {place} {layer} {kind} {position}".encode()).digest(size)

    def of(
        self, num_tokens: int, slot: int, *positions: tuple[int, ...], zeros: frozenset[int] = frozenset()
    ) -> Example:
        """The file of the first tokens for another slot, with these positions in its memories."""
        memories = [replace(own, positions=where) for own, where in zip(self.memories, positions, strict=True)]
        memories[1:] = [replace(own, zeros=zeros) for own in memories[1:]]
        return replace(self, memories=tuple(memories), tokens=self.tokens[:num_tokens], slot=slot)

    def __bytes__(self) -> bytes:
        packed = struct.pack(f"<iII{len(self.tokens)}iI", -1, 1, len(self.tokens), *self.tokens, 0)
        head = b"qsgg" + struct.pack("<II", 4, len(packed) // 4)
        return head + packed + b"".join(map(self._memory, range(len(self.memories)))) + self._states()

    def _states(self) -> bytes:
        if not self.states:
            return b""
        end = len(self.tokens) if self.state_end is None else self.state_end
        tensors = (
            struct.pack("<iQ", each.type, each.row) + self.state(number) for number, each in enumerate(self.states)
        )
        return struct.pack("<IiIII", 1, end - 1, 0, 0, len(self.states)) + b"".join(tensors)

    def _memory(self, index: int) -> bytes:
        streams = [struct.pack("<I", 0)] * self.num_streams
        streams[self.slot if self.num_streams > 1 else 0] = self._stream(index)
        return struct.pack("<I", self.num_streams) + b"".join(streams)

    def _stream(self, index: int) -> bytes:
        own = self.memories[index]
        out = struct.pack("<I", len(own.positions))
        for position in own.positions:
            extra = self.row(index, 0, "x", position) if own.has_extra else b""
            out += struct.pack("<iI", position, 1) + extra + struct.pack("<i", self.slot)
        out += struct.pack("<IIII", own.is_transposed, len(own.k), *own.rotations)
        for layer, tensor in enumerate(own.k):
            rows = [self.row(index, layer, "k", position) for position in own.positions]
            out += struct.pack("<iQ", tensor.type, tensor.row) + b"".join(rows)
        for layer, tensor in enumerate(own.v):
            rows = [self.row(index, layer, "v", position) for position in own.positions]
            if own.is_transposed:
                size = tensor.element
                out += struct.pack("<iII", tensor.type, size, tensor.row // size)
                out += b"".join(row[at : at + size] for at in range(0, tensor.row, size) for row in rows)
            else:
                out += struct.pack("<iQ", tensor.type, tensor.row) + b"".join(rows)
        return out


ROWS = st.sampled_from([Tensor(1, 32, 2), Tensor(1, 6, 2), Tensor(8, 34, 34), Tensor(2, 18, 18), Tensor(0, 12, 4)])


def full(num_tokens: int, *, order: tuple[int, ...] | None = None, layers: int = 2, **more: object) -> Memory:
    """A memory of full attention in f16."""
    rows = (Tensor(1, 8, 2),) * layers
    return Memory(order or tuple(range(num_tokens)), k=rows, v=rows, **more)


@st.composite
def memories(draw: st.DrawFn, positions: st.SearchStrategy[tuple[int, ...]], *, has_extra: bool) -> Memory:
    layers = draw(st.integers(1, 3))
    has_v = draw(st.booleans())
    return Memory(
        draw(positions),
        k=tuple(draw(st.lists(ROWS, min_size=layers, max_size=layers))),
        v=tuple(draw(st.lists(ROWS, min_size=layers, max_size=layers))) if has_v else (),
        is_transposed=draw(st.booleans()),
        has_extra=has_extra,
        rotations=draw(st.sampled_from([(0, 0), (64, 64), (0, 64)])),
    )


@st.composite
def examples(
    draw: st.DrawFn, max_tokens: int = 200, windows: tuple[int, ...] = (0, 1), states: tuple[int, ...] = (0, 0, 2)
) -> Example:
    """Files of full attention, perhaps a window and perhaps a recurrent state of two tensors, with cells in any order;
    some with a state alone."""
    num_tokens = draw(st.integers(2, max_tokens))
    has_extra = draw(st.booleans())
    first = draw(st.integers(0, num_tokens - 1))
    order = draw(st.sampled_from(["as it is", "turned", "any"]))

    def ordered(begin: int) -> st.SearchStrategy[tuple[int, ...]]:
        where = list(range(begin, num_tokens))
        if order == "any":
            return st.permutations(where).map(tuple)
        at = len(where) // 3 if order == "turned" else 0
        return st.just((*where[at:], *where[:at]))

    kept = [draw(memories(ordered(0), has_extra=has_extra))]
    for _ in range(draw(st.sampled_from(windows))):
        kept.append(draw(memories(ordered(first), has_extra=has_extra)))
    kept[1:] = [
        replace(each, v=(each.v or each.k) if kept[0].v else (), is_transposed=kept[0].is_transposed)
        for each in kept[1:]
    ]
    tokens = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=num_tokens, max_size=num_tokens)))
    num_streams = draw(st.integers(1, 4))
    slot = draw(st.integers(0, 3 if num_streams == 1 else num_streams - 1))
    count = draw(st.sampled_from(states))
    tensors = tuple(draw(st.lists(st.one_of(ROWS, st.just(Tensor(0, 0))), min_size=count, max_size=count)))
    if tensors and len(kept) == 1 and draw(st.booleans()):
        kept, num_streams = [], 1
    return Example(tuple(kept), tokens, slot, num_streams, seed=draw(st.integers(0, 5)), states=tensors)
