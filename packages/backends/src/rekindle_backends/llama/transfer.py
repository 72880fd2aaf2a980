"""Rows between slot files and the blocks of an arena, on the CPU.

Owns which rows a conversation needs to go on in llama-server. Block i of a conversation has its tokens from 64 i on. A
row is there if its cell says so (see `layout`), so rows of a block must be of its tokens or zero: the caller wipes a
block, or its part of a window, that it gives to other tokens.

    position         0              T - w - 1    T - w              T
    full attention   [ all rows                                     )
    a window of w                   zeros        [ the last w rows  )

The token at T sees the w - 1 positions before it (llama-hparams.h, is_masked_swa). The row before these is needed as
well: of what it is given llama-server makes a checkpoint, and goes on from the last token in it when a later prompt
leaves the text (server-context.cpp, create_checkpoint). And it reuses nothing unless the slot also has a row below
T - w (pos_min_thold): one of zeros, that neither can see, and that no file it saves will have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rekindle.kv.arena import KVArena
from rekindle.parts import WindowPart
from rekindle.spec import LayerSections, Section
from rekindle_backends.llama.layout import BLOCK_TOKENS, extra_section, presence_section
from rekindle_backends.llama.sections import AttentionRows, Bytes, Ints, Kind, SlotFileError
from rekindle_backends.llama.shapes import FileShape
from rekindle_backends.llama.slot_file import RowsToWrite, SlotFile, write
from rekindle_backends.llama.snapshots import Snapshots

Flags = npt.NDArray[np.bool_]


def take(file: SlotFile, arena: KVArena, blocks: Sequence[int], first: int, end: int) -> None:
    """Copy tokens [first, end) of a file into the blocks of its conversation, all rows of windows that they lack, and
    the state after `end`, if the last block has an empty part for it.

    Rows of a window that the file lacks stay as they are. SlotFileError, and nothing is copied, if the file does not
    have every token of its text exactly once.
    """
    if not 0 <= first <= end <= min(len(file.tokens), BLOCK_TOKENS * len(blocks)):
        raise ValueError(f"tokens [{first}, {end}) of a file of {len(file.tokens)} and {len(blocks)} blocks")
    orders = [_order(rows, len(file.tokens), is_full=not index) for index, rows in enumerate(file.attention)]
    for index, (rows, order) in enumerate(zip(file.attention, orders, strict=True)):
        part = _Part.of(arena, index, blocks)
        there = np.zeros(end, dtype=np.bool_)
        positions = rows.positions[order]
        there[positions[positions < end]] = True
        if index:
            there &= np.repeat(part.has, BLOCK_TOKENS)[:end] & ~part.present(end)
        else:
            there[:first] = False
        for begin, stop in _runs(there):
            at = int(np.searchsorted(positions, begin))
            _take_run(file, index, part, _cells(order[at : at + stop - begin]), range(begin, stop))
    if not file.attention:
        _Part.of(arena, 0, blocks).show(range(first, end))
    states = Snapshots(arena)
    if states and has_state(file, end) and states.is_empty(blocks[_last(end)]):
        states.take(file, blocks[_last(end)])


def has_state(file: SlotFile, num_tokens: int) -> bool:
    """Whether a file has the state after so many tokens, which are all of its own."""
    return file.state is not None and 0 < file.state.num_tokens == len(file.tokens) == num_tokens


def _last(num_tokens: int) -> int:
    """The block of the last of so many tokens."""
    return (num_tokens - 1) // BLOCK_TOKENS


def _order(rows: AttentionRows, num_tokens: int, *, is_full: bool) -> npt.NDArray[np.intp]:
    """The cells of a memory by position; SlotFileError if it has a position twice or, of full attention, lacks one."""
    order = np.argsort(rows.positions, kind="stable")
    positions = rows.positions[order]
    if is_full:
        right = len(positions) == num_tokens and bool((positions == np.arange(num_tokens)).all())
    else:
        right = bool((np.diff(positions) > 0).all()) and (not len(positions) or int(positions[-1]) < num_tokens)
    if not right:
        raise SlotFileError(f"the slot file has not every one of its {num_tokens:,} tokens once")
    return order


def _runs(flags: Flags) -> list[tuple[int, int]]:
    """The ranges [begin, end) in which flags are set."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _cells(order: npt.NDArray[np.intp]) -> slice | npt.NDArray[np.intp]:
    """The same cells, as a slice if they follow each other."""
    if len(order) and (order == np.arange(order[0], order[0] + len(order))).all():
        return slice(int(order[0]), int(order[0]) + len(order))
    return order


def _take_run(file: SlotFile, index: int, part: _Part, cells: slice | npt.NDArray[np.intp], positions: range) -> None:
    """Copy the rows of consecutive positions, all of whose blocks have the part."""
    shape, rows = file.shape.attention[index], file.attention[index]
    for layer, sections in enumerate(part.layers):
        part.put(sections.k[0], positions, file.rows(index, layer, "k", cells))
        if shape.v:
            part.put(sections.v[0], positions, file.rows(index, layer, "v", cells))
    if rows.extra is not None:
        part.put(part.extra, positions, rows.extra[cells])
    part.show(positions)


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a conversation's blocks: the bytes of all its rows, and the row of each block (of none, 0)."""

    data: Bytes  # [rows, payload bytes]
    rows: npt.NDArray[np.intp]  # [blocks]
    has: Flags  # [blocks]
    layers: tuple[LayerSections, ...]  # without the cells
    presence: Section
    extra: Section

    @classmethod
    def of(cls, arena: KVArena, index: int, blocks: Sequence[int]) -> _Part:
        layout = arena.layout.parts[index]
        has = np.array([arena.has(index, block) for block in blocks], dtype=np.bool_)
        rows = np.asarray(arena.rows_of(layout.kind, np.asarray(blocks, dtype=np.intp)), dtype=np.intp)
        data = arena.parts[index].numpy()
        return cls(data, rows, has, layout.sections[:-1], presence_section(layout), extra_section(layout))

    def put(self, section: Section, positions: range, values: Bytes) -> None:
        """Write rows [tokens, bytes] of consecutive positions."""
        stored = self.data[:, section.offset : section.offset + section.num_bytes]
        width = section.shape[-1]
        at, stop = positions.start, positions.stop
        whole = -(-at // BLOCK_TOKENS) * BLOCK_TOKENS, stop // BLOCK_TOKENS * BLOCK_TOKENS
        if whole[0] < whole[1]:
            which = self.rows[whole[0] // BLOCK_TOKENS : whole[1] // BLOCK_TOKENS]
            stored[which] = values[whole[0] - at : whole[1] - at].reshape(len(which), -1)
        edges = [(at, min(stop, whole[0])), (max(at, whole[1]), stop)] if whole[0] <= whole[1] else [(at, stop)]
        for begin, end in edges:
            if begin < end:
                block, token = divmod(begin, BLOCK_TOKENS)
                columns = slice(token * width, (token + end - begin) * width)
                stored[self.rows[block], columns] = values[begin - at : end - at].reshape(-1)

    def show(self, positions: range) -> None:
        """Say of the rows of consecutive positions that they are there."""
        words = np.arange(positions.start + 1, positions.stop + 1, dtype="<i4")
        self.put(self.presence, positions, words.view(np.uint8).reshape(-1, 4))

    def get(self, section: Section, positions: range) -> Bytes:
        """A copy of the rows [tokens, bytes] of consecutive positions."""
        first, last = positions.start // BLOCK_TOKENS, -(-positions.stop // BLOCK_TOKENS)
        stored = self.data[:, section.offset : section.offset + section.num_bytes]
        found = stored[self.rows[first:last]].reshape(-1, section.shape[-1])
        begin = positions.start - first * BLOCK_TOKENS
        return found[begin : begin + len(positions)]

    def present(self, num_tokens: int) -> Flags:
        """Which rows of the first tokens are there."""
        words = self.get(self.presence, range(num_tokens)).view("<i4").reshape(-1)
        there: Flags = words == np.arange(1, num_tokens + 1, dtype="<i4")
        return there


def resumable(arena: KVArena, blocks: Sequence[int], num_tokens: int) -> int:
    """How many of the first `num_tokens` tokens llama-server can go on from: the most whose rows are there; 0 if none.

    Needed are all rows of full attention, of a window of w tokens the last w, and of recurrent layers the state after
    the last token. With at most w tokens in a slot it reuses nothing of a model with windows, as there is no room for a
    row that nobody sees.
    """
    num_tokens = min(num_tokens, BLOCK_TOKENS * len(blocks))
    ends = np.arange(num_tokens + 1)
    good = np.ones(num_tokens + 1, dtype=np.bool_)
    if states := Snapshots(arena):
        good[1:] = np.isin(ends[1:], states.ends(blocks))
    for part in arena.layout.parts:
        if part == states.part:
            continue
        there = _Part.of(arena, part.index, blocks).present(num_tokens)
        missing = np.where(there, -1, ends[:-1])
        last_missing = np.maximum.accumulate(np.concatenate([[-1], missing]))  # before each end
        if isinstance(part.kind, WindowPart):
            window = part.kind.window
            good &= (ends == 0) | (ends > window) & (last_missing < ends - window)
        else:
            good &= last_missing < 0
    return int(np.flatnonzero(good)[-1])


def put(
    arena: KVArena, blocks: Sequence[int], num_tokens: int, tokens: Ints, shape: FileShape, path: Path, slot: int
) -> int:
    """Write a file of the first `num_tokens` tokens (`tokens` are at least these) for a slot; return its bytes.

    A prompt must have more tokens than that: llama-server computes its last one again, which sees one row more, and so
    reuses nothing of a window that ends there. ValueError if `resumable` does not go so far.
    """
    if not num_tokens or resumable(arena, blocks, num_tokens) != num_tokens:
        raise ValueError(f"llama-server cannot go on from {num_tokens:,} tokens: rows are missing")
    full, states = _Part.of(arena, 0, blocks), Snapshots(arena)
    extra = full.get(full.extra, range(num_tokens)) if any(each.has_extra for each in shape.attention) else None
    sections = [_rows(full, range(num_tokens), extra)] if shape.attention else []
    for part in arena.layout.parts[1:]:
        if isinstance(part.kind, WindowPart):
            sections.append(_window(_Part.of(arena, part.index, blocks), num_tokens, part.kind.window, extra))
    last = blocks[_last(num_tokens)]
    return write(path, shape, slot, tokens[:num_tokens], sections, states.tensors(last) if states else ())


def _rows(held: _Part, positions: range, extra: Bytes | None) -> RowsToWrite:
    def rows(layer: int, kind: Kind) -> Bytes:
        sections = held.layers[layer]
        return held.get((sections.k if kind == "k" else sections.v)[0], positions)

    return RowsToWrite(np.arange(positions.start, positions.stop, dtype=np.int32), rows, extra)


def _window(held: _Part, num_tokens: int, window: int, extra: Bytes | None) -> RowsToWrite:
    """The last rows of a window after one of zeros."""
    positions = range(num_tokens - window - 1, num_tokens)
    shown = _rows(held, positions, None if extra is None else extra[positions.start :])

    def rows(layer: int, kind: Kind) -> Bytes:
        found = shown.rows(layer, kind)
        found[0] = 0
        return found

    return replace(shown, rows=rows)
