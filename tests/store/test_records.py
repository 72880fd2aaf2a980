"""A record describes itself, and no bit of it can change unnoticed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity
from rekindle.store.files.records import PAGE, BadRecord, RecordFormat
from tests.store.chains import LAYOUT, SIZE

FORMATS = [RecordFormat.of(LAYOUT, part.index) for part in LAYOUT.parts]


def block(num_tokens: int = SIZE, seed: int = 0) -> BlockIdentity:
    random = np.random.default_rng(seed)
    hashes = [BlockHash(random.bytes(32)) for _ in range(3)]
    return BlockIdentity(*hashes, random.integers(0, 1 << 32, num_tokens, dtype=np.uint32))


def payload(part: int, seed: int = 0) -> np.ndarray:
    size = LAYOUT.parts[part].payload_bytes
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def encoded(part: int, num_tokens: int = SIZE, seed: int = 0) -> np.ndarray:
    record = np.full(FORMATS[part].record_bytes, 0xAA, dtype=np.uint8)
    FORMATS[part].payload(record)[:] = payload(part, seed)
    FORMATS[part].encode(block(num_tokens, seed), record)
    return record


@given(part=st.integers(0, 1), num_tokens=st.integers(1, SIZE), seed=st.integers(0, 1 << 20))
def test_what_was_encoded_is_decoded(part: int, num_tokens: int, seed: int) -> None:
    wanted, record = block(num_tokens, seed), np.full(FORMATS[part].record_bytes, 0xAA, dtype=np.uint8)
    FORMATS[part].payload(record)[:] = payload(part, seed)
    crc = FORMATS[part].encode(wanted, record)
    found = FORMATS[part].decode(record)
    assert (found.hash, found.parent, found.root) == (wanted.hash, wanted.parent, wanted.root)
    assert found.num_tokens == num_tokens
    assert np.array_equal(found.ids, wanted.ids)
    assert np.array_equal(FORMATS[part].payload(record), payload(part, seed))
    assert FORMATS[part].payload_crc(record) == crc


@pytest.mark.parametrize(
    "wrong", [{"hash": BlockHash(b"")}, {"root": BlockHash(bytes(31))}, {"ids": np.arange(3, dtype=np.int64)}]
)
def test_an_identity_that_is_none_is_not_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of a block are"):
        FORMATS[1].encode(replace(block(3), **wrong), encoded(1))


def test_every_flipped_bit_is_found() -> None:
    record = encoded(1)
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadRecord):
            FORMATS[1].decode(record)
        record[bit // 8] ^= 1 << bit % 8
    FORMATS[1].decode(record)


@given(start=st.integers(0, FORMATS[0].record_bytes - 1), length=st.integers(1, 8192), part=st.integers(0, 1))
def test_torn_records_are_found(start: int, length: int, part: int) -> None:
    record, other = encoded(part), encoded(part, seed=1)
    torn = record.copy()
    torn[start : start + length] = other[start : start + length]
    if np.array_equal(torn, record) or np.array_equal(torn, other):
        return
    with pytest.raises(BadRecord):
        FORMATS[part].decode(torn)


def test_a_record_of_another_part_or_layout_is_refused() -> None:
    record = np.zeros(max(f.record_bytes for f in FORMATS), dtype=np.uint8)
    record[: FORMATS[0].record_bytes] = encoded(0)
    with pytest.raises(BadRecord):
        FORMATS[1].decode(record[: FORMATS[1].record_bytes])
    other = RecordFormat(0, SIZE, FORMATS[0].payload_bytes, bytes(32), FORMATS[0].formats)
    with pytest.raises(BadRecord, match="another layout"):
        other.decode(encoded(0))


def test_records_are_whole_pages_and_payloads_are_aligned() -> None:
    for record_format in FORMATS:
        assert record_format.record_bytes % PAGE == 0
        assert record_format.header_bytes % 64 == 0
        assert len(record_format.payload(encoded(record_format.part))) == record_format.payload_bytes


def test_the_formats_of_all_layers_stand_in_the_record() -> None:
    assert FORMATS[0].formats == bytes([0x33, 0x11])
    assert FORMATS[1].formats == bytes([0x23])
    assert FORMATS[0].formats in encoded(0)[: FORMATS[0].header_bytes].tobytes()


def test_the_layout_of_a_record_never_changes() -> None:
    head = encoded(1)[: FORMATS[1].header_bytes].tobytes()
    assert head[:8] == b"RKBLOCK\n"
    numbers = np.frombuffer(head[8:40], dtype="<u2")
    assert (numbers[0], numbers[1]) == (1, 1)
    assert np.frombuffer(head[12:32], dtype="<u4")[:4].tolist() == [FORMATS[1].header_bytes, SIZE, SIZE, 1]
    written = block()
    assert head[40:72] == LAYOUT.digest
    assert head[72:168] == written.hash + written.parent + written.root
    assert head[172 : 172 + 4 * SIZE] == written.ids.astype("<u4").tobytes()
