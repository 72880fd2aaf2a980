"""Token ids and block hashes: BLAKE2b-256, chained over everything that must agree before KV may be shared.

Owns what counts as ids and their only encoding, consecutive u32 little-endian, the three digests and their input
layout, and the identity of a block, which every tier passes along with its bytes or their location. The digests
identify data on disk, so they never change. A hash identifies token ids, not bytes of KV; code that finds a block by
hash still compares the ids.

    root = H("rekindle.root";  fingerprint, namespace, cache_salt, secret: each a u64 length, then its bytes)
    full = H("rekindle.block"; parent, ids as u32)        the first block's parent is the root, integers little-endian
    tail = H("rekindle.tail";  parent, ids as u32)        fewer ids than a block holds
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
from numpy import ndarray

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 32

# Copied for every hash: with digest size and person preset, hashing a block of 16 tokens takes two thirds of the time.
_BLOCK = blake2b(digest_size=HASH_BYTES, person=b"rekindle.block")
_TAIL = blake2b(digest_size=HASH_BYTES, person=b"rekindle.tail")
TokenIds = npt.NDArray[np.uint32]
Ids = TokenIds | npt.NDArray[np.integer[Any]] | Sequence[int]  # all values in 0..MAX_ID

MAX_ID = 2**32 - 1
_U32 = np.dtype("<u4")


def token_ids(ids: Ids) -> TokenIds:
    """Return ids as an array u32 [n], the argument itself if it is one; ValueError for anything but ids."""
    given: Any = ids
    if type(given) is ndarray and given.dtype is _U32 and given.ndim == 1:
        return given
    try:
        return np.frombuffer(encoded_ids(ids), _U32)
    except TypeError as error:
        raise ValueError(str(error)) from None


def id_bytes(ids: Ids) -> bytes:
    """Return the encoding by which ids are hashed, compared and stored; ValueError for anything but ids."""
    given: Any = ids
    try:  # nearly always an array; checking its type would cost a twentieth of a `BlockPool.find`
        if given.dtype is _U32 and given.ndim == 1:
            data: bytes = given.tobytes()
            return data
    except AttributeError:
        pass
    return token_ids(ids).tobytes()


def encoded_ids(ids: object) -> bytes:
    """As `id_bytes`, for any object: TypeError for anything but ids, ValueError for an id outside u32."""
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview)):
        return _pack(ids)
    if hasattr(ids, "__array__"):
        return _array_bytes(np.asarray(ids))
    raise TypeError(f"token ids are a sequence of ints or an integer array [n], not {type(ids).__name__}")


def _pack(ids: Sequence[int]) -> bytes:
    """Encode as u32: the array module converts ints in C, in a third of the time numpy takes for a list."""
    try:
        packed = array("I", ids)
    except OverflowError:
        raise ValueError(f"ids lie in 0..{MAX_ID}, {_first_outside(ids)} does not") from None
    except TypeError as error:
        raise TypeError(f"token ids are ints only: {error}") from None
    assert packed.itemsize == 4, f"an unsigned int has {packed.itemsize} bytes here"
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_outside(ids: Sequence[object]) -> object:
    return next((id_ for id_ in ids if isinstance(id_, int) and not 0 <= id_ <= MAX_ID), "one of these")


def _array_bytes(ids: npt.NDArray[Any]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(f"an array of ids has integers and one dimension, not {ids.dtype} {list(ids.shape)}")
    outside = ids[(ids < 0) | (ids > MAX_ID)] if ids.dtype.itemsize > 4 or ids.dtype.kind == "i" else ids[:0]
    if outside.size:
        raise ValueError(f"ids lie in 0..{MAX_ID}, {outside[0]} does not")
    return ids.astype("<u4", copy=False).tobytes()


def root_hash(*, fingerprint: bytes, namespace: str, cache_salt: str, secret: bytes) -> BlockHash:
    """Return the parent hash of all first blocks of one namespace, salt and store, under one fingerprint."""
    digest = blake2b(digest_size=HASH_BYTES, person=b"rekindle.root")
    for part in (fingerprint, namespace.encode(), cache_salt.encode(), secret):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockHash(digest.digest())


def block_hash(parent: BlockHash, ids: Ids) -> BlockHash:
    """Return the hash of the full block that holds `ids` after `parent`."""
    return _chained(_BLOCK, parent, id_bytes(ids))


def tail_hash(parent: BlockHash, ids: Ids) -> BlockHash:
    """Return the hash of the partial block that holds `ids` after `parent`; never equal to a full block's hash."""
    return _chained(_TAIL, parent, id_bytes(ids))


def chain_hashes(root: BlockHash, ids: Ids, block_tokens: int) -> list[BlockHash]:
    """Return the hashes of all full blocks of `ids`, in order; ids of a partial last block are ignored."""
    data = memoryview(id_bytes(ids))
    step = 4 * block_tokens
    hashes: list[BlockHash] = []
    parent = root
    new_digest = _BLOCK.copy
    _check_parent(root)
    for start in range(0, len(data) - step + 1, step):  # `_chained`, inlined
        digest = new_digest()
        digest.update(parent)
        digest.update(data[start : start + step])
        parent = BlockHash(digest.digest())
        hashes.append(parent)
    return hashes


def _chained(kind: blake2b, parent: BlockHash, data: bytes | memoryview) -> BlockHash:
    _check_parent(parent)
    digest = kind.copy()
    digest.update(parent)
    digest.update(data)
    return BlockHash(digest.digest())


def _check_parent(parent: BlockHash) -> None:
    if len(parent) != HASH_BYTES:
        raise ValueError(f"a parent has {HASH_BYTES} bytes, not {len(parent)}")


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """A full block or a tail of one chain.

    `parent` is the hash of the block before it, or `root` for the first block. `ids` are uint32 [num_tokens] and must
    not be changed.
    """

    hash: BlockHash
    parent: BlockHash
    root: BlockHash
    ids: TokenIds = field(compare=False)  # covered by the hash

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the block holds."""
        return len(self.ids)
