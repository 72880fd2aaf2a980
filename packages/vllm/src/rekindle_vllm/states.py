"""Records of recurrent states from blocks of another engine, and back: each tensor's bits as the engine keeps them.

A state is in the engine's own order of values, which its shapes and dtypes in the layout stand for; it is read by an
engine with the same ones only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rekindle.errors import ModelRefused
from rekindle.spec import KVLayout
from rekindle_vllm.steps import ABSENT, Blocks

Bytes = npt.NDArray[np.uint8]


class StateCodec:
    """Copies up to `num_records` snapshots at a time; one thread at a time.

    `tensors` of each layer with a state, in the layout's order: [blocks, ...] of the layout's shape. `columns`: which
    of a record's blocks is that of a layer's group.
    """

    def __init__(
        self,
        layout: KVLayout,
        tensors: Sequence[Sequence[Tensor]],
        columns: Sequence[slice],
        *,
        num_records: int,
        device: torch.device,
    ) -> None:
        part = layout.state_part
        assert part is not None and len(tensors) == len(columns) == len(part.states), "a layer has no state"
        self._columns, self._device = tuple(columns), device
        self._sections = part.state_sections
        self._tensors = tuple(tuple(own) for own in tensors)
        for state, sections, own in zip(part.states, self._sections, self._tensors, strict=True):
            for section, tensor in zip(sections, own, strict=True):
                if tuple(tensor.shape[1:]) != section.shape or tensor[0].nbytes != section.num_bytes:
                    raise ModelRefused(
                        f"layer {state.index} keeps a state of shape {tuple(tensor.shape[1:])} in {tensor.dtype}, and "
                        f"{section.shape} in {section.dtype} was announced: it cannot be stored"
                    )
        shape = num_records, part.payload_bytes
        self._buffer = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._host = self._buffer if device.type == "cpu" else torch.zeros(shape, dtype=torch.uint8).pin_memory()
        self.rows: Bytes = self._host.numpy()

    def encode(self, blocks: Sequence[Blocks]) -> int:
        """Write a snapshot of each group of blocks into `rows`; return their number."""
        given = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        for columns, sections, own in zip(self._columns, self._sections, self._tensors, strict=True):
            for section, tensor in zip(sections, own, strict=True):
                found = tensor[given[:, columns.start]].reshape(len(blocks), -1).view(torch.uint8)
                self._buffer[: len(blocks), section.offset : section.offset + section.num_bytes] = found
        if self._host is not self._buffer:
            self._host[: len(blocks)].copy_(self._buffer[: len(blocks)])
        return len(blocks)

    def decode(self, blocks: Sequence[Blocks], at: int = 0) -> None:
        """Write the snapshots of `rows` from `at` on into these groups of blocks, all of which are there."""
        if not blocks:
            return
        assert not any(ABSENT in own for own in blocks), "a state has no block"
        records, given = slice(at, at + len(blocks)), torch.tensor(blocks, dtype=torch.int64, device=self._device)
        if self._host is not self._buffer:
            self._buffer[records].copy_(self._host[records])
        for columns, sections, own in zip(self._columns, self._sections, self._tensors, strict=True):
            for section, tensor in zip(sections, own, strict=True):
                stored = self._buffer[records, section.offset : section.offset + section.num_bytes].contiguous()
                values = stored.view(tensor.dtype).reshape(len(blocks), *tensor.shape[1:])
                tensor[given[:, columns.start]] = values
