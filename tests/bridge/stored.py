"""Records on disk, changed from outside."""

from __future__ import annotations

from pathlib import Path

from rekindle.store.values import StoredBlock

PAYLOAD_OFFSET = 3000  # a place in every payload of these tests


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
