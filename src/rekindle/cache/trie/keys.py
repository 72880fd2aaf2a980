"""Kinds of keys (token ids, bytes, text): how each is encoded as bytes, and where its units begin in them.

Owns the encoding and what counts as a key. Knows no trie.
Invariants: two keys of a kind are equal exactly when their bytes are; a unit (an id, a byte, a character) is a whole
number of bytes, determined by the first of them, and no unit is a prefix of another.

    ids    u32 little-endian, 4 bytes each
    bytes  as they are
    text   UTF-8, lone surrogates included, 1 to 4 bytes each
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from rekindle.cache.blocks.hashing import Ids, TokenIds, encoded_ids

Keys = Literal["ids", "bytes", "text"]
Key = Ids | bytes | str
NormalizedKey = TokenIds | bytes | str


class KeyKind(Protocol):
    """Encoding and decoding of keys of one kind."""

    widths: bytes  # [256] length of a unit in bytes, by its first byte

    def to_bytes(self, key: object) -> bytes:
        """Encode a key; TypeError or ValueError, with a message on what is expected, for any other object."""

    def from_bytes(self, data: bytes) -> NormalizedKey:
        """Decode a key; ids are returned as a read-only array."""

    def floor(self, data: bytes, length: int) -> int:
        """Return the largest number of bytes up to `length` that does not split a unit of `data`."""

    def count(self, data: bytes, length: int) -> int:
        """Return the number of units in the first `length` bytes; `length` must not split one."""


class IdKeys:
    """Sequences of ints in 0..2**32-1, or integer arrays [n]."""

    widths = bytes([4]) * 256

    def to_bytes(self, key: object) -> bytes:
        return encoded_ids(key)

    def from_bytes(self, data: bytes) -> TokenIds:
        return np.frombuffer(data, dtype="<u4")

    def floor(self, data: bytes, length: int) -> int:
        return length & ~3

    def count(self, data: bytes, length: int) -> int:
        return length >> 2


class ByteKeys:
    """`bytes`, bytearray or memoryview."""

    widths = bytes([1]) * 256

    def to_bytes(self, key: object) -> bytes:
        if isinstance(key, bytes):
            return key
        if isinstance(key, (bytearray, memoryview)):
            return bytes(key)
        raise TypeError(f"a key of bytes is bytes, not {type(key).__name__}")

    def from_bytes(self, data: bytes) -> bytes:
        return data

    def floor(self, data: bytes, length: int) -> int:
        return length

    def count(self, data: bytes, length: int) -> int:
        return length


class TextKeys:
    """`str`; units are its characters (code points)."""

    widths = bytes([1] * 0xC0 + [2] * 0x20 + [3] * 0x10 + [4] * 0x10)

    def to_bytes(self, key: object) -> bytes:
        if not isinstance(key, str):
            raise TypeError(f"a key of text is a str, not {type(key).__name__}")
        return key.encode("utf-8", "surrogatepass")

    def from_bytes(self, data: bytes) -> str:
        return data.decode("utf-8", "surrogatepass")

    def floor(self, data: bytes, length: int) -> int:
        while length < len(data) and data[length] & 0xC0 == 0x80:
            length -= 1
        return length

    def count(self, data: bytes, length: int) -> int:
        return len(self.from_bytes(data[:length]))


KINDS: dict[Keys, KeyKind] = {"ids": IdKeys(), "bytes": ByteKeys(), "text": TextKeys()}


def key_kind(keys: Keys) -> KeyKind:
    """Return the kind with this name; ValueError, listing the valid names, for another."""
    if keys not in KINDS:
        raise ValueError(f"keys are {', '.join(map(repr, KINDS))}, not {keys!r}")
    return KINDS[keys]
