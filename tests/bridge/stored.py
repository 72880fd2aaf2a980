"""Stores of these tests: opened again and again, read back, and changed from outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from rekindle.bridge.names import RecordFormat, Scope, record_layout
from rekindle.bridge.owner import RecordOwner
from rekindle.cache.blocks.hashing import chain_hashes
from rekindle.config import StoreSettings
from rekindle.store.values import StoredBlock
from tests.bridge.engine import DEFAULT, LAYERS, SHAPE, expected_rows

PAYLOAD_OFFSET = 3000  # a place in every payload of these tests
RECORD = 64
MODEL = b"m" * 32


class Stores:
    """Opens the store of one directory again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.opened: list[RecordOwner] = []

    def open(
        self, record_format: RecordFormat = "native", staging_bytes: int = 1 << 24, readers: int = 2
    ) -> RecordOwner:
        for owner in self.opened:
            owner.close()
        layout = record_layout((SHAPE,) * LAYERS, torch.bfloat16, record_format, RECORD)
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
    whole = len(ids) // RECORD
    root = owner.root(scope)
    given = np.array(ids[: whole * RECORD], dtype=np.uint32)
    return owner.locate(chain_hashes(root, given, RECORD), root, given)


def check_records(owner: RecordOwner, ids: list[int], count: int) -> None:
    """Exactly the first `count` records of a sequence are on disk, with the bytes that its tokens have."""
    blocks = records_of(owner, ids)
    assert len(blocks) == count
    rows = [np.zeros(owner.layout.parts[0].payload_bytes, dtype=np.uint8) for _ in blocks]
    assert owner.begin_load(owner.plan_load(blocks), 0, rows).result(10) == count
    for number, row in enumerate(rows):
        assert np.array_equal(row, expected_rows(owner.layout, ids[: (number + 1) * RECORD])), number


def damage(directory: Path, block: StoredBlock) -> None:
    """Flip one bit in the payload of a block's record."""
    name = block.identity.hash
    for path in directory.rglob("blocks-*.safetensors"):
        data = path.read_bytes()
        at = data.find(name)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + PAYLOAD_OFFSET)
                file.write(bytes([data[at + PAYLOAD_OFFSET] ^ 4]))
            return
    raise AssertionError(f"{name.hex()} is in no file")
