"""A stream of bytes under a passphrase: who does not know it reads nothing of it and changes nothing unseen.

Owns the bytes around an agent's file that is encrypted. The key is scrypt's (RFC 7914) of the passphrase and a salt of
the stream's own; the content is cut into chunks, each sealed by AES-256-GCM under its number and whether it is the last
one, as in the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015): none can be changed, moved, left out or
cut off. A chunk is delivered once it has been authenticated.

    | "RKSEALED" | u16 version | salt [16] |  chunks: u32 length | sealed [length]

Costs of the key are constants of the version, so no file can ask for more. Memory: 64 MiB for the key, then two chunks.
"""

from __future__ import annotations

import io
import secrets
import struct
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from rekindle.errors import ConfigError
from rekindle.store.agent_file import SEALED as MAGIC
from rekindle.store.agent_file import refused
from rekindle.store.files.ciphers import KEY_BYTES, TAG_BYTES, Changed, Sealing

VERSION = 1
SALT_BYTES = 16
CHUNK = 1 << 20
COST, BLOCK_SIZE, LANES = 1 << 16, 8, 1  # of scrypt: 64 MiB, a quarter of a second
_MISSING = "a passphrase needs a package that is not installed: pip install cryptography"
_HEAD = struct.Struct("<H")
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct("<QxxxB")  # a chunk's number; 1: it is the last one
HEAD_BYTES = len(MAGIC) + _HEAD.size + SALT_BYTES


class _Cipher:
    """Seals and opens the chunks of one stream, whose head is part of what is authenticated."""

    def __init__(self, passphrase: bytes, head: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
        except ImportError as error:
            raise ConfigError(_MISSING) from error
        if not passphrase:
            raise ConfigError("the passphrase is empty")
        salt = head[-SALT_BYTES:]
        key = Scrypt(salt=salt, length=KEY_BYTES, n=COST, r=BLOCK_SIZE, p=LANES).derive(passphrase)
        self._sealing = Sealing(key, missing=_MISSING)
        self._head = head

    def seal(self, number: int, chunk: bytes, *, last: bool) -> bytes:
        """Return a chunk as it is written."""
        sealed = self._sealing.seal_at(_NONCE.pack(number, last), chunk, self._head)
        return _LENGTH.pack(len(sealed)) + sealed

    def open(self, number: int, sealed: bytes, *, last: bool) -> bytes:
        """Return the content of a chunk; BadRequest if it is not the one of this number, key and place."""
        try:
            return self._sealing.open_at(_NONCE.pack(number, last), sealed, self._head)
        except Changed:
            raise refused("the passphrase is another one, or the file was changed") from None


def sealed(pieces: Iterable[bytes], passphrase: bytes) -> Iterator[bytes]:
    """Yield the pieces encrypted. ConfigError, with the first, if that cannot be done here."""
    head = MAGIC + _HEAD.pack(VERSION) + secrets.token_bytes(SALT_BYTES)
    cipher, waiting, number = _Cipher(passphrase, head), bytearray(), 0
    yield head
    for piece in pieces:
        waiting += piece
        while len(waiting) > CHUNK:
            yield cipher.seal(number, bytes(waiting[:CHUNK]), last=False)
            del waiting[:CHUNK]
            number += 1
    yield cipher.seal(number, bytes(waiting), last=True)


def is_sealed(source: BinaryIO) -> bool:
    """Whether a file that can be rewound is encrypted; it is at its start afterwards."""
    start = source.read(len(MAGIC))
    source.seek(0)
    return start == MAGIC


def opened(source: BinaryIO, passphrase: bytes) -> Iterator[bytes]:
    """Yield the content of a sealed stream, each piece as soon as it is known to be as it was written; BadRequest."""
    head = source.read(HEAD_BYTES)
    if len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC:
        raise refused("it is not encrypted as Rekindle does: leave the passphrase out")
    (version,) = _HEAD.unpack_from(head, len(MAGIC))
    if version != VERSION:
        raise refused(f"it is encrypted in version {version}, and this Rekindle reads {VERSION}: update the older one")
    cipher, number = _Cipher(passphrase, head), 0
    chunk = _next(source)
    while chunk is not None:
        following = _next(source)
        yield cipher.open(number, chunk, last=following is None)
        chunk, number = following, number + 1
    if not number:
        raise refused("it ends too early")


def _next(source: BinaryIO) -> bytes | None:
    """Return the next sealed chunk; None at the end."""
    length = source.read(_LENGTH.size)
    if not length:
        return None
    num_bytes = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
    if not TAG_BYTES <= num_bytes <= CHUNK + TAG_BYTES:
        raise refused("it is damaged, or ends too early")
    chunk = source.read(num_bytes)
    if len(chunk) < num_bytes:
        raise refused("it ends too early")
    return chunk


class Plain(io.RawIOBase):
    """The content of a sealed file as a stream that is read once; the errors are those of `opened`."""

    def __init__(self, source: BinaryIO, passphrase: bytes) -> None:
        self._pieces = opened(source, passphrase)
        self._piece = io.BytesIO()

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes, fewer where a chunk ends; none at the end."""
        while not (found := self._piece.read(size)) and size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._piece = io.BytesIO(piece)
        return found
