"""The values that cross the store's border: blocks to save, where they lie, sequences, figures.

All frozen; token ids are u32 [n].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rekindle.cache.hashing import BlockHash, TokenIds

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class StagedBlock:
    """A block to save, full or tail. `fill(part, out)` writes a part's whole payload into `out` [payload_bytes]."""

    name: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds
    fill: Callable[[int, Bytes], object]


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """Where a block lies: per part its slot and payload checksum, and what its records must say."""

    name: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds
    slots: tuple[int, ...]
    crcs: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV it holds."""
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One branch of an agent. `head` names its last block, full or tail (the root if it has none).

    `num_tokens` may end inside the head: only its first tokens belong to the branch then. `turn_ends` are the token
    counts after each turn, kept for rewinding.
    """

    namespace: str
    agent: str
    branch: int
    root: BlockHash
    head: BlockHash
    num_tokens: int
    canonical_tokens: int
    last_use: float
    turn_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of an open store. Bytes of slots, without the index; counters since it was opened."""

    num_agents: int
    num_sequences: int
    num_blocks: int
    used_bytes: int
    disk_bytes: int
    bytes_written: int
    blocks_written: int
    turns_saved: int
    turns_unsaved: int
    blocks_refused: int
    blocks_orphaned: int
    unsaved_evicted: int
    bad_records: int
    failed_saves: int
    queue_length: int
    last_error: str | None
