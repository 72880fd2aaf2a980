"""Slot files of llama-server, version 4: what one holds, and one written as llama-server would.

Owns the format. Knows no blocks and no arena. Nothing in a file is believed: every count is compared with the bytes
that are left before it is used, and a file must be used up to its last byte.

    u32 'ggsq', u32 version, u32 n, n x i32      i32 -1, u32 1, u32 count, i32 ids [count], u32 pictures (0)
    one section per memory: full attention; the windows, of models that have both; recurrent states, of hybrids
        u32 streams                              one for each slot, or one for all (a unified cache)
        per stream: u32 cells                    that of the slot has them, the others none and nothing else
            per cell: i32 position, u32 1, [i32 x, y, token], i32 slot
            u32 V is transposed, u32 layers, u32 rotation of K, u32 rotation of V
            per layer: i32 type, u64 row bytes, K [cells, row]
            per layer: i32 type, u64 row bytes, V [cells, row]      none of latent attention (MLA)
               or, transposed: i32 type, u32 element bytes, u32 channels, V [channels, cells]
        recurrent: u32 cells, per cell i32 position, u32 0; u32 0, u32 layers, per tensor i32 type, u64 row, R, then S

No field says whether cells have x, y and token (M-RoPE) or whether V is there: while a server's shape is not known,
all readings are tried, and one alone must use up the file. A file cut where a memory ends is whole to a reader, so the
files that follow are held against the shape of the first.

Sources: llama.cpp (b11434) src/llama-kv-cache.cpp state_write, src/llama-memory-recurrent.cpp state_write,
src/llama-context.cpp state_seq_save_file, tools/server/server-common.cpp server_tokens::serialize.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from rekindle.errors import RekindleError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Kind = Literal["k", "v"]

MAGIC, VERSION, TOKENS_VERSION = 0x67677371, 4, 1
MAX_STREAMS, MAX_LAYERS = 256, 512  # LLAMA_MAX_SEQ, LLAMA_MAX_LAYERS
EXTRA_BYTES = 12  # x, y and token of an M-RoPE cell
_ALL = slice(None)


class SlotFileError(RekindleError):
    """The bytes are not a slot file that can be used; the message says where they differ from one."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a tensor of a layer keeps of one token: ggml's type and the bytes of its row.

    `element_bytes` is that of a channel where V is transposed, else 0.
    """

    ggml_type: int
    row_bytes: int
    element_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One memory of attention: the rows of its layers, those of V in none or in all; `has_extra` of M-RoPE cells."""

    has_extra: bool
    is_transposed: bool
    k_rotation: int
    v_rotation: int
    k: tuple[RowShape, ...]
    v: tuple[RowShape, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(each.row_bytes for each in (*self.k, *self.v))


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The memory of recurrent layers: the tensors R of those that have one, then their S."""

    num_layers: int
    tensors: tuple[RowShape, ...]


@dataclass(frozen=True, slots=True)
class FileShape:
    """All of a file that depends neither on its tokens nor on its slot: what another one is written by."""

    version: int
    num_streams: int
    attention: tuple[AttentionShape, ...]
    recurrent: RecurrentShape | None = None

    @property
    def reading(self) -> tuple[bool, bool]:
        """What the fields of a file do not say: whether its cells are those of M-RoPE, and whether it has V."""
        return any(each.has_extra for each in self.attention), any(each.v for each in self.attention)

    @property
    def identity(self) -> bytes:
        """Differs whenever rows would be read differently; the same however many slots a server has."""
        described = {name: value for name, value in asdict(self).items() if name != "num_streams"}
        return json.dumps(described, sort_keys=True).encode()


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
class SlotFile:
    """A file that llama-server wrote, mapped: nothing is copied until rows are asked for.

    Arrays are read-only views that keep the mapping alive; the file may be removed at once, but must not be cut.
    """

    shape: FileShape
    slot: int
    tokens: Ints
    attention: tuple[AttentionRows, ...]
    data: Bytes = field(repr=False)

    @classmethod
    def open(cls, path: str | Path, *, shape: FileShape | None = None) -> SlotFile:
        """Map and parse a file. `shape`: that of this server's files; None for the first one, from which it is learned.

        SlotFileError if it is no slot file of this version, or one of another shape; OSError if it cannot be read.
        """
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if not num_bytes:
                raise SlotFileError("the slot file is empty")
            data = np.frombuffer(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)
        return cls.parse(data, shape=shape)

    @classmethod
    def parse(cls, data: Bytes, *, shape: FileShape | None = None) -> SlotFile:
        """Parse the bytes of a file; as `open`."""
        reader = _Reader(data)
        tokens = _read_tokens(reader)
        found, failures = [], [(0, "")]
        readings = itertools.product((False, True), (True, False)) if shape is None else [shape.reading]
        for has_extra, has_v in readings:
            sections = _Reader(data, reader.at)
            try:
                found.append(_Sections(sections, has_extra=has_extra, has_v=has_v))
            except SlotFileError as error:
                failures.append((sections.at, str(error)))
        if not found:
            raise SlotFileError(max(failures)[1])
        if len(found) > 1:
            raise SlotFileError("the slot file can be read in more than one way: save a slot of more tokens")
        if shape is not None and found[0].shape != shape:
            raise SlotFileError("the slot file is not of the shape that this server's files have")
        return cls(found[0].shape, found[0].slot, tokens, found[0].rows, data)

    def rows(self, section: int, layer: int, kind: Kind, cells: slice | npt.NDArray[np.intp] = _ALL) -> Bytes:
        """Rows of K or V of a layer uint8 [cells, row bytes], of the given cells in the file's order.

        A view where the cells are a slice and V is not transposed, else a copy of these cells alone.
        """
        shape, rows = self.shape.attention[section], self.attention[section]
        wanted = shape.k[layer] if kind == "k" else shape.v[layer]
        offset = rows.k_offsets[layer] if kind == "k" else rows.v_offsets[layer]
        num_cells = len(rows.positions)
        stored = self.data[offset : offset + num_cells * wanted.row_bytes]
        if not wanted.element_bytes:
            return stored.reshape(num_cells, wanted.row_bytes)[cells]
        channels = stored.view(_element(wanted.element_bytes)).reshape(-1, num_cells)
        return np.ascontiguousarray(channels[:, cells].T).view(np.uint8)


def _element(num_bytes: int) -> np.dtype[np.generic]:
    """A type of so many bytes, one that numpy copies fast where there is one."""
    return np.dtype(f"<u{num_bytes}") if num_bytes in (1, 2, 4, 8) else np.dtype((np.void, num_bytes))


class _Reader:
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


def _read_tokens(reader: _Reader) -> Ints:
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


class _Sections:
    """The sections of a file, read to its end in one reading: with `has_extra`, and with `has_v`."""

    def __init__(self, reader: _Reader, *, has_extra: bool, has_v: bool) -> None:
        self.reader, self.has_extra, self.has_v = reader, has_extra, has_v
        self.slot = self.num_streams = -1
        attention = []
        recurrent = None
        while reader.left and recurrent is None:
            begin = reader.at
            try:
                attention.append(self._attention())
            except SlotFileError as error:
                recurrent = self._recurrent(begin, error)
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

    def _tensor(self, num_cells: int, order: Kind) -> tuple[RowShape, int]:
        """Read a tensor whose rows are tokens ("k") or channels ("v"); return its shape and where it begins."""
        reader = self.reader
        ggml_type, element = reader.number("<i", "a type"), 0
        if order == "k":
            row_bytes = reader.number("<Q", "a row's bytes")
        else:
            element = reader.number("<I", "an element's bytes")
            row_bytes = element * reader.number("<I", "a number of channels")
        if not 0 <= ggml_type < 256 or not row_bytes:
            raise reader.wrong(f"type {ggml_type}, rows of {row_bytes:,} bytes")
        return RowShape(ggml_type, row_bytes, element), reader.skip(num_cells * row_bytes, "rows of a layer")

    def _recurrent(self, begin: int, error: SlotFileError) -> RecurrentShape:
        """Read the file from `begin` to its end as states of recurrent layers; else `error`, of another reading."""
        reader = self.reader
        failed_at, reader.at = reader.at, begin
        try:
            num_cells = reader.number("<I", "a number of states")
            cells = reader.ints(2 * num_cells, "its states").reshape(num_cells, 2)
            transposed, num_layers = reader.number("<I", "its states"), reader.number("<I", "its states")
            if num_cells != 1 or cells[0, 1] or transposed or not 1 <= num_layers <= MAX_LAYERS:
                raise error
            tensors: list[RowShape] = []
            while reader.left and len(tensors) < 2 * num_layers:
                tensors.append(self._tensor(num_cells, "k")[0])
            if not tensors or reader.left:
                raise error
        except SlotFileError:
            reader.at = failed_at
            raise error from None
        return RecurrentShape(num_layers, tuple(tensors))


@dataclass(frozen=True, slots=True)
class RowsToWrite:
    """One memory of attention for `write`: positions [cells], and rows(layer, kind) uint8 [cells, row bytes].

    `rows` is asked once for each tensor, in the file's order, and what it returned is not used after the next call.
    `extra` uint8 [cells, 12] for M-RoPE cells.
    """

    positions: Ints
    rows: Callable[[int, Kind], Bytes]
    extra: Bytes | None = None


def write(path: str | Path, shape: FileShape, slot: int, tokens: Ints, sections: Sequence[RowsToWrite]) -> int:
    """Write the file that llama-server would write for `slot` with these tokens and rows; return its bytes.

    A file that could not be written to its end is removed: one that is cut aborts llama-server.
    """
    if shape.version != VERSION or shape.recurrent is not None:
        raise ValueError("only slot files of attention, of the version that is read here, are written")
    if not 0 <= slot < (shape.num_streams if shape.num_streams > 1 else MAX_STREAMS):
        raise ValueError(f"there is no slot {slot} in a file of {shape.num_streams} streams")
    try:
        with open(path, "wb") as file:
            words = [-1, TOKENS_VERSION, len(tokens)]
            file.write(struct.pack("<IIIiII", MAGIC, VERSION, len(tokens) + 4, *words))
            file.write(tokens.astype("<i4", copy=False).tobytes() + bytes(4))
            for section, given in zip(shape.attention, sections, strict=True):
                stream = slot if shape.num_streams > 1 else 0
                file.write(struct.pack("<I", shape.num_streams) + bytes(4 * stream))
                file.write(struct.pack("<I", len(given.positions)))
                _write_stream(file, section, slot, given)
                file.write(bytes(4 * (shape.num_streams - stream - 1)))
            return file.tell()
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise


def _write_stream(file: BinaryIO, section: AttentionShape, slot: int, given: RowsToWrite) -> None:
    num_cells = len(given.positions)
    cells = np.empty((num_cells, 6 if section.has_extra else 3), dtype="<i4")
    cells[:, 0], cells[:, 1], cells[:, -1] = given.positions, 1, slot
    if section.has_extra:
        assert given.extra is not None, "cells of M-RoPE have x, y and token"
        cells.view(np.uint8)[:, 8 : 8 + EXTRA_BYTES] = given.extra
    file.write(cells.data)
    flags = int(section.is_transposed), len(section.k), section.k_rotation, section.v_rotation
    file.write(struct.pack("<IIII", *flags))
    kinds: tuple[tuple[Kind, tuple[RowShape, ...]], ...] = (("k", section.k), ("v", section.v))
    for kind, shapes in kinds:
        for layer, shape in enumerate(shapes):
            rows = given.rows(layer, kind)
            assert rows.shape == (num_cells, shape.row_bytes), f"{kind} of layer {layer} is {rows.shape}"
            if shape.element_bytes:
                form = shape.ggml_type, shape.element_bytes, shape.row_bytes // shape.element_bytes
                file.write(struct.pack("<iII", *form))
                rows = np.ascontiguousarray(rows).view(_element(shape.element_bytes)).T
            else:
                file.write(struct.pack("<iQ", shape.ggml_type, shape.row_bytes))
            file.write(np.ascontiguousarray(rows).view(np.uint8).data)
