"""A record of an encrypted store: AES-256-GCM under a key of its own, which its row of the index has and nothing else.

    seal of a record    key [32] | tag [16]        bound to the block's hash, its part and its slot

The record keeps its size and place: its ciphertext lies where it would lie, and tag and key are in the row, encrypted
with the rest of what the row says. So a record that was changed, swapped with another or put back from an earlier time
does not open, no second checksum is needed, and when the row is overwritten the record is lost, wherever a copy of its
bytes may be. Every write of a record makes a new key, so no nonce is needed.
"""

from __future__ import annotations

import secrets
import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.files.ciphers import KEY_BYTES, NONCE_BYTES, TAG_BYTES

Bytes = npt.NDArray[np.uint8]
SEAL_BYTES = KEY_BYTES + TAG_BYTES
_PLACE = struct.Struct("<IQ")
_NONCE = bytes(NONCE_BYTES)


def bound(block_hash: BlockHash, part: int, slot: int) -> bytes:
    """What a record is bound to."""
    return block_hash + _PLACE.pack(part, slot)


def sealed_record(record: Bytes, place: bytes, out: Bytes) -> bytes:
    """Write a record [n], encrypted for this place, to `out` [n]; return its seal."""
    key = secrets.token_bytes(KEY_BYTES)
    cipher = _cipher(key, "encryptor", place)
    cipher.update_into(record.data, out.data)
    cipher.finalize()
    return key + bytes(cipher.tag)


def opened_record(record: Bytes, seal: bytes, place: bytes, out: Bytes) -> bool:
    """Decrypt a record [n] to `out` [n]; False, and `out` is zeros, unless it is what was sealed for this place."""
    pieces = Pieces(seal, place)
    pieces.put(record, out)
    if pieces.is_whole():
        return True
    out[:] = 0
    return False


class Pieces:
    """Decrypts one record piece by piece; what it yields counts once the record is known to be whole."""

    def __init__(self, seal: bytes, place: bytes) -> None:
        self._is_seal = len(seal) == SEAL_BYTES
        self._tag = seal[KEY_BYTES:]
        self._cipher = _cipher(seal[:KEY_BYTES].ljust(KEY_BYTES, b"\0"), "decryptor", place)

    def put(self, piece: Bytes, out: Bytes) -> None:
        """Decrypt the next piece [n] to `out` [n]."""
        self._cipher.update_into(piece.data, out.data)

    def is_whole(self) -> bool:
        """Whether all pieces were what was sealed; after the last one."""
        if not self._is_seal:
            return False
        try:
            self._cipher.finalize_with_tag(self._tag)
        except _library().changed:
            return False
        return True


class _Library(NamedTuple):
    """What is used of `cryptography`, which only an encrypted store needs."""

    cipher: Any
    aes: Any
    mode: Any
    changed: type[Exception]


@cache
def _library() -> _Library:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return _Library(Cipher, algorithms.AES, modes.GCM(_NONCE), InvalidTag)


def _cipher(key: bytes, direction: str, place: bytes) -> Any:
    library = _library()
    cipher = getattr(library.cipher(library.aes(key), library.mode), direction)()
    cipher.authenticate_additional_data(place)
    return cipher
