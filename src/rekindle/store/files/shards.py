"""The files that hold records: `blocks-PART-NNN.safetensors`, fixed slots, about 256 MiB each.

Owns the location of slots; the index knows which are in use. Each file is a valid safetensors file with one tensor
U8 `[slots, record_bytes]` whose data begin on a page boundary; it is created sparse, so an empty slot takes no space.
Slots of a part are numbered across its files. Any thread may read; only the writer thread writes.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rekindle.cache.blocks.hashing import BlockIdentity
from rekindle.store.files.records import PAGE, BadRecord, RecordFormat
from rekindle.store.files.sealed_records import bound, opened_record, sealed_record
from rekindle.store.files.sync import FileSystem
from rekindle.store.values import Place, StoredBlock

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class RecordAt:
    """A record that is wanted: its open file and offset, the header that it must have, then a payload and its padding
    with this crc; the payload goes to `payload` [payload_bytes]. Of an encrypted one, its seal and what that binds,
    and only the header's length."""

    file: int
    offset: int
    header: bytes
    crc: int
    payload: Bytes
    padding_bytes: int
    seal: bytes = field(default=b"", repr=False)
    place: bytes = b""


# Reads payloads to where they go; returns how many leading records are as they must be. The payload of the first other
# one may be anything.
ReadRecords = Callable[[Sequence[RecordAt]], int]
SHARD_BYTES = 256 << 20
SHARD_NAME = re.compile(r"blocks-\d+-\d{3,}\.safetensors")


def shard_header(slots: int, record: RecordFormat) -> bytes:
    """The header of a safetensors file: u64 length, then JSON padded with spaces to a whole page."""
    described = {
        "__metadata__": {
            "format": "rekindle-blocks",
            "part": str(record.part),
            "payload_offset": str(record.header_bytes),
            "payload_bytes": str(record.payload_bytes),
        },
        "blocks": {
            "dtype": "U8",
            "shape": [slots, record.record_bytes],
            "data_offsets": [0, slots * record.record_bytes],
        },
    }
    text = json.dumps(described).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def found_slots(directory: Path, record: RecordFormat, fs: FileSystem) -> int | None:
    """Number of slots in the first file of a part; None if there is none or its header is not ours."""
    try:
        fd = fs.open_file(directory / f"blocks-{record.part}-000.safetensors", "existing")
    except OSError:
        return None
    try:
        header_bytes = len(shard_header(1, record))
        slots = (fs.size(fd) - header_bytes) // record.record_bytes
        expected = shard_header(max(slots, 1), record)
        found = np.zeros(len(expected), dtype=np.uint8)
        fs.read(fd, 0, found)
        return slots if found.tobytes() == expected else None
    finally:
        fs.close_file(fd)


class Shards:
    """All record files of one fingerprint. `slots_per_shard` has one number per part and never changes.

    `are_sealed`: the store is encrypted.
    """

    def __init__(
        self,
        directory: Path,
        formats: Sequence[RecordFormat],
        slots_per_shard: Sequence[int],
        fs: FileSystem,
        *,
        are_sealed: bool = False,
    ) -> None:
        self.formats = tuple(formats)
        self.are_sealed = are_sealed
        self._sealing = [np.empty(f.record_bytes if are_sealed else 0, dtype=np.uint8) for f in formats]
        self.slots_per_shard = tuple(slots_per_shard)
        self._directory = directory
        self._fs = fs
        self.num_written = 0  # bytes, since it was made
        self._headers = [shard_header(s, f) for s, f in zip(slots_per_shard, formats, strict=True)]
        self._files: dict[tuple[int, int], int] = {}
        self._ready: set[tuple[int, int]] = set()
        self._unsynced: set[tuple[int, int]] = set()
        self._new_names = False
        self._lock = threading.Lock()

    def read(self, part: int, slot: int, out: Bytes) -> None:
        """Fill `out` [record_bytes] with the slot's content; BadRecord if it cannot be read in full."""
        try:
            fd, offset = self._place(part, slot)
            count = self._fs.read(fd, offset, out)
        except OSError as error:
            raise BadRecord(f"cannot be read: {error}") from error
        if count < out.nbytes:
            raise BadRecord(f"the file ends after {count} of {out.nbytes} bytes")

    def read_file(self, file: int, offset: int, out: Bytes) -> int:
        """Fill `out` from an open file, as `RecordAt` names it; return the bytes read, fewer at its end. OSError."""
        return self._fs.read(file, offset, out)

    def wanted(self, block: StoredBlock, place: Place, payload: Bytes) -> RecordAt:
        """The record of a block's part, to be read into `payload`; OSError if its file cannot be opened."""
        of_part = self.formats[place.part]
        assert payload.nbytes == of_part.payload_bytes, (
            f"{payload.nbytes} bytes for a payload of {of_part.payload_bytes}"
        )
        fd, offset = self._place(place.part, place.slot)
        padding_bytes = of_part.record_bytes - of_part.header_bytes - of_part.payload_bytes
        header = bytes(of_part.header_bytes) if self.are_sealed else of_part.header(block.identity, place.crc)
        where = bound(block.identity.hash, place.part, place.slot)
        return RecordAt(fd, offset, header, place.crc, payload, padding_bytes, place.seal, where)

    def put(self, identity: BlockIdentity, part: int, slot: int, record: Bytes) -> Place:
        """Write the record of a block whose payload is in `record` [record_bytes], as `write`; return its place."""
        crc = self.formats[part].encode(identity, record)
        if not self.are_sealed:
            self.write(part, slot, record)
            return Place(part, slot, crc)
        seal = sealed_record(record, bound(identity.hash, part, slot), self._sealing[part])
        self.write(part, slot, self._sealing[part])
        return Place(part, slot, 0, seal)  # a checksum of what is encrypted would say something of it

    def write(self, part: int, slot: int, record: Bytes) -> None:
        """Write a record [record_bytes], durable after `sync`. First creates the file, or fixes its header and size."""
        shard = (part, slot // self.slots_per_shard[part])
        if shard not in self._ready:
            self._make_ready(shard)
        fd, offset = self._place(part, slot)
        self._unsynced.add(shard)
        self._write(fd, offset, record)

    def sync(self) -> None:
        """Make all writes durable. After a failure, nothing written since the last success can be trusted."""
        touched, self._unsynced = self._unsynced, set()
        for shard in sorted(touched):
            self._fs.sync_data(self._files[shard])
        if self._new_names:
            self._fs.sync_directory(self._directory)
            self._new_names = False

    def punch(self, slots: Sequence[tuple[int, int]]) -> None:
        """Make these (part, slot) read as zeros and free their space; adjacent ones together, 0.5 ms per hole."""
        start, count = (-1, -1), 0
        for part, slot in [*sorted(slots), (-1, -1)]:
            if (part, slot) == (start[0], start[1] + count) and slot % self.slots_per_shard[part]:
                count += 1
                continue
            if count:
                with contextlib.suppress(FileNotFoundError):  # a shard that is gone has nothing to punch
                    fd, offset = self._place(*start)
                    self._fs.punch(fd, offset, count * self.formats[start[0]].record_bytes)
            start, count = (part, slot), 1

    def erase(self, part: int, slot: int) -> None:
        """Zero the slot up to the end of its file; durable after `sync`. For when `punch` had no effect."""
        fd, offset = self._place(part, slot)
        num_bytes = min(self.formats[part].record_bytes, self._fs.size(fd) - offset)
        if num_bytes > 0:
            self._unsynced.add((part, slot // self.slots_per_shard[part]))
            self._write(fd, offset, bytes(num_bytes))

    def is_zero(self, part: int, slot: int, buffer: Bytes) -> bool:
        """Whether the part of the slot inside its file reads as zeros; uses `buffer` [record_bytes]. Raises OSError."""
        fd, offset = self._place(part, slot)
        return not buffer[: self._fs.read(fd, offset, buffer)].any()

    def sync_all(self, slots: Sequence[tuple[int, int]]) -> None:
        """Make the holes of these (part, slot) durable."""
        self._unsynced.update((part, slot // self.slots_per_shard[part]) for part, slot in slots)
        self._unsynced &= set(self._files)
        self.sync()

    def slots(self, part: int) -> Iterator[int]:
        """All slots of a part that lie inside a file, in order."""
        found = self._directory.glob(f"blocks-{part}-*.safetensors")
        paths = [path for path in found if SHARD_NAME.fullmatch(path.name) and path.is_file()]
        for shard in sorted(int(path.stem.rsplit("-", 1)[1]) for path in paths):
            yield from range(shard * self.slots_per_shard[part], (shard + 1) * self.slots_per_shard[part])

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            files, self._files = self._files, {}
        for fd in files.values():
            self._fs.close_file(fd)

    def _write(self, fd: int, offset: int, content: Bytes | bytes) -> None:
        self.num_written += len(content)
        self._fs.write(fd, offset, content)

    def _path(self, shard: tuple[int, int]) -> Path:
        return self._directory / f"blocks-{shard[0]}-{shard[1]:03d}.safetensors"

    def _place(self, part: int, slot: int) -> tuple[int, int]:
        """The open file and the offset of a slot."""
        number, row = divmod(slot, self.slots_per_shard[part])
        offset = len(self._headers[part]) + row * self.formats[part].record_bytes
        with self._lock:
            fd = self._files.get((part, number))
            if fd is None:
                fd = self._files[part, number] = self._fs.open_file(self._path((part, number)), "existing")
        return fd, offset

    def _make_ready(self, shard: tuple[int, int]) -> None:
        """Ensure that the file exists with its full size and the right header."""
        part = shard[0]
        header = self._headers[part]
        num_bytes = len(header) + self.slots_per_shard[part] * self.formats[part].record_bytes
        with self._lock:
            if shard not in self._files:
                self._new_names = self._new_names or not self._path(shard).exists()
                self._files[shard] = self._fs.open_file(self._path(shard), "create")
            fd = self._files[shard]
        if self._fs.size(fd) != num_bytes:
            self._fs.resize(fd, num_bytes)
        found = np.zeros(len(header), dtype=np.uint8)
        self._fs.read(fd, 0, found)
        if found.tobytes() != header:
            self._write(fd, 0, header)
        self._unsynced.add(shard)
        self._ready.add(shard)


def read_record(shards: Shards, block: StoredBlock, place: Place, buffer: Bytes) -> Bytes:
    """Read the payload of a block's part as a view of `buffer` [record_bytes]; BadRecord unless it is as expected."""
    shards.read(place.part, place.slot, buffer)
    record_format, wanted = shards.formats[place.part], block.identity
    if shards.are_sealed:
        where, sealed = bound(wanted.hash, place.part, place.slot), buffer.copy()
        if not opened_record(sealed, place.seal, where, buffer):
            raise BadRecord("is not what was encrypted for this block and slot")
    found = record_format.decode(buffer)
    if not shards.are_sealed and record_format.payload_crc(buffer) != place.crc:
        raise BadRecord("holds an older version of the block")
    if (found.hash, found.parent, found.root) != (wanted.hash, wanted.parent, wanted.root):
        raise BadRecord("holds another block")
    if not np.array_equal(found.ids, wanted.ids):
        raise BadRecord("holds other token ids")
    return record_format.payload(buffer)
