"""Records on their way between the store and the object tier, each in the bytes that the store itself writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds
from rekindle.spec import KVLayout
from rekindle.store.branch_text import BranchText
from rekindle.store.files.records import BadRecord, RecordFormat
from rekindle.store.reading import located, payloads_of
from rekindle.store.values import Bytes, SequenceRecord, StoredBlock
from rekindle.store.warm import WarmStore
from rekindle_tier.sealing import BadObject, block_name


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

    def stored(self, root: BlockHash, ids: TokenIds) -> list[StoredBlock]:
        """Return where the leading run of a text's blocks is, its partial one included."""
        return located(self._store, list(BranchText(root, ids, 0, 0.0).blocks(self.block_tokens)))

    def read(self, blocks: Sequence[StoredBlock]) -> list[tuple[str, bytes]]:
        """Return the records of blocks with the names of their objects; those before the first damaged one."""
        return [
            (block_name(block.identity.hash, part), self._encoded(block, part, payload))
            for block, payloads in zip(blocks, payloads_of(self._store, blocks), strict=False)
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
