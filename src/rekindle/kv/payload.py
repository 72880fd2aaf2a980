"""The value that travels between tiers: one part of one block, with all that names it.

Knows neither where the bytes came from nor where they go. `data` is the part's payload as `KVLayout` lays it out, the
bytes beyond `num_tokens` zero, and nobody writes to it after the value is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class BlockPayload:
    """One part of a block: name and parent (32 bytes each), root, part index, ids uint32 [num_tokens], bytes uint8."""

    name: bytes
    parent: bytes
    root: bytes
    part: int
    ids: np.ndarray
    num_tokens: int
    data: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.name) == len(self.parent) == len(self.root) == 32:
            raise ValueError("name, parent and root of a block are 32 bytes each")
        if self.ids.dtype != np.uint32 or self.ids.shape != (self.num_tokens,):
            raise ValueError(f"{self.num_tokens} tokens need uint32 ids of that length, not {self.ids.shape}")
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise ValueError("the payload of a block is one row of bytes")
