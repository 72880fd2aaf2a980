"""Ciphers of what is at rest and in object stores: AES-256 in GCM, and in SIV where equal values have to stay equal.

Owns which algorithms are used and how keys for one purpose follow from another; knows no file. A value is bound to
where it belongs (`bound`): in another place, under another key or with any bit changed it does not open.

    GCM    nonce [12] | ciphertext | tag [16]     a new random nonce each time: equal values look different
    SIV    tag [16] | ciphertext of a byte and it RFC 5297: equal values look equal, so that they can be searched
"""

from __future__ import annotations

import hashlib
import secrets

from rekindle.errors import ConfigError

KEY_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16
OVERHEAD = NONCE_BYTES + TAG_BYTES
_FIRST = b"="
_PACKAGE = "encryption at rest needs a package that is not installed: pip install 'rekindle[encryption]'"


class Changed(ValueError):
    """The bytes are not what was sealed here with this key."""


class Sealing:
    """Seals values under one key [32], and opens them. `missing`: the error without the package. Any thread."""

    def __init__(self, key: bytes, *, missing: str = _PACKAGE) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(missing) from error
        self._cipher = AESGCM(key)
        self._changed = InvalidTag

    def seal(self, value: bytes, bound: bytes) -> bytes:
        """Return the value encrypted, `OVERHEAD` bytes longer. About 2 µs for a short one."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, value, bound)

    def open(self, sealed: bytes, bound: bytes) -> bytes:
        """Return the value; Changed if it is another one."""
        return self.open_at(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound)

    def seal_at(self, nonce: bytes, value: bytes, bound: bytes) -> bytes:
        """Return the value encrypted under a nonce [12] that this key has for nothing else."""
        return self._cipher.encrypt(nonce, value, bound)

    def open_at(self, nonce: bytes, sealed: bytes, bound: bytes) -> bytes:
        """Return what was sealed under this nonce; Changed if it is another value."""
        if len(nonce) != NONCE_BYTES or len(sealed) < TAG_BYTES:
            raise Changed("too short")
        try:
            return self._cipher.decrypt(nonce, sealed, bound)
        except self._changed:
            raise Changed("changed, of another place, or under another key") from None


class Matching:
    """Encrypts values under one key [32] so that equal ones stay equal, and opens them. Any thread."""

    def __init__(self, key: bytes) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        except ImportError as error:
            raise ConfigError(_PACKAGE) from error
        self._cipher = AESSIV(derived_key(key, b"rekindle.siv1") + derived_key(key, b"rekindle.siv2"))
        self._changed = InvalidTag

    def match(self, value: bytes) -> bytes:
        """Return what always stands for the value, 17 bytes longer."""
        return self._cipher.encrypt(_FIRST + value, None)  # SIV takes no empty value

    def open(self, matched: bytes) -> bytes:
        """Return the value; Changed if none has these bytes."""
        if len(matched) <= TAG_BYTES:
            raise Changed("too short")
        try:
            return self._cipher.decrypt(matched, None)[len(_FIRST) :]
        except self._changed:
            raise Changed("changed, or under another key") from None


def derived_key(key: bytes, person: bytes) -> bytes:
    """Return a key [32] for one purpose; the given one has 32 random bytes, so no slow derivation is needed."""
    return hashlib.blake2b(key, digest_size=KEY_BYTES, person=person).digest()
