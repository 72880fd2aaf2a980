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
from rekindle.spec import KVLayout, Section

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
        layers = tuple(replace(layer, num_kv_heads=self.count) for layer in layout.layers)
        return replace(layout, layers=layers)


class HeadCopies:
    """Copies a worker's heads out of payloads of all heads, and into them."""

    def __init__(self, share: HeadShare, whole: KVLayout) -> None:
        self.layout = share.layout(whole)
        self._ranges = list(_ranges(share, whole, self.layout))

    @property
    def payload_bytes(self) -> int:
        """Bytes of a payload of the worker's heads."""
        return self.layout.parts[0].payload_bytes

    def cut(self, whole: Bytes, own: Bytes) -> None:
        """Copy the worker's heads of a whole payload to `own`; what is between sections stays."""
        for there, here, num_bytes in self._ranges:
            own[here : here + num_bytes] = whole[there : there + num_bytes]

    def paste(self, own: Bytes, whole: Bytes) -> None:
        """Copy a payload of the worker's heads to their place in a whole one."""
        for there, here, num_bytes in self._ranges:
            whole[there : there + num_bytes] = own[here : here + num_bytes]


def _ranges(share: HeadShare, whole: KVLayout, own: KVLayout) -> Iterator[tuple[int, int, int]]:
    """Where each section's heads are in a whole payload and in the worker's, and their bytes."""
    for there, here in zip(_sections(whole), _sections(own), strict=True):
        of_head = there.num_bytes // share.total
        yield there.offset + share.first * of_head, here.offset, here.num_bytes


def _sections(layout: KVLayout) -> Iterator[Section]:
    for layer in layout.parts[0].sections:
        yield from chain(layer.k, layer.v)
