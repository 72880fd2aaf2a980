"""Records read by the kernels of every level: the checksum is zlib's, and nothing counts that is not as it must be."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.compute.cpu.kernels.records import RecordKernel, record_reader
from rekindle.store.files.shards import RecordAt
from tests.kernels.native import built, needs_kernels, runnable

pytestmark = needs_kernels

HEAD = b"a header of some bytes"
FULL = 255


@pytest.fixture(scope="module", params=runnable())
def read(request: pytest.FixtureRequest) -> RecordKernel:
    found = built()[request.param].library
    assert found is not None
    return RecordKernel(found)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    fd = os.open(tmp_path_factory.mktemp("records") / "records", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def put(file: int, payload: bytes, padding: bytes = b"", offset: int = 0) -> RecordAt:
    """Write a record; what a reader should find, with zlib's checksum, and memory that is full of ones."""
    os.pwrite(file, HEAD + payload + padding, offset)
    out = np.full(len(payload), FULL, dtype=np.uint8)
    return RecordAt(file, offset, HEAD, zlib.crc32(payload + padding), out, len(padding))


# Around the sizes at which the folding begins and ends, and at which a payload is read in pieces.
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([(1 << 17) + extra for extra in (-65, -1, 0, 1, 15, 64, 70)]))


@given(size=SIZES, padding=st.integers(0, 200), offset=st.integers(0, 5000), seed=st.integers(0, 1 << 30))
def test_the_checksum_is_that_of_zlib(
    read: RecordKernel, file: int, size: int, padding: int, offset: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    wanted = put(file, random.bytes(size), random.bytes(padding), offset)
    assert read([wanted]) == 1
    assert zlib.crc32(wanted.payload.tobytes() + os.pread(file, padding, offset + len(HEAD) + size)) == wanted.crc
    assert read([replace(wanted, crc=wanted.crc ^ 1 << seed % 32)]) == 0


@given(st.data())
def test_any_changed_bit_ends_what_is_read(read: RecordKernel, file: int, data: st.DataObject) -> None:
    payload, padding = data.draw(st.binary(max_size=200)), data.draw(st.binary(max_size=70))
    at = data.draw(st.integers(0, 8 * len(HEAD + payload + padding) - 1))
    records = [put(file, payload, padding, 1000 * number) for number in range(3)]
    assert read(records) == 3
    byte = os.pread(file, 1, 1000 + at // 8)[0] ^ 1 << at % 8
    os.pwrite(file, bytes([byte]), 1000 + at // 8)
    for record in records:
        record.payload[:] = FULL
    assert read(records) == 1
    assert records[0].payload.tobytes() == payload and (records[2].payload == FULL).all()
    if at // 8 < len(HEAD):
        assert (records[1].payload == FULL).all(), "the payload of another record was read"


@pytest.mark.parametrize("left", [0, 5, len(HEAD), len(HEAD) + 10, len(HEAD) + 1000, len(HEAD) + 1009])
def test_a_file_that_ends_too_soon_ends_what_is_read(read: RecordKernel, file: int, left: int) -> None:
    records = [put(file, bytes(range(250)) * 4, bytes(10), 2000 * number) for number in range(2)]
    os.ftruncate(file, 2000 + left)
    assert read(records) == 1


def test_what_cannot_be_read_ends_what_is_read(read: RecordKernel, file: int, tmp_path: Path) -> None:
    record = put(file, b"payload")
    closed = os.dup(file)
    os.close(closed)
    directory = os.open(tmp_path, os.O_RDONLY)
    assert [read([replace(record, file=other), record]) for other in (closed, directory)] == [0, 0]
    os.close(directory)
    assert read([]) == 0
    assert read([record, record]) == 2


def test_a_payload_is_read_into_memory_of_its_own_only(read: RecordKernel, file: int) -> None:
    record = put(file, bytes(64))
    for memory in (np.zeros((64, 2), dtype=np.uint8)[:, 0], np.frombuffer(bytes(64), dtype=np.uint8)):
        with pytest.raises(AssertionError, match="memory of its own"):
            read([replace(record, payload=memory)])


def test_python_reads_where_the_setting_says_so() -> None:
    assert record_reader("torch") is None
