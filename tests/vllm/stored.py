"""Stores of these tests: opened again and again, read back, and changed from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rekindle.cache.blocks.hashing import chain_hashes
from rekindle.config import StoreSettings
from rekindle.spec import KVLayout
from rekindle.store.values import StoredBlock
from rekindle_vllm.names import RecordFormat, Scope, record_layout
from rekindle_vllm.owner import RecordOwner
from tests.vllm.engine import DEFAULT, LAYERS, SHAPE, expected_rows
from tests.vllm.hybrid import Kind, expected_part

PAYLOAD_OFFSET = 3000  # a place in every payload of these tests
STATE_OFFSET = 450  # the same, of states
RECORD = 64
MODEL = b"m" * 32


class Stores:
    """Opens the store of one directory again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.opened: list[RecordOwner] = []

    def open(
        self,
        record_format: RecordFormat = "native",
        staging_bytes: int = 1 << 24,
        layout: KVLayout | None = None,
        readers: int = 2,
    ) -> RecordOwner:
        for owner in self.opened:
            owner.close()
        layout = layout or record_layout((SHAPE,) * LAYERS, torch.bfloat16, record_format, RECORD)
        settings = StoreSettings(dir=self.directory, staging_bytes=staging_bytes, disk_bytes=1 << 30, readers=readers)
        self.opened.append(RecordOwner.open(layout, MODEL, settings))
        return self.opened[-1]

    def close(self) -> None:
        """Close all that were opened."""
        for owner in self.opened:
            owner.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 89, length)]


def records_of(owner: RecordOwner, ids: list[int], scope: Scope = DEFAULT) -> list[StoredBlock]:
    """The records of a sequence that are on disk."""
    assert owner.store.flush(10)
    size = owner.layout.block_tokens
    root = owner.root(scope)
    given = np.array(ids[: len(ids) // size * size], dtype=np.uint32)
    return owner.locate(chain_hashes(root, given, size), root, given)


def check_records(owner: RecordOwner, ids: list[int], count: int) -> None:
    """Exactly the first `count` records of a sequence are on disk, with the bytes that its tokens have."""
    blocks = records_of(owner, ids)
    assert len(blocks) == count
    rows = [np.zeros(owner.layout.parts[0].payload_bytes, dtype=np.uint8) for _ in blocks]
    assert owner.begin_load(owner.plan_load(blocks), 0, rows).result(10) == count
    for number, row in enumerate(rows):
        assert np.array_equal(row, expected_rows(owner.layout, ids[: (number + 1) * RECORD])), number


def check_parts(owner: RecordOwner, kind: Kind, ids: list[int]) -> list[list[int]]:
    """The parts of each record of a sequence that are on disk, all of which have the bytes that its tokens have."""
    blocks = records_of(owner, ids)
    for part in owner.layout.parts:
        held = [number for number, block in enumerate(blocks) if part.index in block.parts]
        rows = [np.zeros(part.payload_bytes, dtype=np.uint8) for _ in held]
        key = owner.plan_load([blocks[number] for number in held], part.index)
        good = owner.begin_load(key, 0, rows).result(10)
        owner.forget([key])
        for number, row in zip(held[:good], rows, strict=False):
            expected = expected_part(kind, part.index, ids[: (number + 1) * owner.layout.block_tokens])
            assert np.array_equal(row, expected), f"record {number} has other bytes in part {part.index}"
    return [sorted(block.parts) for block in blocks]


def damage(directory: Path, block: StoredBlock, part: int = 0, offset: int = PAYLOAD_OFFSET) -> None:
    """Flip one bit in the payload of a part of a block."""
    name = block.identity.hash
    for path in directory.rglob(f"blocks-{part}-*.safetensors"):
        data = path.read_bytes()
        at = data.find(name)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + offset)
                file.write(bytes([data[at + offset] ^ 4]))
            return
    raise AssertionError(f"{name.hex()} is in no file")
