"""The sections of a slot file, read to its end: their shapes, and where the bytes of each tensor begin.

Owns how they are recognised (see `slot_file` for the format). Nothing in a file is believed: every count is compared
with the bytes that are left before it is used, and a file must be used up to its last byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rekindle.errors import RekindleError
from rekindle_backends.llama.shapes import AttentionShape, FileShape, RecurrentShape, RowShape

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Kind = Literal["k", "v"]

MAGIC, VERSION, TOKENS_VERSION = 0x67677371, 4, 1
MAX_STREAMS, MAX_LAYERS = 256, 512  # LLAMA_MAX_SEQ, LLAMA_MAX_LAYERS
EXTRA_BYTES = 12  # x, y and token of an M-RoPE cell


class SlotFileError(RekindleError):
    """The bytes are not a slot file that can be used; the message says where they differ from one."""


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """One memory of attention in a file: the positions [cells] of its cells in the file's order, and where rows lie.

    `extra` [cells, 12] are the bytes of M-RoPE cells, None where they have none.
    """

    positions: Ints
    extra: Bytes | None
    k_offsets: tuple[int, ...]
    v_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of recurrent layers in a file: after the first `num_tokens` tokens, and where its tensors lie."""

    num_tokens: int
    offsets: tuple[int, ...]


class Reader:
    """Reads on from `at`, never past the end."""

    def __init__(self, data: Bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def skip(self, num_bytes: int, what: str) -> int:
        """Pass over bytes and return where they begin."""
        if num_bytes > self.left:
            raise SlotFileError(
                f"the slot file ends within {what}: {num_bytes:,} bytes at {self.at:,}, has {self.left:,}"
            )
        begin, self.at = self.at, self.at + num_bytes
        return begin

    def number(self, form: Literal["<I", "<i", "<Q"], what: str) -> int:
        begin = self.skip(struct.calcsize(form), what)
        return int(struct.unpack_from(form, self.data.data, begin)[0])

    def ints(self, count: int, what: str) -> Ints:
        """The next `count` numbers int32, a view."""
        begin = self.skip(4 * count, what)
        return self.data[begin : begin + 4 * count].view("<i4")

    def wrong(self, what: str) -> SlotFileError:
        return SlotFileError(f"{what} before byte {self.at:,} of the slot file")


def read_tokens(reader: Reader) -> Ints:
    """Read the head of a file and its tokens [n]."""
    if (magic := reader.number("<I", "its head")) != MAGIC:
        raise SlotFileError(f"not a slot file of llama-server: it begins with {magic:#010x}")
    if (version := reader.number("<I", "its head")) != VERSION:
        raise SlotFileError(f"a slot file of version {version}, where only version {VERSION} is known")
    packed = reader.ints(reader.number("<I", "its head"), "its tokens")
    if len(packed) < 4 or packed[0] != -1 or packed[1] != TOKENS_VERSION:
        raise SlotFileError("the tokens of the slot file are not packed as this version of llama-server does it")
    count = int(packed[2])
    if not 0 <= count <= len(packed) - 4:
        raise SlotFileError(f"the slot file has {count:,} tokens in {len(packed):,} words")
    if packed[3 + count]:
        raise SlotFileError("the slot file has pictures among its tokens")
    if len(packed) != count + 4:
        raise SlotFileError(f"the slot file has {count:,} tokens in {len(packed):,} words")
    return packed[3 : 3 + count]


class Sections:
    """The sections of a file, read to its end in one reading: with `has_extra`, and with `has_v`."""

    def __init__(self, reader: Reader, *, has_extra: bool, has_v: bool) -> None:
        self.reader, self.has_extra, self.has_v = reader, has_extra, has_v
        self.slot = self.num_streams = -1
        attention = []
        recurrent: RecurrentShape | None = None
        self.state: RecurrentState | None = None
        while reader.left and recurrent is None:
            begin = reader.at
            try:
                attention.append(self._attention())
            except SlotFileError as error:
                recurrent, self.state = self._recurrent(begin, error)
        if not attention and recurrent is None:
            raise reader.wrong("no memory of the slot")
        self.rows = tuple(rows for _, rows in attention)
        shapes = tuple(shape for shape, _ in attention)
        self.shape = FileShape(VERSION, max(1, self.num_streams), shapes, recurrent)

    def _attention(self) -> tuple[AttentionShape, AttentionRows]:
        reader = self.reader
        num_streams = reader.number("<I", "a number of streams")
        if not 1 <= num_streams <= MAX_STREAMS or self.num_streams not in (-1, num_streams):
            raise reader.wrong(f"a memory with {num_streams:,} streams")
        found = None
        for stream in range(num_streams):
            num_cells = reader.number("<I", "a number of cells")
            if num_cells and found is not None:
                raise reader.wrong("cells in two streams")
            if num_cells:
                found = self._stream(num_cells, stream if num_streams > 1 else None)
        if found is None:
            raise reader.wrong("a memory without cells: the slot is empty")
        self.num_streams = num_streams
        return found

    def _stream(self, num_cells: int, stream: int | None) -> tuple[AttentionShape, AttentionRows]:
        """Read the cells of the slot and their rows; `stream`: the slot that they must be of."""
        reader = self.reader
        words = 6 if self.has_extra else 3
        cells = reader.ints(words * num_cells, "its cells").reshape(num_cells, words)
        slot = int(cells[0, -1])
        if not (cells[:, 1] == 1).all() or not (cells[:, -1] == slot).all() or (cells[:, 0] < 0).any():
            raise reader.wrong("cells that are not those of one slot")
        if not 0 <= slot < MAX_STREAMS or stream not in (None, slot) or self.slot not in (-1, slot):
            raise reader.wrong(f"cells of slot {slot} in the place of another")
        self.slot = slot
        transposed, num_layers, k_rotation, v_rotation = (reader.number("<I", "its layers") for _ in range(4))
        if transposed > 1 or num_layers > MAX_LAYERS:
            raise reader.wrong(f"{num_layers:,} layers, transposed {transposed}")
        k = [self._tensor(num_cells, "k") for _ in range(num_layers)]
        v = [self._tensor(num_cells, "v" if transposed else "k") for _ in range(num_layers * self.has_v)]
        k_shapes, v_shapes = tuple(shape for shape, _ in k), tuple(shape for shape, _ in v)
        extra = cells.view(np.uint8)[:, 8 : 8 + EXTRA_BYTES] if self.has_extra else None
        return (
            AttentionShape(self.has_extra, bool(transposed), k_rotation, v_rotation, k_shapes, v_shapes),
            AttentionRows(cells[:, 0], extra, tuple(at for _, at in k), tuple(at for _, at in v)),
        )

    def _tensor(self, num_cells: int, order: Kind, least_bytes: int = 1) -> tuple[RowShape, int]:
        """Read a tensor whose rows are tokens ("k") or channels ("v"); return its shape and where it begins."""
        reader = self.reader
        ggml_type, element = reader.number("<i", "a type"), 0
        if order == "k":
            row_bytes = reader.number("<Q", "a row's bytes")
        else:
            element = reader.number("<I", "an element's bytes")
            row_bytes = element * reader.number("<I", "a number of channels")
        if not 0 <= ggml_type < 256 or row_bytes < least_bytes:
            raise reader.wrong(f"type {ggml_type}, rows of {row_bytes:,} bytes")
        return RowShape(ggml_type, row_bytes, element), reader.skip(num_cells * row_bytes, "rows of a layer")

    def _recurrent(self, begin: int, error: SlotFileError) -> tuple[RecurrentShape, RecurrentState]:
        """Read the file from `begin` to its end as states of recurrent layers; else `error`, of another reading."""
        reader = self.reader
        failed_at, reader.at = reader.at, begin
        try:
            num_cells = reader.number("<I", "a number of states")
            cells = reader.ints(2 * num_cells, "its states").reshape(num_cells, 2)
            transposed, num_layers = reader.number("<I", "its states"), reader.number("<I", "its states")
            if num_cells != 1 or cells[0, 0] < 0 or cells[0, 1] or transposed or not 1 <= num_layers <= MAX_LAYERS:
                raise error
            tensors: list[tuple[RowShape, int]] = []
            while reader.left and len(tensors) < 2 * num_layers:
                tensors.append(self._tensor(num_cells, "k", least_bytes=0))  # of convolutions alone, S has none
            if not tensors or reader.left:
                raise error
        except SlotFileError:
            reader.at = failed_at
            raise error from None
        shape = RecurrentShape(num_layers, tuple(each for each, _ in tensors))
        return shape, RecurrentState(int(cells[0, 0]) + 1, tuple(at for _, at in tensors))
