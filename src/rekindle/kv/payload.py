"""The value that is passed between tiers: one part of one block, with its full identity.

Knows neither the source nor the destination of the bytes. `data` is the part's payload in the layout of `KVLayout`, the
bytes beyond `num_tokens` zero; it is never written after construction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES, BlockIdentity


@dataclass(frozen=True, slots=True, eq=False)
class BlockPayload:
    """One part of a block: its index, and its bytes (uint8)."""

    identity: BlockIdentity
    part: int
    data: np.ndarray

    def __post_init__(self) -> None:
        identity = self.identity
        if not len(identity.hash) == len(identity.parent) == len(identity.root) == HASH_BYTES:
            raise ValueError(f"hash, parent and root of a block are {HASH_BYTES} bytes each")
        if identity.ids.dtype != np.uint32 or identity.ids.ndim != 1:
            raise ValueError(f"ids of a block are a row of uint32, not {identity.ids.dtype} {identity.ids.shape}")
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise ValueError("the payload of a block is one row of bytes")
