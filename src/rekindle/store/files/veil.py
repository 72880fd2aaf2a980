"""The veil over what rows say: how columns of an encrypted store's databases are encrypted.

    sealed     AES-256-GCM: equal values look different
    matched    AES-256-SIV: equal values look equal in one file, so that rows are found by them
    traced     a list of ids as a list of codes, with the same common beginnings and no order that means anything

A code of a trace is a keyed hash of everything before it: lists under one `owner` share as many leading codes as they
share ids, and so the nearest one is found by order, among ten thousand as among ten. A reader without the key learns
how much siblings share, and nothing else. Keys are derived from the data key for each kind of file. Knows no table.
"""

from __future__ import annotations

import hashlib

from rekindle.store.files.ciphers import Matching, Sealing, derived_key
from rekindle.store.files.keys import StoreKeys

ID_BYTES, CODE_BYTES = 4, 4
MOST_TRACED = 256 * ID_BYTES  # ids of a block; a longer list differs before or not at all


class Veil:
    """Encrypts and decrypts values of one kind of file. Any thread. Opening raises `ciphers.Changed`."""

    def __init__(self, data_key: bytes, file: str) -> None:
        key = hashlib.blake2b(file.encode(), digest_size=32, key=data_key, person=b"rekindle.veil").digest()
        self._sealing = Sealing(derived_key(key, b"rekindle.sealed"))
        self._matching = Matching(derived_key(key, b"rekindle.matched"))
        self._trace_key = derived_key(key, b"rekindle.traced")

    @classmethod
    def of(cls, keys: StoreKeys, file: str) -> Veil | None:
        """That of a kind of file; None if the store is clear."""
        return None if keys.data is None else cls(keys.data, file)

    def seal(self, value: bytes, bound: bytes) -> bytes:
        """Return a value that only the key opens, and only where it is bound to."""
        return self._sealing.seal(value, bound)

    def open(self, sealed: bytes, bound: bytes) -> bytes:
        """Return what was sealed."""
        return self._sealing.open(sealed, bound)

    def match(self, value: bytes) -> bytes:
        """Return what stands for a value in every row of the file."""
        return self._matching.match(value)

    def open_matched(self, matched: bytes) -> bytes:
        """Return the value that this stands for."""
        return self._matching.open(matched)

    def trace(self, owner: bytes, ids: bytes) -> bytes:
        """Return the codes of ids, u32 each, as many bytes as they have, up to `MOST_TRACED`. 1 µs for each id."""
        digest = hashlib.blake2b(owner, digest_size=CODE_BYTES, key=self._trace_key, person=b"rekindle.trace")
        codes = bytearray()
        for at in range(0, min(len(ids), MOST_TRACED), ID_BYTES):
            digest.update(ids[at : at + ID_BYTES])
            codes += digest.copy().digest()
        return bytes(codes)
