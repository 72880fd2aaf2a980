"""Which heads of a record are one worker's, and where they are in its payload and in that of all heads.

Payloads of both have the sections of `KVLayout`, in which heads come first: a share is a range of every section.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from rekindle.errors import ConfigError
from rekindle.parts import STATE
from rekindle.spec import KVLayout, PartLayout, Section

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of one of `num_workers` tensor-parallel workers: `count` of `total` from the `first` on.

    Where there are fewer heads than workers, several have the same one, and the first of these `saves` it.
    """

    rank: int
    num_workers: int
    first: int
    count: int
    total: int
    saves: bool

    @classmethod
    def of(cls, total: int, rank: int, num_workers: int) -> HeadShare:
        """The share of worker `rank`; ConfigError if heads and workers do not divide each other."""
        if total % num_workers == 0:
            count = total // num_workers
            return cls(rank, num_workers, rank * count, count, total, True)
        if num_workers % total == 0:
            copies = num_workers // total
            return cls(rank, num_workers, rank // copies, 1, total, rank % copies == 0)
        raise ConfigError(f"{total} K/V heads cannot be shared by {num_workers} workers: choose a tensor-parallel size")

    def layout(self, layout: KVLayout) -> KVLayout:
        """The layout of this share of records that have `layout`."""
        if self.num_workers == 1:
            return layout
        layers = tuple(replace(layer, num_kv_heads=self.count) for layer in layout.layers)
        return replace(layout, layers=layers)


class HeadCopies:
    """Copies a worker's heads of a part out of payloads of all heads, and into them.

    States have no heads here: they are whole, and of an engine with one worker.
    """

    def __init__(self, share: HeadShare, whole: KVLayout, part: int = 0) -> None:
        own = share.layout(whole)
        assert share.num_workers == 1 or whole.parts[part].kind != STATE, "states are not divided among workers"
        self.payload_bytes = own.parts[part].payload_bytes
        self._ranges = list(_ranges(share, whole.parts[part], own.parts[part]))

    def cut(self, whole: Bytes, own: Bytes) -> None:
        """Copy the worker's heads of a whole payload to `own`; what is between sections stays."""
        for there, here, num_bytes in self._ranges:
            own[here : here + num_bytes] = whole[there : there + num_bytes]

    def paste(self, own: Bytes, whole: Bytes) -> None:
        """Copy a payload of the worker's heads to their place in a whole one."""
        for there, here, num_bytes in self._ranges:
            whole[there : there + num_bytes] = own[here : here + num_bytes]


def _ranges(share: HeadShare, whole: PartLayout, own: PartLayout) -> Iterator[tuple[int, int, int]]:
    """Where each section's heads are in a whole payload and in the worker's, and their bytes."""
    if whole.kind == STATE:
        yield 0, 0, whole.payload_bytes
    for there, here in zip(_sections(whole), _sections(own), strict=True):
        of_head = there.num_bytes // share.total
        yield there.offset + share.first * of_head, here.offset, here.num_bytes


def _sections(part: PartLayout) -> Iterator[Section]:
    for layer in part.sections:
        yield from chain(layer.k, layer.v)
