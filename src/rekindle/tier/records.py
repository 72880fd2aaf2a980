"""Records on their way between the store and the object tier, each in the bytes that the store itself writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from rekindle.cache.blocks.hashing import BlockIdentity, TokenIds
from rekindle.spec import KVLayout
from rekindle.store.files.records import BadRecord, RecordFormat
from rekindle.store.values import Bytes, SequenceRecord, StoredBlock
from rekindle.store.warm import WarmStore
from rekindle.tier.sealing import BadObject, block_name

LOAD_S = 60.0  # until the store's readers have answered


class Records:
    """Reads blocks of a store as records, and records as blocks. Any thread."""

    def __init__(self, store: WarmStore, layout: KVLayout) -> None:
        self._store = store
        self._layout = layout
        self._formats = [RecordFormat.of(layout, part.index) for part in layout.parts]

    @property
    def block_tokens(self) -> int:
        """Tokens of a full block."""
        return self._layout.block_tokens

    @property
    def most_bytes(self) -> int:
        """Size of the largest record of a part."""
        return max(each.record_bytes for each in self._formats)

    def num_bytes(self, parts: Sequence[int]) -> int:
        """Return the size of records of these parts."""
        return sum(self._formats[part].record_bytes for part in parts)

    def ended(self, namespace: str, agent: str, branch: int) -> tuple[SequenceRecord, TokenIds] | None:
        """Return a branch as the store has it, with its ids; None if it has been dropped since."""
        found = [each for each in self._store.sequences_of(namespace, agent) if each.branch == branch]
        ids = self._store.sequence_ids(found[0]) if found else np.empty(0, dtype=np.uint32)
        return (found[0], ids) if len(ids) else None

    def located(self, blocks: Sequence[BlockIdentity]) -> list[StoredBlock]:
        """Return where the leading run of a branch's blocks is, its partial one included."""
        found: list[StoredBlock] = []
        for block in blocks:
            stored = self._store.stored(block.hash)
            if stored is None or 0 not in stored.parts:
                break
            found.append(stored)
        return found

    def payloads(self, blocks: Sequence[StoredBlock]) -> list[Mapping[int, Bytes]]:
        """Return the payloads of blocks by part; those before the first damaged one."""
        read: dict[int, Mapping[int, Bytes]] = {}
        num_good: Future[int] = Future()
        self._store.load(blocks, lambda first, run: read.update(enumerate(run, first)), num_good.set_result)
        with contextlib.suppress(TimeoutError):
            return [read[number] for number in range(num_good.result(LOAD_S))]
        return []

    def read(self, blocks: Sequence[StoredBlock]) -> list[tuple[str, bytes]]:
        """Return the records of blocks with the names of their objects; those before the first damaged one."""
        return [
            (block_name(block.identity.hash, part), self._encoded(block, part, payload))
            for block, payloads in zip(blocks, self.payloads(blocks), strict=False)
            for part, payload in payloads.items()
        ]

    def _encoded(self, block: StoredBlock, part: int, payload: Bytes) -> bytes:
        record_format = self._formats[part]
        record = np.zeros(record_format.record_bytes, dtype=np.uint8)
        record_format.payload(record)[:] = payload
        record_format.encode(block.identity, record)
        return record.tobytes()

    def decoded(self, identity: BlockIdentity, part: int, data: bytes) -> Bytes:
        """Return the payload in the object of one part of this block; BadObject if it is another's or damaged."""
        record = np.frombuffer(data, dtype=np.uint8)
        if record.nbytes != self._formats[part].record_bytes:
            raise BadObject(f"{record.nbytes} bytes, not the {self._formats[part].record_bytes} of a record")
        try:
            found = self._formats[part].decode(record)
        except BadRecord as error:
            raise BadObject(str(error)) from error
        if found != identity or not np.array_equal(found.ids, identity.ids):
            raise BadObject("another block's record")
        return self._formats[part].payload(record)

    def names(self, identity: BlockIdentity, parts: Sequence[int]) -> Iterator[str]:
        """Yield the names of the objects of a block's parts."""
        return (block_name(identity.hash, part) for part in parts)
