"""Files under a passphrase: opened by who has it, and by nobody if any bit, chunk or end of them is another."""

from __future__ import annotations

import io
import random

import pytest

from rekindle.errors import BadRequest, ConfigError
from rekindle.store.sealed_file import CHUNK, HEAD_BYTES, Plain, is_sealed, opened, sealed

CONTENT = random.Random(7).randbytes(2 * CHUNK + 1000)
KEY = b"a copper key"
SEALED = b"".join(sealed((CONTENT[at : at + 300_000] for at in range(0, len(CONTENT), 300_000)), KEY))
WHOLE = 4 + CHUNK + 16  # bytes of a full chunk


def read(data: bytes, passphrase: bytes = KEY) -> bytes:
    return b"".join(opened(io.BytesIO(data), passphrase))


def test_it_is_opened_by_its_passphrase_and_by_no_other() -> None:
    assert read(SEALED) == CONTENT
    assert CONTENT[:64] not in SEALED and b"".join(sealed((CONTENT[:99],), KEY))[HEAD_BYTES:] not in SEALED
    with pytest.raises(BadRequest, match="the passphrase is another one, or the file was changed"):
        read(SEALED, b"a copper kez")
    with pytest.raises(ConfigError, match="the passphrase is empty"):
        read(SEALED, b"")
    file = io.BytesIO(SEALED)
    assert is_sealed(file) and file.tell() == 0 and not is_sealed(io.BytesIO(CONTENT))


def test_nothing_of_it_can_be_changed_moved_or_left_out() -> None:
    head, first, second = SEALED[:HEAD_BYTES], SEALED[HEAD_BYTES:][:WHOLE], SEALED[HEAD_BYTES + WHOLE :][:WHOLE]
    last = SEALED[HEAD_BYTES + 2 * WHOLE :]
    assert head + first + second + last == SEALED
    changed = [
        SEALED[:at] + bytes([SEALED[at] ^ 1]) + SEALED[at + 1 :] for at in (0, 8, 20, HEAD_BYTES, 5000, len(SEALED) - 1)
    ]
    moved = [
        head + second + first + last,
        head + first + last,
        head + first + second,
        head + last,
        head + first * 2 + last,
    ]
    cut = [SEALED[:at] for at in (0, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 2, len(SEALED) - 1)]
    for data in (*changed, *moved, *cut, SEALED + last, SEALED + b"\0"):
        with pytest.raises(BadRequest, match="nothing has changed: "):
            read(data)


def test_it_is_read_as_a_stream() -> None:
    plain = Plain(io.BytesIO(SEALED), KEY)
    assert plain.read(0) == b"" and plain.read(5) == CONTENT[:5]
    found = bytearray(CONTENT[:5])
    while piece := plain.read(700_001):
        found += piece
    assert found == CONTENT and plain.read(1) == b""
    assert read(b"".join(sealed((), KEY))) == b""
