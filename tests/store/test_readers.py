"""Loads, read by the kernels and by Python: both find the same damage, and all threads serve one load."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.compute.cpu.kernels.records import record_reader
from rekindle.store.files.shards import Shards, shard_header
from rekindle.store.files.sync import OsFileSystem
from rekindle.store.threads.readers import RUN_BLOCKS, Payloads, Readers
from rekindle.store.values import Bytes, Place, StoredBlock
from tests.store.test_records import FORMATS, block, encoded, payload

WAIT_S = 60
SLOTS = 5  # in a file
FULL = 255
HEAD_BYTES = [len(shard_header(SLOTS, each)) for each in FORMATS]


@dataclass
class Disk:
    """Records of blocks 0, 1, … in slots of the same numbers; `reading` by what the kernels' setting gives."""

    directory: Path
    kernels: str
    readers: Readers | None = None
    bad: list[tuple[int, str]] = field(default_factory=list)
    blocks: list[StoredBlock] = field(default_factory=list)

    def fill(self, num_blocks: int, parts: Sequence[int] = (0, 1)) -> None:
        shards = self.shards()
        for number in range(num_blocks):
            crcs = []
            for part in parts:
                record = encoded(part, seed=number)
                shards.write(part, number, record)
                crcs.append(FORMATS[part].payload_crc(record))
            places = tuple(Place(part, number, crc) for part, crc in zip(parts, crcs, strict=True))
            self.blocks.append(StoredBlock(block(seed=number), places))
        shards.close()

    def shards(self) -> Shards:
        return Shards(self.directory, FORMATS, [SLOTS] * len(FORMATS), OsFileSystem())

    def start(self, num_threads: int = 2) -> Readers:
        """Readers of the records as they are now."""
        found = record_reader("auto" if self.kernels == "auto" else "torch")
        self.readers = Readers(self.shards(), num_threads, self.report, found)
        self.readers.start()
        return self.readers

    def report(self, bad: StoredBlock, reason: str) -> None:
        numbers = [number for number, each in enumerate(self.blocks) if each.identity.hash == bad.identity.hash]
        self.bad.append((numbers[0], reason))

    def change(self, part: int, number: int, at: int) -> None:
        """Flip a bit of a byte of a record."""
        path = self.directory / f"blocks-{part}-{number // SLOTS:03d}.safetensors"
        offset = HEAD_BYTES[part] + number % SLOTS * FORMATS[part].record_bytes + at
        with path.open("r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), offset)

    def load(self, blocks: Sequence[StoredBlock]) -> tuple[int, list[dict[int, Bytes]]]:
        """How many are good, and what is where all of them go."""
        assert self.readers is not None
        rooms = [
            {place.part: np.full(FORMATS[place.part].payload_bytes, FULL, np.uint8) for place in each.places}
            for each in blocks
        ]
        num_good: Future[int] = Future()
        self.readers.put(
            blocks, lambda first, run: None, num_good.set_result, lambda first, run: rooms[first : first + len(run)]
        )
        return num_good.result(WAIT_S), rooms


@pytest.fixture(params=["auto", "torch"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, request.param)
    yield made
    if made.readers is not None:
        made.readers.stop()


def same(rooms: Mapping[int, Bytes], number: int) -> bool:
    return all(np.array_equal(found, payload(part, number)) for part, found in rooms.items())


def test_what_was_written_comes_to_where_it_should(disk: Disk) -> None:
    disk.fill(3 * RUN_BLOCKS + 1)
    readers = disk.start()
    num_good, rooms = disk.load(disk.blocks)
    assert num_good == len(disk.blocks) and all(same(each, number) for number, each in enumerate(rooms))
    assert disk.load(disk.blocks[:1])[0] == 1 and disk.load([])[0] == 0
    sizes = sum(each.record_bytes for each in FORMATS)
    assert (readers.blocks_read, readers.bytes_read) == (len(disk.blocks) + 1, (len(disk.blocks) + 1) * sizes)


@pytest.mark.parametrize("part", [0, 1])
def test_damage_of_any_region_is_found_and_nothing_of_it_stays(disk: Disk, part: int) -> None:
    """A bit of every byte of the header, and of some of payload and padding; Python's reasons, and no others."""
    disk.fill(3, [part])
    disk.start(1)
    record = FORMATS[part]
    end = record.header_bytes + record.payload_bytes
    places = [*range(record.header_bytes), record.header_bytes, *range(record.header_bytes, end, 97), end - 1]
    for at in sorted({*places, *range(end, record.record_bytes, 199), record.record_bytes - 1}):
        disk.change(part, 1, at)
        num_good, rooms = disk.load(disk.blocks)
        assert num_good == 1 and same(rooms[0], 0), at
        assert not rooms[1][part].any(), f"byte {at}: bytes that nobody vouches for are left"
        expected = "no record" if at < 8 else "header checksum" if at < record.header_bytes else "payload checksum"
        [(number, reason)] = disk.bad
        assert number == 1 and reason.startswith(expected), (at, reason)
        disk.change(part, 1, at)
        disk.bad.clear()
    assert disk.load(disk.blocks)[0] == 3 and disk.bad == []


def test_what_is_whole_and_another_record_is_not_used(disk: Disk) -> None:
    disk.fill(4)
    disk.start()
    first, second = disk.blocks[:2]
    older = replace(first, places=tuple(replace(place, crc=place.crc ^ 1) for place in first.places))
    ids = first.identity.ids.copy()
    ids[-1] += 1
    others = {
        "holds an older version of the block": older,
        "holds another block": StoredBlock(second.identity, first.places),
        "holds other token ids": StoredBlock(replace(first.identity, ids=ids), first.places),
        "no record here": StoredBlock(first.identity, tuple(replace(place, slot=4) for place in first.places)),
    }
    disk.blocks += others.values()
    for reason, other in others.items():
        if reason.startswith("no record"):
            os.truncate(disk.directory / "blocks-0-000.safetensors", HEAD_BYTES[0] + SLOTS * FORMATS[0].record_bytes)
        assert disk.load([disk.blocks[2], other, disk.blocks[3]])[0] == 1
        assert [found for _, found in disk.bad] == [reason]
        disk.bad.clear()


@pytest.mark.parametrize("left", [0, 1, 700, FORMATS[0].record_bytes - 1])
def test_a_file_that_ends_too_soon_is_damage(disk: Disk, left: int) -> None:
    disk.fill(2 * SLOTS)
    os.truncate(disk.directory / "blocks-0-001.safetensors", HEAD_BYTES[0] + 2 * FORMATS[0].record_bytes + left)
    disk.start(1)
    assert disk.load(disk.blocks)[0] == SLOTS + 2
    assert disk.bad == [(SLOTS + 2, f"the file ends after {left} of {FORMATS[0].record_bytes} bytes")]


def test_a_file_that_is_missing_is_damage_of_its_records_alone(disk: Disk) -> None:
    disk.fill(2 * SLOTS)
    (disk.directory / "blocks-1-001.safetensors").unlink()
    disk.start(1)
    num_good, rooms = disk.load(disk.blocks)
    assert num_good == SLOTS and all(same(each, number) for number, each in enumerate(rooms[:SLOTS]))
    [(number, reason)] = disk.bad
    assert number == SLOTS and reason.startswith("cannot be read: ")


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(disk: Disk) -> None:
    disk.fill(2 * SLOTS)
    readers = disk.start(1)
    assert disk.load(disk.blocks)[0] == 2 * SLOTS
    num_good: Future[int] = Future()

    def deliver(first: int, run: Sequence[Payloads]) -> None:
        for path in disk.directory.glob("blocks-*"):
            path.unlink()

    readers.put(disk.blocks, deliver, num_good.set_result)
    assert num_good.result(WAIT_S) == 2 * SLOTS and not list(disk.directory.glob("blocks-*"))


def test_every_thread_has_a_share_of_a_load(disk: Disk) -> None:
    disk.fill(4)
    readers = disk.start(2)
    both, num_good = threading.Barrier(2), Future[int]()
    readers.put(disk.blocks, lambda first, run: both.wait(WAIT_S), num_good.set_result)
    assert num_good.result(WAIT_S) == 4


@pytest.mark.parametrize("bad", [0, 3, 4, 9])
def test_a_load_ends_at_its_first_bad_block_whoever_is_faster(disk: Disk, bad: int) -> None:
    disk.fill(10)
    disk.change(0, bad, 1000)
    readers = disk.start(2)
    others, num_good = threading.Event(), Future[int]()
    delivered: set[int] = set()

    def deliver(first: int, run: Sequence[Payloads]) -> None:
        delivered.update(range(first, first + len(run)))
        if first == 0 and bad >= 5:
            assert others.wait(WAIT_S)  # the other run is done before this one
        others.set()

    def room(first: int, run: Sequence[StoredBlock]) -> Sequence[Payloads]:
        if first == 0 and bad < 5:
            assert others.wait(WAIT_S)
        return [
            {place.part: np.empty(FORMATS[place.part].payload_bytes, np.uint8) for place in each.places} for each in run
        ]

    readers.put(disk.blocks, deliver, num_good.set_result, room)
    assert num_good.result(WAIT_S) == bad and {*range(bad)} <= delivered and bad not in delivered


@pytest.mark.parametrize("where", ["room", "deliver"])
def test_a_receiver_that_fails_ends_its_load_alone(disk: Disk, where: str) -> None:
    disk.fill(6)
    readers = disk.start(2)
    num_good: Future[int] = Future()
    raising: Callable[..., Sequence[Payloads]] = lambda first, run: [][first]  # noqa: E731
    if where == "room":
        readers.put(disk.blocks, lambda first, run: None, num_good.set_result, raising)
    else:
        readers.put(disk.blocks, raising, num_good.set_result)
    assert num_good.result(WAIT_S) == 0 and disk.bad == []
    assert disk.load(disk.blocks)[0] == 6


def test_loads_end_when_the_readers_stop(disk: Disk) -> None:
    disk.fill(10)
    readers = disk.start(1)
    reading, counts = threading.Event(), [Future[int]() for _ in range(3)]

    def deliver(first: int, run: Sequence[Payloads]) -> None:
        reading.set()
        assert readers.stopping.wait(WAIT_S)

    readers.put(disk.blocks, deliver, counts[0].set_result)
    readers.put(disk.blocks, deliver, counts[1].set_result)
    assert reading.wait(WAIT_S)
    readers.stop()
    readers.put(disk.blocks, deliver, counts[2].set_result)
    assert [count.result(WAIT_S) for count in counts] == [RUN_BLOCKS, 0, 0]
