"""The values of the store's interface: blocks to save, stored blocks, sequences, figures.

All frozen; token ids are u32 [n].
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity
from rekindle.kv.copies import Wait, at_once

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class BlockBytes:
    """A block whose bytes are at hand: the payload of each of its parts [payload_bytes]."""

    identity: BlockIdentity
    payloads: Mapping[int, Bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its parts."""
        return sum(payload.nbytes for payload in self.payloads.values())


@dataclass(frozen=True, slots=True, eq=False)
class SavingBlock:
    """A block on its way to disk: the row of each of its parts in the staging buffer, complete after `wait`."""

    identity: BlockIdentity
    rows: Mapping[int, int]
    wait: Wait = at_once


@dataclass(frozen=True, slots=True)
class Place:
    """Where the record of a part is, and the checksum of its payload; in an encrypted store its seal instead."""

    part: int
    slot: int
    crc: int
    seal: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class StoredBlock:
    """A block with durable records: that of its first part, and those of windows that a branch covers."""

    identity: BlockIdentity
    places: tuple[Place, ...]

    @property
    def parts(self) -> frozenset[int]:
        """The parts that are stored."""
        return frozenset(place.part for place in self.places)

    def only(self, parts: Collection[int]) -> StoredBlock:
        """Return the block with only these of its parts."""
        return StoredBlock(self.identity, tuple(place for place in self.places if place.part in parts))


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One branch of an agent. `head` is the hash of its last block, full or tail (the root if it has none).

    `num_tokens` may end inside the head block; then only its first tokens belong to the branch. `turn_ends` are the
    token counts after each turn, for rewinding. `resume_points` are token counts at which it is likely to be resumed,
    in addition to its end; they are not read back. `is_rolling`: parts that end were saved all along, by an engine that
    does not know where a turn will end; what no branch covers of them is freed.
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
    resume_points: tuple[int, ...] = ()
    is_rolling: bool = False


@dataclass(frozen=True, slots=True)
class Shortened:
    """A branch that eviction cut to its first `num_tokens` tokens, 0 if it is gone."""

    namespace: str
    agent: str
    branch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PurgeProof:
    """What a purge freed and read back as zeros; others still use `blocks_shared` of the agent's blocks, which stay."""

    slots_freed: int
    bytes_zeroed: int
    blocks_shared: int


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes that were written to the disk for records and their index.

    `today`: since the day began (UTC), by all stores of the directory, of `a_day` at most (None: any number). `a_turn`:
    by this process for each turn that it saved; None before the first.
    """

    today: int
    a_day: int | None
    a_turn: int | None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of an open store; counters since it was opened.

    Bytes count slots; SQLite's own files are `index_bytes`. `first_error` started the failure that `last_error` belongs
    to (or the latest one, if saving works again) at wall time `first_error_at`. `saving_ok` is False from a failed save
    until the next one that writes a block, `has_room` from one that did not fit until one that does. `damaged_rows` of
    the index did not verify and were dropped or repaired. `index_error` describes damage to its file: nothing can be
    saved until the next open, which rebuilds it. `bytes_written` are records, `index_bytes_written` what SQLite wrote
    for the index; `written_today` and `writes_a_day` are those of `Wear`. While a day's budget has no room for a
    block, `may_write` is False, and blocks count as postponed.
    """

    num_agents: int
    num_sequences: int
    num_blocks: int
    used_bytes: int
    disk_bytes: int
    index_bytes: int
    pinned_blocks: int
    bytes_written: int
    index_bytes_written: int
    written_today: int
    writes_a_day: int | None
    may_write: bool
    blocks_written: int
    bytes_read: int
    blocks_read: int
    blocks_evicted: int
    sequences_evicted: int
    turns_saved: int
    turns_unsaved: int
    blocks_refused: int
    blocks_postponed: int
    blocks_orphaned: int
    unsaved_evicted: int
    bad_records: int
    damaged_rows: int
    index_error: str | None
    failed_saves: int
    queue_length: int
    last_error: str | None
    first_error: str | None
    first_error_at: float | None
    saving_ok: bool
    has_room: bool
