"""Encryption and names of objects: a reader of the bucket learns sizes and times, no text and no KV.

AES-256-GCM under a key derived from the store's secret, which all replicas share. An object is bound to its name: one
that was copied to another name does not open, like any that was changed.

    | magic | nonce [12] | ciphertext | tag [16] |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.store.files import ciphers
from rekindle.store.files.ciphers import Changed, Sealing, derived_key

MAGIC = b"RKTIER1\n"
OVERHEAD = len(MAGIC) + ciphers.OVERHEAD
BLOCKS, HEADS, PURGED = "blocks", "heads", "purged"


@dataclass(frozen=True, slots=True)
class Version:
    """What an object store calls one content of an object."""

    e_tag: str
    version: str | None


class BadObject(Exception):
    """The bytes are not what was written under this name with this secret; `version` is theirs, where it is known."""

    version: Version | None = None


class Sealer:
    """Seals and opens objects, and derives names that do not show what they name. Any thread."""

    def __init__(self, secret: bytes) -> None:
        missing = "tier needs packages that are not installed: pip install 'rekindle[tier]'"
        self._sealing = Sealing(derived_key(secret, b"rekindle.seal"), missing=missing)
        self._name_key = derived_key(secret, b"rekindle.names")

    def seal(self, name: str, data: bytes) -> bytes:
        """Return `data` encrypted for the object `name`."""
        return MAGIC + self._sealing.seal(data, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """Return the data of the object `name`; BadObject if any bit of it, its name or the secret is another."""
        if sealed[: len(MAGIC)] != MAGIC or len(sealed) < OVERHEAD:
            raise BadObject("no object of this tier")
        try:
            return self._sealing.open(sealed[len(MAGIC) :], name.encode())
        except Changed:
            raise BadObject("changed, or written under another name or with another secret") from None

    def digest(self, *fields: str) -> str:
        """Return a name for these fields, the same on every replica: 32 hexadecimal digits."""
        digest = hashlib.blake2b(key=self._name_key, digest_size=16)
        for field in fields:
            data = field.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()


# Names of objects below a model's prefix. They do not show which agent or text they belong to.
#
# blocks/HASH.PART    a record of the store, as it is
# heads/DIGEST        an agent's head
# purged/DIGEST       that an agent was purged; its head says when


def block_name(block_hash: BlockHash, part: int) -> str:
    """Return the name of a part of a block."""
    return f"{BLOCKS}/{block_hash.hex()}.{part}"


def head_name(sealer: Sealer, namespace: str, agent: str) -> str:
    """Return the name of an agent's head."""
    return f"{HEADS}/{sealer.digest(namespace, agent)}"


def purged_name(sealer: Sealer, namespace: str, agent: str) -> str:
    """Return the name of the note that an agent was purged."""
    return f"{PURGED}/{sealer.digest(namespace, agent)}"
