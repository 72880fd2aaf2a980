"""An agent's file: what was written is read, and nothing that a file claims is believed."""

from __future__ import annotations

import io
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rekindle.errors import BadRequest
from rekindle.store.agent_file import AgentFileReader, FileBlock, FileHead, FileText, written

TEXTS = [
    FileText(np.arange(70, dtype=np.uint32), "Schlüssel".encode(), (0, 30, 70)),
    FileText(np.arange(20, dtype=np.uint32), b"key", (20,)),
]
HEAD = FileHead("ada", "pocket", "ab" * 32, {"weights": "12"}, 16, (100, 7), (70, 20), ((0, 30, 70), (20,)))
BLOCKS = [
    FileBlock(0, number, {part: np.full((100, 7)[part], number, np.uint8) for part in parts})
    for number, parts in enumerate(((0,), (0, 1), (0,)))
]


def made(head: FileHead = HEAD) -> bytes:
    return b"".join(written(head, TEXTS, BLOCKS))


def read(data: bytes) -> tuple[FileHead, list[FileText], list[FileBlock]]:
    reader = AgentFileReader(io.BytesIO(data))
    return reader.head, list(reader.texts()), list(reader.blocks())


def test_what_was_written_is_read() -> None:
    head, texts, blocks = read(made())
    assert head == HEAD
    assert [(each.ids.tolist(), each.content, each.turn_ends) for each in texts] == [
        (each.ids.tolist(), each.content, each.turn_ends) for each in TEXTS
    ]
    found = [
        (each.branch, each.number, {part: kept.tolist() for part, kept in each.payloads.items()}) for each in blocks
    ]
    assert found == [
        (0, at, {part: kept.tolist() for part, kept in each.payloads.items()}) for at, each in enumerate(BLOCKS)
    ]


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    data = made()
    for at in range(len(data)):
        with pytest.raises(BadRequest, match="nothing has changed: "):
            read(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(BadRequest, match=r"(it ends too early|this is no agent's file)"):
            read(data[:at])
        with pytest.raises(BadRequest, match="nothing has changed: "):
            skipping = AgentFileReader(io.BytesIO(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :]))
            list(skipping.texts())
            skipping.skip_blocks()


def test_another_version_is_said() -> None:
    data = made()
    with pytest.raises(BadRequest, match="it is of version 2, and this Rekindle reads 1: update the older one"):
        read(data[:8] + struct.pack("<H", 2) + data[10:])


@pytest.mark.parametrize(
    "changed",
    [
        {"num_tokens": (70,)},
        {"num_tokens": (), "turn_ends": ()},
        {"num_tokens": (70, 0)},
        {"num_tokens": (70, 1 << 32)},
        {"num_tokens": (True, 20)},
        {"turn_ends": ((30, 10), ())},
        {"turn_ends": ((71,), ())},
        {"turn_ends": ((-1,), ())},
        {"turn_ends": ((0,) * 71, ())},
        {"model": "m" * 4097},
        {"part_bytes": ()},
        {"part_bytes": (1,) * 33},
        {"agent": 7},
        {"agent": "\ud800"},
        {"made_from": {"weights": 3}},
        {"block_tokens": "16"},
    ],
)
def test_a_head_that_cannot_be_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"its head (cannot be read|contradicts itself)"):
        read(made(replace(HEAD, **changed)))


def test_no_claim_takes_memory() -> None:
    """Of a head, of ids and of a block that claim gigabytes, and of JSON that nests without end."""
    start, most = made()[:10], 0x3FFFFFFF
    huge = struct.pack("<cI", b"H", 0xFFFFFFFF)
    ids = b"".join(written(replace(HEAD, num_tokens=(most, 20), turn_ends=((), ())), (), ()))[:-37]
    block = b"".join(written(replace(HEAD, part_bytes=(4 * most - 12, 7)), TEXTS, ()))[:-37]
    claims = (
        start + huge,
        start + struct.pack("<cI", b"H", 100_000) + b"[" * 100_000,
        ids + struct.pack("<cI", b"I", 4 * most) + bytes(100),
        block + struct.pack("<cI", b"B", 4 * most) + struct.pack("<III", 0, 0, 1) + bytes(100),
    )
    tracemalloc.start()
    for data, why in zip(claims, ("a frame", "cannot be read", "ends too early", "ends too early"), strict=True):
        with pytest.raises(BadRequest, match=why):
            read(data)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_no_more_blocks_are_counted_than_the_texts_have() -> None:
    head = replace(HEAD, num_tokens=(33, 16), turn_ends=((), ()))
    texts = [FileText(text.ids[:num], b"", ()) for text, num in zip(TEXTS, head.num_tokens, strict=True)]
    for num_blocks, found in ((4, None), (5, "it has more blocks than its texts")):
        reader = AgentFileReader(io.BytesIO(b"".join(written(head, texts, BLOCKS[:1] * num_blocks))))
        assert len(list(reader.texts())) == 2
        if found is None:
            assert reader.skip_blocks() == num_blocks * 112
        else:
            with pytest.raises(BadRequest, match=found):
                reader.skip_blocks()


def test_blocks_with_other_parts_or_places_are_refused() -> None:
    for block in (
        FileBlock(2, 0, BLOCKS[0].payloads),
        FileBlock(0, 0, {1: np.zeros(7, np.uint8)}),
        FileBlock(0, 0, {0: np.zeros(99, np.uint8)}),
        FileBlock(0, 0, {0: np.zeros(100, np.uint8), 2: np.zeros(1, np.uint8)}),
    ):
        with pytest.raises(BadRequest, match="a block has other parts or sizes than its head says"):
            read(b"".join(written(HEAD, TEXTS, [block])))
