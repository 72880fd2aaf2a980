"""Slot files of llama-server, version 4: what one holds, and one written as llama-server would.

Owns the format, whose sections `sections` reads. Knows no blocks and no arena.

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
import mmap
import os
import stat
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rekindle_backends.llama.sections import (
    EXTRA_BYTES,
    MAGIC,
    MAX_STREAMS,
    TOKENS_VERSION,
    VERSION,
    AttentionRows,
    Bytes,
    Ints,
    Kind,
    Reader,
    RecurrentState,
    Sections,
    SlotFileError,
    read_tokens,
)
from rekindle_backends.llama.shapes import AttentionShape, FileShape, RecurrentShape, RowShape

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file that llama-server wrote, mapped: nothing is copied until rows are asked for.

    Arrays are read-only views that keep the mapping alive; the file may be removed at once, but must not be cut.
    """

    shape: FileShape
    slot: int
    tokens: Ints
    attention: tuple[AttentionRows, ...]
    state: RecurrentState | None
    data: Bytes = field(repr=False)

    @classmethod
    def open(cls, path: str | Path, *, shape: FileShape | None = None) -> SlotFile:
        """Map and parse a file. `shape`: that of this server's files; None for the first one, from which it is learned.

        SlotFileError if it is no slot file of this version, or one of another shape; OSError if it cannot be read. What
        is no file, a link or a pipe for instance, is neither followed nor waited for.
        """
        with open(path, "rb", opener=_plain_file) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SlotFileError("the slot file is no file")
            num_bytes = status.st_size
            if not num_bytes:
                raise SlotFileError("the slot file is empty")
            data = np.frombuffer(mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ), dtype=np.uint8)
        return cls.parse(data, shape=shape)

    @classmethod
    def parse(cls, data: Bytes, *, shape: FileShape | None = None) -> SlotFile:
        """Parse the bytes of a file; as `open`."""
        reader = Reader(data)
        tokens = read_tokens(reader)
        found, failures = dict[FileShape, Sections](), [(0, "")]
        readings = itertools.product((False, True), (True, False)) if shape is None else [shape.reading]
        for has_extra, has_v in readings:
            rest = Reader(data, reader.at)
            try:
                sections = Sections(rest, has_extra=has_extra, has_v=has_v)
            except SlotFileError as error:
                failures.append((rest.at, str(error)))
            else:
                found[sections.shape] = sections  # of recurrent layers alone all readings are one
        if not found:
            raise SlotFileError(max(failures)[1])
        if len(found) > 1:
            raise SlotFileError("the slot file can be read in more than one way: save a slot of more tokens")
        ((own, sections),) = found.items()
        if shape is not None and own != shape:
            raise SlotFileError("the slot file is not of the shape that this server's files have")
        return cls(own, sections.slot, tokens, sections.rows, sections.state, data)

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

    def states(self) -> list[Bytes]:
        """The tensors of its recurrent state, uint8 [row bytes] each; none of a model without one. Views."""
        if self.state is None or self.shape.recurrent is None:
            return []
        tensors = zip(self.state.offsets, self.shape.recurrent.tensors, strict=True)
        return [self.data[at : at + each.row_bytes] for at, each in tensors]


def _plain_file(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _element(num_bytes: int) -> np.dtype[np.generic]:
    """A type of so many bytes, one that numpy copies fast where there is one."""
    return np.dtype(f"<u{num_bytes}") if num_bytes in (1, 2, 4, 8) else np.dtype((np.void, num_bytes))


@dataclass(frozen=True, slots=True)
class RowsToWrite:
    """One memory of attention for `write`: positions [cells], and rows(layer, kind) uint8 [cells, row bytes].

    `rows` is asked once for each tensor, in the file's order, and what it returned is not used after the next call.
    `extra` uint8 [cells, 12] for M-RoPE cells.
    """

    positions: Ints
    rows: Callable[[int, Kind], Bytes]
    extra: Bytes | None = None


def write(
    path: str | Path,
    shape: FileShape,
    slot: int,
    tokens: Ints,
    sections: Sequence[RowsToWrite],
    states: Sequence[Bytes] = (),
) -> int:
    """Write the file that llama-server would write for `slot` with these tokens and rows; return its bytes.

    `states`: the tensors of a recurrent state after the last token, uint8 [row bytes] each. A file that could not be
    written to its end is removed: one that is cut aborts llama-server. OSError for a link, a pipe or a folder in its
    place, which is left alone.
    """
    if shape.version != VERSION:
        raise ValueError("only slot files of the version that is read here are written")
    if not 0 <= slot < (shape.num_streams if shape.num_streams > 1 else MAX_STREAMS):
        raise ValueError(f"there is no slot {slot} in a file of {shape.num_streams} streams")
    with open(path, "wb", opener=_plain_file) as file:
        try:
            words = [-1, TOKENS_VERSION, len(tokens)]
            file.write(struct.pack("<IIIiII", MAGIC, VERSION, len(tokens) + 4, *words))
            file.write(tokens.astype("<i4", copy=False).tobytes() + bytes(4))
            for section, given in zip(shape.attention, sections, strict=True):
                stream = slot if shape.num_streams > 1 else 0
                file.write(struct.pack("<I", shape.num_streams) + bytes(4 * stream))
                file.write(struct.pack("<I", len(given.positions)))
                _write_stream(file, section, slot, given)
                file.write(bytes(4 * (shape.num_streams - stream - 1)))
            if shape.recurrent is not None:
                _write_state(file, shape.recurrent, len(tokens), states)
            file.flush()
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


def _write_state(file: BinaryIO, shape: RecurrentShape, num_tokens: int, states: Sequence[Bytes]) -> None:
    file.write(struct.pack("<IiIII", 1, num_tokens - 1, 0, 0, shape.num_layers))
    for tensor, state in zip(shape.tensors, states, strict=True):
        assert state.shape == (tensor.row_bytes,), f"a state is {state.shape}"
        file.write(struct.pack("<iQ", tensor.ggml_type, tensor.row_bytes) + state.tobytes())
