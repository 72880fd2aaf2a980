"""Ways from a worker to the owner of the store, and which heads of a record are the worker's.

The owner's own process needs no way: its records are read and saved directly. Other processes have `wire`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from rekindle.bridge.codec import Bytes
from rekindle.bridge.owner import OPEN, RecordOwner
from rekindle.bridge.steps import Address
from rekindle.bridge.transfers import Port
from rekindle.errors import ConfigError
from rekindle.spec import KVLayout


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


class DirectPort:
    """To an owner in this process, of a worker that has all heads."""

    def __init__(self, owner: RecordOwner) -> None:
        self._owner = owner

    def begin_load(self, key: int, first: int, rows: Sequence[Bytes]) -> Future[int]:
        """As `Port.begin_load`."""
        return self._owner.begin_load(key, first, rows)

    def save(self, key: int, first: int, rows: Sequence[Bytes], deadline: float) -> int:
        """As `Port.save`."""
        return self._owner.save(key, first, rows, deadline)


def port_to(address: Address) -> Port:
    """The way to an owner in this process."""
    assert address.pid == os.getpid(), f"the owner of the store is process {address.pid}"
    return DirectPort(OPEN[address.token])
