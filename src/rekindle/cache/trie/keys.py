"""Kinds of keys: token ids, bytes, text; how each is spelled as bytes, and where in them its units begin.

Owns the spelling and what counts as a key. Knows no trie.
Invariants: two keys of a kind are equal exactly when their bytes are; a unit (an id, a byte, a character) is a whole
number of bytes, told by the first of them, and no unit is the beginning of another.

    ids    u32 little-endian, 4 bytes each
    bytes  as they are
    text   UTF-8, lone surrogates included, 1 to 4 bytes each
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from rekindle.cache.blocks.token_ids import Ids, TokenIds, encoded_ids

Keys = Literal["ids", "bytes", "text"]
Key = Ids | bytes | str
SpelledKey = TokenIds | bytes | str


class KeyKind(Protocol):
    """How keys of one kind become bytes and are found again in them."""

    widths: bytes  # [256] bytes of a unit, by its first byte

    def to_bytes(self, key: object) -> bytes:
        """Spell a key. TypeError or ValueError, which say what is expected, for what is no key of this kind."""

    def from_bytes(self, data: bytes) -> SpelledKey:
        """Return the key that is spelled so; ids come as a read-only array."""

    def floor(self, data: bytes, length: int) -> int:
        """Return the largest number of bytes up to `length` that ends no unit of `data` in its middle."""

    def count(self, data: bytes, length: int) -> int:
        """Return how many units the first `length` bytes are; `length` ends none in its middle."""


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
    """`bytes`, or what holds bytes: bytearray, memoryview."""

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
    """Return the kind of this name; ValueError, with the names there are, for another."""
    if keys not in KINDS:
        raise ValueError(f"keys are {', '.join(map(repr, KINDS))}, not {keys!r}")
    return KINDS[keys]
