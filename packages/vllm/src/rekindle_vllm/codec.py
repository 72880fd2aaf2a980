"""Records of our store from blocks of another engine, and back: canonical [head][token][dim], native or in 4 bits.

Owns a buffer of `num_records` payloads of one part, of one worker's heads. A record holds the tokens of one or several
pieces of blocks, in each KV cache group of the engine that has layers of the part. Knows the order of values in those
through `packing` alone, and nothing of names, files or who uses a block. Native records have the very bits; of 4 bits,
what is decoded differs from run to run in the last bit of fp32 at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rekindle.compute.cpu.kernels.attention import MOST_DIMS, AttentionKernel, LayerBlocks, Rows, fits
from rekindle.compute.cpu.kernels.library import KernelLibrary
from rekindle.kv import q4h
from rekindle.kv.arena import KVArena
from rekindle.kv.decode import Decoder, Scratch
from rekindle.kv.plan import QueryRange
from rekindle.spec import KVLayout, PartLayout, group_size
from rekindle_vllm.packing import LayerValues, Values
from rekindle_vllm.steps import ABSENT, Blocks

Bytes = npt.NDArray[np.uint8]
ENCODED_VALUES = 1 << 24  # at once, of several layers: each operation is a launch on a device, and takes its memory


@dataclass(frozen=True, slots=True)
class _Sections:
    """Where K or V of one layer is in the buffer: values [records, heads, tokens, dim], or codes and scales."""

    kind: Literal["k", "v"]
    stored: tuple[Tensor, ...]
    values: Values
    columns: slice
    heads: int
    dim: int


def _shape(section: _Sections) -> tuple[str, int, int]:
    return section.kind, section.heads, section.dim


class PartCodec(Protocol):
    """Encodes and decodes records of one part, as many at a time as `rows` [num_records, payload_bytes] has."""

    rows: Bytes

    def encode(self, blocks: Sequence[Blocks]) -> int:
        """Write a record of each group of blocks into `rows`; return how many leading ones may be stored."""

    def decode(self, blocks: Sequence[Blocks], at: int = 0) -> None:
        """Write the records of `rows` from `at` on into these groups of blocks."""


def alone(layout: KVLayout, part: PartLayout) -> KVLayout:
    """The layout of a part's layers without the others, its payload the same."""
    return KVLayout(layout.block_tokens, tuple(replace(layer, index=index) for index, layer in enumerate(part.layers)))


class Codec:
    """Encodes and decodes up to `num_records` records of K and V at a time; one thread at a time.

    `layout` has one part. Of each of its layers: `layers` is where the engine keeps it, `columns` which of a record's
    pieces are those of its group.
    """

    def __init__(
        self,
        layout: KVLayout,
        layers: Sequence[LayerValues],
        columns: Sequence[slice],
        *,
        num_records: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelLibrary | None = None,
        encoded_values: int = ENCODED_VALUES,
    ) -> None:
        assert len(layout.parts) == 1 and len(layers) == len(columns) == len(layout.layers), (layout, layers, columns)
        self.layout = layout
        self._layers, self._columns, self._dtype, self._device = tuple(layers), tuple(columns), dtype, device
        self._encoded_values = encoded_values
        self._arena = KVArena(layout, num_records, device)
        self._decoder = Decoder(layout.block_tokens, Scratch(device))
        self._kernel = AttentionKernel(kernels) if kernels is not None and self._kernels_fit() else None
        on_host = device.type == "cpu"
        self._host = (
            self._arena.parts[0] if on_host else torch.empty_like(self._arena.parts[0], device="cpu").pin_memory()
        )
        self.rows: Bytes = self._host.numpy()

    def encode(self, blocks: Sequence[Blocks]) -> int:
        """Write a record of each group of blocks into `rows`; return how many leading ones may be stored.

        A record with a value that is not finite has no 4 bits.
        """
        num_records, given = len(blocks), torch.tensor(blocks, dtype=torch.int64, device=self._device)
        good = torch.ones(num_records, dtype=torch.bool, device=self._device)
        plain: list[_Sections] = []
        for index, values in enumerate(self._layers):
            if self.layout.layers[index].k_format != "q4h":
                for section in self._sections(index):
                    self._copy(section, given)
            elif self._kernel is not None:
                good &= self._encode_by_kernel(index, values, given)
            else:
                plain += self._sections(index)
        for batch in self._batches(plain, num_records):
            good &= self._encode(batch, given)
        if self._host is not self._arena.parts[0]:
            self._host[:num_records].copy_(self._arena.parts[0][:num_records])
        return int(good.cumprod(0).sum())

    def decode(self, blocks: Sequence[Blocks], at: int = 0) -> None:
        """Write the records of `rows` from `at` on into these groups of blocks; `ABSENT` ones are left out."""
        if not blocks:
            return
        records, given = slice(at, at + len(blocks)), torch.tensor(blocks, dtype=torch.int64, device=self._device)
        has_absent = any(ABSENT in pieces for pieces in blocks)
        if self._host is not self._arena.parts[0]:
            self._arena.parts[0][records].copy_(self._host[records])
        for index, values in enumerate(self._layers):
            pieces = given[:, self._columns[index]].reshape(-1)
            for side, by_piece in zip((values.k, values.v), self._decoded(index, records), strict=True):
                if has_absent:
                    wanted = pieces != ABSENT
                    side.write(pieces[wanted], by_piece[wanted])
                else:
                    side.write(pieces, by_piece)

    def _kernels_fit(self) -> bool:
        """Whether the CPU's kernels encode these layers."""
        return (
            self._device.type == "cpu"
            and self._dtype == torch.bfloat16
            and all(fits(spec) and spec.k_format == "q4h" for spec in self.layout.layers)
        )

    def _sections(self, index: int) -> tuple[_Sections, _Sections]:
        view, values, spec = self._arena.layer(index), self._layers[index], self.layout.layers[index]
        columns, heads = self._columns[index], spec.num_kv_heads
        return (
            _Sections("k", view.k, values.k, columns, heads, spec.k_dim),
            _Sections("v", view.v, values.v, columns, heads, spec.v_dim),
        )

    def _read(self, section: _Sections, given: Tensor) -> Tensor:
        """The values of these records: [records, heads, pieces of a record, tokens, dim], a view of a copy."""
        pieces = given[:, section.columns]
        values: Tensor = section.values.read(pieces.reshape(-1)).unflatten(0, pieces.shape)
        return values.transpose(1, 2)

    def _copy(self, section: _Sections, given: Tensor) -> None:
        values = self._read(section, given)
        section.stored[0][: len(given)].unflatten(2, values.shape[2:4]).copy_(values)

    def _batches(self, sections: Sequence[_Sections], num_records: int) -> Iterator[list[_Sections]]:
        """Cut K and V of all layers into pieces of one shape that are encoded at once."""
        for _, alike in groupby(sorted(sections, key=_shape), key=_shape):
            rest = list(alike)
            values = num_records * self.layout.block_tokens * rest[0].heads * rest[0].dim
            most = max(1, self._encoded_values // values)
            yield from (rest[at : at + most] for at in range(0, len(rest), most))

    def _encode(self, sections: Sequence[_Sections], given: Tensor) -> Tensor:
        """Encode sections of one shape; return which records hold finite values only."""
        values, num_records = [self._read(section, given).flatten(2, 3) for section in sections], len(given)
        group = group_size(sections[0].kind, sections[0].dim)
        words, scales, largest = q4h.encode(q4h.rotate(torch.stack(values)), group)
        for number, section in enumerate(sections):
            section.stored[0][:num_records] = words[number]
            section.stored[1][:num_records] = scales[number]
        return largest.isfinite().transpose(0, 1).flatten(1).all(1)

    def _encode_by_kernel(self, index: int, values: LayerValues, given: Tensor) -> Tensor:
        assert self._kernel is not None
        num_records, flat = len(given), given[:, self._columns[index]].reshape(-1)
        tokens = num_records * self.layout.block_tokens
        k, v = (self._by_head(side.read(flat)) for side in (values.k, values.v))
        worst = torch.zeros(tokens, dtype=torch.float32)
        self._kernel.write(
            self._layer_blocks(index),
            Rows(k.data_ptr(), k.stride(1), k.stride(0)),
            Rows(v.data_ptr(), v.stride(1), v.stride(0)),
            blocks=np.repeat(np.arange(num_records, dtype=np.int32), self.layout.block_tokens),
            offsets=np.tile(np.arange(self.layout.block_tokens, dtype=np.int32), num_records),
            worst=worst.data_ptr(),
            threads=torch.get_num_threads(),
        )
        return worst.view(num_records, -1).isfinite().all(1)

    def _by_head(self, values: Tensor) -> Tensor:
        """[blocks, heads, tokens, dim] as [heads, all tokens, dim], dense."""
        return values.transpose(0, 1).contiguous().flatten(1, 2)

    def _layer_blocks(self, index: int) -> LayerBlocks:
        part = self.layout.parts[0]
        signs = q4h.sign_values(MOST_DIMS).astype(np.float32)
        return LayerBlocks(
            part.layers[index],
            part.sections[index],
            self._arena.parts[0].data_ptr(),
            block_bytes=part.payload_bytes,
            signs=signs,
        )

    def _decoded(self, index: int, records: slice) -> tuple[Tensor, Tensor]:
        """K and V of a layer's records as pieces of blocks, each [pieces, heads, tokens, dim]."""
        spec, view = self.layout.layers[index], self._arena.layer(index)
        if spec.k_format != "q4h":
            return self._by_piece(index, view.k[0][records]), self._by_piece(index, view.v[0][records])
        rows = torch.arange(records.start, records.stop, dtype=torch.int32, device=self._device)
        wanted = QueryRange(rows, 0, len(rows) * self.layout.block_tokens, ())
        k, v = self._decoder.decode(view, wanted, torch.float32)
        return self._rotated_back(index, k, len(rows)), self._rotated_back(index, v, len(rows))

    def _by_piece(self, index: int, stored: Tensor) -> Tensor:
        cut: Tensor = stored.unflatten(2, (self._pieces(index), -1))
        return cut.transpose(1, 2).flatten(0, 1)

    def _rotated_back(self, index: int, rotated: Tensor, num_records: int) -> Tensor:
        back = q4h.output_rotation(rotated.shape[-1], torch.float32, self._device)
        by_head: Tensor = (rotated @ back).to(self._dtype).unflatten(1, (num_records * self._pieces(index), -1))
        return by_head.transpose(0, 1)

    def _pieces(self, index: int) -> int:
        """Pieces of a record in the group of a layer."""
        columns = self._columns[index]
        return int(columns.stop - columns.start)
