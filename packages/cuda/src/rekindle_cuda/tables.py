"""The tables of a step for all layers of a model, in one tensor on the device that is filled by one copy.

Owns where each table lies there. Names:

    offsets                      the token inside its block of every row
    blocks, window               where every row is stored in layers of this window, -1: nowhere
    contexts, window             rows of the arena that hold the contexts of all sequences
    items, pieces, count; use, n the work of the n-th launch of layers that attend so
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rekindle.kv.step_layout import StepLayout
from rekindle_cuda.places import Places
from rekindle_cuda.work import FIELDS, PIECE_FIELDS, Use, Work, launches

Name = tuple[Any, ...]
Tables = dict[Name, np.ndarray]
ALIGNED = 4  # numbers: kernels load 16 bytes at a time where an address is a multiple of that


@dataclass(frozen=True, slots=True)
class Items:
    """The work of one launch: see `attend_kernel` and `join_kernel`. `most`: items that there is room for."""

    most: int
    folded: int
    work: Work
    pieces: Tensor


def step_tables(layout: StepLayout, windows: Iterable[int | None], uses: Iterable[Use]) -> Tables:
    """The tables of a step, int32 each."""
    tables: Tables = {("offsets",): layout.row_offsets}
    for window in windows:
        tables["blocks", window] = layout.row_blocks(window)
        contexts = [layout.context(window, span) for span in layout.spans]
        tables["contexts", window] = np.concatenate(contexts) if contexts else np.zeros(0, np.int32)
    for use in uses:
        for n, launch in enumerate(launches(layout, use)):
            key = use, n, launch.folded
            tables["items", *key], tables["pieces", *key] = launch.items, launch.pieces
            tables["count", *key] = np.array([len(launch.items)], np.int32)
    return tables


class Sheet:
    """One tensor with room for tables of these names, so many numbers each; the same tensor for any that fit."""

    def __init__(self, sizes: Mapping[Name, int], device: torch.device) -> None:
        self._device, self._views = device, dict[Name, Tensor]()
        ends = np.cumsum([-(-size // ALIGNED) * ALIGNED for size in sizes.values()])
        self._numbers = torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
        starts = [0, *ends[:-1].tolist()]
        self._at = {name: slice(start, start + size) for (name, size), start in zip(sizes.items(), starts, strict=True)}

    @classmethod
    def of(cls, tables: Tables, device: torch.device) -> Sheet:
        """A sheet with these tables on it, and no room for more."""
        sheet = cls({name: table.size for name, table in tables.items()}, device)
        sheet.send(tables)
        return sheet

    def send(self, tables: Tables) -> None:
        """Begin to copy tables to the device; what is left of the room for a table is filled with -1."""
        numbers = torch.empty(len(self._numbers), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host = numbers.numpy()
        host.fill(-1)
        for name, table in tables.items():
            at = self._at[name]
            assert table.size <= at.stop - at.start, f"{table.size} numbers of {name} do not fit {at}"
            host[at.start : at.start + table.size] = table.ravel()
        self._numbers.copy_(numbers, non_blocking=True)

    def __getitem__(self, name: Name) -> Tensor:
        """A table with all its room, int32 [numbers]."""
        return self._numbers[self._at[name]]

    def __contains__(self, name: Name) -> bool:
        return name in self._at

    def places(self, window: int | None) -> Places:
        """Where the rows are stored in layers of this window."""
        return Places(self["blocks", window], self["offsets",])

    def items(self, use: Use) -> list[Items]:
        """The launches of layers that attend so."""
        keys = [name[1:] for name in self._at if name[0] == "items" and name[1] == use]
        return [self._items(*key) for key in keys]

    def _items(self, use: Use, n: int, folded: int) -> Items:
        items, pieces = self["items", use, n, folded], self["pieces", use, n, folded]
        work = Work(self["contexts", use.window], items.view(-1, FIELDS), self["count", use, n, folded])
        return Items(len(items) // FIELDS, folded, work, pieces.view(-1, PIECE_FIELDS))
