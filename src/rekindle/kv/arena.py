"""The bytes of all hot blocks: per part one uint8 tensor [rows, payload_bytes], layers are strided views of it.

Every block has a row in the full part, its own; in those that end (see `rekindle.parts`) it has the row that
`WindowSlots` give it, or none. Knows nothing of what a block means, who holds it or whether it is
free. Invariant (verified by `check`): the bytes of every row decode to finite numbers, so attention may read past a
sequence's end and mask the result.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.cache.blocks.windows import ABSENT, WindowSlots
from rekindle.kv.coded import CODECS
from rekindle.kv.copies import BlockPart, Wait, at_once
from rekindle.parts import Part, StatePart
from rekindle.spec import KVLayout, LayerSpec, PartLayout, Section

TORCH_DTYPES = {
    "u32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_WORD_BYTES = 8  # blocks are gathered in int64
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14 and later: pages are given, their content stays


# Pages that the system gives to memory at its first use, asked for before that.
#
# A first use costs most in virtual machines that give free memory back to their host: 2 to 4 ms for every 2 MiB, where
# one that has the memory takes a tenth of that.


def populate(memory: np.ndarray) -> bool:
    """Have the system give all pages that lie wholly in contiguous memory; False where it cannot be asked for that.

    May run while other threads read and write there.
    """
    assert memory.flags.c_contiguous
    if sys.platform != "linux":
        return False
    address = memory.ctypes.data
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= first:
        return True
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(first, end - first, _POPULATE_WRITE) == 0)


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's bytes: whole rows as int64 [rows, n], every section as [rows, heads, token, ...].

    `heads` are the indices 0, 1, ... by which rows are written.
    """

    spec: LayerSpec
    heads: Tensor
    rows: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    k_sections: tuple[Section, ...]
    v_sections: tuple[Section, ...]

    def within(self, rows: Tensor, section: Section, dtype: torch.dtype) -> Tensor:
        """The section as `dtype` [blocks, heads, n] inside `rows` [blocks, int64], gathered from `self.rows`."""
        start = section.offset - self.k_sections[0].offset
        words = rows[:, start // _WORD_BYTES : (start + section.num_bytes) // _WORD_BYTES]
        return words.view(dtype).reshape(rows.shape[0], section.shape[0], -1)


class KVArena:
    """Hot bytes of `num_blocks` blocks on `device`, initially zero; pages are touched as blocks are used.

    Parts of a kind that `windows` have no slots for have a row for every block.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        windows: Sequence[WindowSlots] = (),
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.slots: dict[Part, WindowSlots] = {slots.kind: slots for slots in windows}
        with torch.inference_mode(False):
            self.parts = tuple(
                _zeros(self.num_rows(part.index), part.payload_bytes, self.device) for part in layout.parts
            )
            self._on_host = [part.numpy() for part in self.parts] if self.device.type == "cpu" else []
            self._layers = {
                spec.index: self._layer_view(part, position)
                for part, part_layout in enumerate(layout.parts)
                for position, spec in enumerate(part_layout.layers)
            }
            self._states = {
                spec.index: tuple(_section_view(rows, section) for section in sections)
                for part, rows in zip(layout.parts, self.parts, strict=True)
                for spec, sections in zip(part.states, part.state_sections, strict=True)
            }

    def _layer_view(self, part: int, position: int) -> LayerView:
        layout, rows = self.layout.parts[part], self.parts[part]
        sections = layout.sections[position]
        first, last = sections.k[0], sections.v[-1]
        columns = slice(first.offset // _WORD_BYTES, (last.offset + last.num_bytes) // _WORD_BYTES)
        return LayerView(
            spec=layout.layers[position],
            heads=torch.arange(layout.layers[position].num_kv_heads, device=self.device),
            rows=rows.view(torch.int64)[:, columns],
            k=tuple(_section_view(rows, section) for section in sections.k),
            v=tuple(_section_view(rows, section) for section in sections.v),
            k_sections=sections.k,
            v_sections=sections.v,
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() for part in self.parts)

    def num_rows(self, part: int) -> int:
        """Return the number of rows of a part."""
        slots = self.slots.get(self.layout.parts[part].kind)
        return self.num_blocks if slots is None else slots.num_slots

    def has(self, part: int, block: int) -> bool:
        """Whether a block has this part."""
        slots = self.slots.get(self.layout.parts[part].kind)
        return slots is None or slots.has(block)

    def row(self, part: int, block: int) -> int:
        """Return the row of a block in a part; ValueError if the block lacks this part."""
        slots = self.slots.get(self.layout.parts[part].kind)
        if slots is None:
            return block
        if not slots.has(block):
            raise ValueError(f"block {block} has no part {slots.kind.name}")
        return int(slots.slot_of[block])

    def rows_of(self, kind: Part, blocks: np.ndarray) -> np.ndarray:
        """Return the rows int32 of these blocks in the part of a kind; for those without it one that is zero."""
        slots = self.slots.get(kind)
        return blocks if slots is None else slots.slot_of[blocks]

    def populate(self, first: int, end: int) -> bool:
        """Have the system give the memory of these blocks now; False where it cannot be asked for that. Any thread."""
        if self.device.type != "cpu":
            return False
        pieces = (part.numpy()[first:end] for part in self.parts)  # none of parts with fewer rows
        return all(populate(piece) for piece in pieces if piece.size)

    def layer(self, layer_index: int) -> LayerView:
        """The views of the layer with this index in the model; KeyError if that layer keeps no KV."""
        return self._layers[layer_index]

    def states(self, layer_index: int) -> tuple[Tensor, ...]:
        """The tensors of a recurrent layer's state, each [rows, *shape]; KeyError if that layer keeps none."""
        return self._states[layer_index]

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of all parts, and a whole state; the rest of `target` is unchanged."""
        for part in self.layout.parts:
            if isinstance(part.kind, StatePart):
                if self.has(part.index, source) and self.has(part.index, target):
                    rows = self.parts[part.index]
                    rows[self.row(part.index, target)].copy_(rows[self.row(part.index, source)])
                continue
            from_row, to_row = self.row(part.index, source), self.row(part.index, target)
            for section in self._sections(part):
                section[to_row, :, :num_tokens].copy_(section[from_row, :, :num_tokens])

    def _sections(self, part: PartLayout) -> Iterator[Tensor]:
        for layer in part.layers:
            yield from (*self._layers[layer.index].k, *self._layers[layer.index].v)

    def copy_out(self, parts: Sequence[BlockPart]) -> Wait:
        """Begin to copy these parts into their payloads, bytes beyond their tokens as zeros; the blocks may be changed
        at once. A thread that reads a payload calls what is returned before.

        The payloads are rows of a few buffers that live as long as the store, so a device may register these once.
        """
        for each in parts:
            self.read(each.block, each.part, each.num_tokens, each.payload)
        return at_once

    def room(self, block: int, part: int) -> np.ndarray:
        """Where a payload uint8 [payload_bytes] may be put for `copy_in`: on a CPU, where it will stay. Any thread."""
        if self._on_host:
            row: np.ndarray = self._on_host[part][self.row(part, block)]
            return row
        return np.empty(self.layout.parts[part].payload_bytes, dtype=np.uint8)

    def copy_in(self, parts: Sequence[BlockPart]) -> None:
        """Replace these parts by their payloads (may be read-only); they are there when it returns. Any thread."""
        for each in parts:
            self.write(each.block, each.part, each.payload)

    def read(self, block: int, part: int, num_tokens: int, out: np.ndarray) -> None:
        """Copy a part's payload into `out` uint8 [payload_bytes], bytes beyond `num_tokens` tokens as zeros.

        A state is copied whole.
        """
        torch.from_numpy(out).copy_(self.parts[part][self.row(part, block)])
        self.cut(part, num_tokens, out)

    def cut(self, part: int, num_tokens: int, out: np.ndarray) -> None:
        """Zero the bytes of a part's payload, uint8 [payload_bytes], beyond its first tokens; a state stays whole."""
        if num_tokens == self.layout.block_tokens:
            return
        for layer in self.layout.parts[part].sections:
            for section in (*layer.k, *layer.v):
                heads, tokens, _ = section.shape
                section_bytes = out[section.offset : section.offset + section.num_bytes]
                section_bytes.reshape(heads, tokens, -1)[:, num_tokens:] = 0

    def write(self, block: int, part: int, data: np.ndarray) -> None:
        """Replace a part's payload by `data` uint8 [payload_bytes] (may be read-only) that `read` produced."""
        if not self._on_host:
            self.parts[part][self.row(part, block)].copy_(on_host(data))
        elif not np.may_share_memory(data, row := self._on_host[part][self.row(part, block)]):
            row[:] = data

    def wipe(self, block: int, first_token: int = 0) -> None:
        """Zero a block from token `first_token` on, in the parts that it has and all their layers."""
        for part in self.layout.parts:
            if self.has(part.index, block):
                self.wipe_row(part.index, self.row(part.index, block), first_token)

    def wipe_row(self, part: int, row: int, first_token: int = 0) -> None:
        """Zero a row of a part from token `first_token` on, in all layers; states, of the tokens before, stay."""
        if not first_token:
            self.parts[part][row].zero_()
            return
        for section in self._sections(self.layout.parts[part]):
            section[row, :, first_token:] = 0

    def check(self) -> None:
        """Assert that every row of every layer is finite once decoded, and that absent parts were never written."""
        for part in self.layout.parts:
            assert part.kind not in self.slots or not self.parts[part.index][ABSENT].any(), "row 0 was written"
        for index, tensors in self._states.items():
            assert all(bool(tensor.isfinite().all()) for tensor in tensors), f"a state of layer {index} is not finite"
        for index, layer in self._layers.items():
            spec = layer.spec
            for name, sections, fmt in (("K", layer.k, spec.k_format), ("V", layer.v, spec.v_format)):
                if len(sections) == 2:
                    scale_bytes, written = sections[1], CODECS[fmt].scale_bytes
                    good = (scale_bytes == 0) | (scale_bytes >= written.start) & (scale_bytes < written.stop)
                else:
                    good = sections[0].isfinite()
                bad = (~good.flatten(1).all(1)).nonzero()
                assert not len(bad), f"layer {index}: {name} of row {int(bad[0])} does not decode to finite numbers"


def on_host(payload: np.ndarray) -> Tensor:
    """A payload as a tensor: of its own memory, unless that is read-only, of which torch would warn."""
    return torch.from_numpy(payload if payload.flags.writeable else payload.copy())


def _zeros(num_rows: int, payload_bytes: int, device: torch.device) -> Tensor:
    """Zeros uint8 [num_rows, payload_bytes]. On a CPU, numpy allocates pages that cost nothing until used."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, payload_bytes), dtype=np.uint8))
    return torch.zeros(num_rows, payload_bytes, dtype=torch.uint8, device=device)


def _section_view(rows: Tensor, section: Section) -> Tensor:
    dtype = TORCH_DTYPES[section.dtype]
    start = section.offset // dtype.itemsize
    typed = rows.view(dtype)[:, start : start + section.num_bytes // dtype.itemsize]
    return typed.view(len(rows), *section.shape)
