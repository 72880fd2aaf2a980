"""Records of our store from blocks of another engine, and back: canonical [head][token][dim], native or in 4 bits.

Owns a buffer of `num_records` payloads of one worker's heads. A record holds the tokens of one or several blocks of the
engine. Knows the order of values in those through `packing` alone, and nothing of names, files or who uses a block.
Native records have the very bits; of 4 bits, what is decoded differs from run to run in the last bit of fp32 at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rekindle.bridge.packing import LayerValues, Values
from rekindle.kernels.attention import MOST_DIMS, AttentionKernel, LayerBlocks, Rows, fits
from rekindle.kernels.library import KernelLibrary
from rekindle.kv import q4h
from rekindle.kv.arena import KVArena
from rekindle.kv.decode import Decoder
from rekindle.kv.plan import QueryRange
from rekindle.kv.scratch import Scratch
from rekindle.spec import KVLayout, group_size

Bytes = npt.NDArray[np.uint8]
ABSENT = -1  # a block of a record that stays as it is
ENCODED_VALUES = 1 << 24  # at once, of several layers: each operation is a launch on a device, and takes its memory


@dataclass(frozen=True, slots=True)
class _Sections:
    """Where K or V of one layer is in the buffer: values [records, heads, tokens, dim], or codes and scales."""

    kind: Literal["k", "v"]
    stored: tuple[Tensor, ...]
    values: Values
    heads: int
    dim: int


def _shape(section: _Sections) -> tuple[str, int, int]:
    return section.kind, section.heads, section.dim


class Codec:
    """Encodes and decodes up to `num_records` records at a time; one thread at a time."""

    def __init__(
        self,
        layout: KVLayout,
        layers: Sequence[LayerValues],
        *,
        block_tokens: int,
        num_records: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelLibrary | None = None,
        encoded_values: int = ENCODED_VALUES,
    ) -> None:
        assert layout.block_tokens % block_tokens == 0 and len(layers) == len(layout.layers), (block_tokens, layers)
        self.layout = layout
        self.blocks_per_record = layout.block_tokens // block_tokens
        self._layers, self._dtype, self._device = tuple(layers), dtype, device
        self._encoded_values = encoded_values
        self._arena = KVArena(layout, num_records, device)
        self._decoder = Decoder(layout.block_tokens, Scratch(device))
        self._kernel = AttentionKernel(kernels) if kernels is not None and self._kernels_fit() else None
        on_host = device.type == "cpu"
        self._host = (
            self._arena.parts[0] if on_host else torch.empty_like(self._arena.parts[0], device="cpu").pin_memory()
        )
        self.rows: Bytes = self._host.numpy()

    @property
    def num_records(self) -> int:
        """How many records the buffer holds."""
        return len(self.rows)

    def encode(self, blocks: Sequence[Sequence[int]]) -> int:
        """Write a record of each group of blocks into `rows`; return how many leading ones may be stored.

        A record with a value that is not finite has no 4 bits.
        """
        num_records = len(blocks)
        flat = torch.tensor(blocks, dtype=torch.int64, device=self._device).view(-1)
        good = torch.ones(num_records, dtype=torch.bool, device=self._device)
        plain: list[_Sections] = []
        for index, values in enumerate(self._layers):
            if self.layout.layers[index].k_format != "q4h":
                for section in self._sections(index):
                    self._copy(section, flat, num_records)
            elif self._kernel is not None:
                good &= self._encode_by_kernel(index, values, flat, num_records)
            else:
                plain += self._sections(index)
        for batch in self._batches(plain, num_records):
            good &= self._encode(batch, flat, num_records)
        if self._host is not self._arena.parts[0]:
            self._host[:num_records].copy_(self._arena.parts[0][:num_records])
        return int(good.cumprod(0).sum())

    def decode(self, blocks: Sequence[Sequence[int]], at: int = 0) -> None:
        """Write the records of `rows` from `at` on into these groups of blocks; `ABSENT` ones are left out."""
        if not blocks:
            return
        records = slice(at, at + len(blocks))
        flat = torch.tensor(blocks, dtype=torch.int64, device=self._device).view(-1)
        wanted = flat != ABSENT
        if self._host is not self._arena.parts[0]:
            self._arena.parts[0][records].copy_(self._host[records])
        for index, values in enumerate(self._layers):
            for side, of_blocks in zip((values.k, values.v), self._decoded(index, records), strict=True):
                if bool(wanted.all()):
                    side.write(flat, of_blocks)
                else:
                    side.write(flat[wanted], of_blocks[wanted])

    def _kernels_fit(self) -> bool:
        """Whether the CPU's kernels encode these layers."""
        return (
            self._device.type == "cpu"
            and self._dtype == torch.bfloat16
            and all(fits(spec) and spec.k_format == "q4h" for spec in self.layout.layers)
        )

    def _sections(self, index: int) -> tuple[_Sections, _Sections]:
        view, values, spec = self._arena.layer(index), self._layers[index], self.layout.layers[index]
        heads = spec.num_kv_heads
        return _Sections("k", view.k, values.k, heads, spec.k_dim), _Sections("v", view.v, values.v, heads, spec.v_dim)

    def _by_record(self, values: Tensor, num_records: int) -> Tensor:
        """[blocks, heads, tokens, dim] as [records, heads, blocks of a record, tokens, dim], a view."""
        grouped: Tensor = values.unflatten(0, (num_records, self.blocks_per_record))
        return grouped.transpose(1, 2)

    def _copy(self, section: _Sections, flat: Tensor, num_records: int) -> None:
        target = section.stored[0][:num_records].unflatten(2, (self.blocks_per_record, -1))
        target.copy_(self._by_record(section.values.read(flat), num_records))

    def _batches(self, sections: Sequence[_Sections], num_records: int) -> Iterator[list[_Sections]]:
        """Cut K and V of all layers into pieces of one shape that are encoded at once."""
        for _, alike in groupby(sorted(sections, key=_shape), key=_shape):
            rest = list(alike)
            values = num_records * self.layout.block_tokens * rest[0].heads * rest[0].dim
            most = max(1, self._encoded_values // values)
            yield from (rest[at : at + most] for at in range(0, len(rest), most))

    def _encode(self, sections: Sequence[_Sections], flat: Tensor, num_records: int) -> Tensor:
        """Encode sections of one shape; return which records hold finite values only."""
        values = [self._by_record(section.values.read(flat), num_records).flatten(2, 3) for section in sections]
        group = group_size(sections[0].kind, sections[0].dim)
        words, scales, largest = q4h.encode(q4h.rotate(torch.stack(values)), group)
        for number, section in enumerate(sections):
            section.stored[0][:num_records] = words[number]
            section.stored[1][:num_records] = scales[number]
        return largest.isfinite().transpose(0, 1).flatten(1).all(1)

    def _encode_by_kernel(self, index: int, values: LayerValues, flat: Tensor, num_records: int) -> Tensor:
        assert self._kernel is not None
        tokens = num_records * self.layout.block_tokens
        k, v = (self._by_head(side.read(flat)) for side in (values.k, values.v))
        worst = torch.zeros(tokens)
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
        """K and V of a layer's records as blocks of the engine, each [blocks, heads, tokens, dim]."""
        spec, view = self.layout.layers[index], self._arena.layer(index)
        if spec.k_format != "q4h":
            return self._by_block(view.k[0][records]), self._by_block(view.v[0][records])
        rows = torch.arange(records.start, records.stop, dtype=torch.int32, device=self._device)
        wanted = QueryRange(rows, 0, len(rows) * self.layout.block_tokens, ())
        k, v = self._decoder.decode(view, wanted, torch.float32)
        return self._rotated_back(k, len(rows)), self._rotated_back(v, len(rows))

    def _by_block(self, stored: Tensor) -> Tensor:
        cut: Tensor = stored.unflatten(2, (self.blocks_per_record, -1))
        return cut.transpose(1, 2).flatten(0, 1)

    def _rotated_back(self, rotated: Tensor, num_records: int) -> Tensor:
        back = q4h.output_rotation(rotated.shape[-1], torch.float32, self._device)
        by_head: Tensor = (rotated @ back).to(self._dtype).unflatten(1, (num_records * self.blocks_per_record, -1))
        return by_head.transpose(0, 1)
