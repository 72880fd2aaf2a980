"""Columns of a pool, in arrays: slots by hash, the token ids of blocks, the blocks that are free.

A million hashes cost some 40 bytes each, instead of an object each. A column does not know what a slot or a hash means;
the caller that puts a hash picks the slot. Invariants: a slot has at most one hash, a hash is at one slot at most. The
table does not grow.

    heads  [num_buckets]    the slot put last into each bucket, -1: none      bucket = low bits of hash(key)
    links  [num_slots]      the slot before it in the same bucket, -1: none; FREE: the slot has no hash
    hashes [num_slots, 32]

The arrays are numpy's, which requests huge pages, and are read through `memoryview` and `Struct`: for a million hashes
in random order that takes two thirds of the time of `bytearray` and `array`, and for a single int less than numpy does.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from struct import Struct

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES, TokenIds

END = -1
FREE = -2
NOT_A_HASH = -3
_hash_at = Struct(f"{HASH_BYTES}s").unpack_from
ID_BYTES = 4


def not_a_hash(value: object) -> ValueError:
    """Return the error for a value that is not a hash."""
    found = str(len(value)) if isinstance(value, bytes) else type(value).__name__
    return ValueError(f"hashes of blocks and of roots have {HASH_BYTES} bytes, not {found}")


class HashColumn:
    """`num_slots` slots, 0 to `num_slots - 1`, each with a hash of 32 bytes or none. Everything is O(1)."""

    def __init__(self, num_slots: int) -> None:
        num_buckets = 1 << (num_slots - 1).bit_length()  # one to two per slot
        self._mask = num_buckets - 1
        self._heads = np.full(num_buckets, END, np.int32).data
        self._links = np.full(num_slots, FREE, np.int32).data
        self._hashes = np.zeros(num_slots * HASH_BYTES, np.uint8).data
        self._num_hashes = 0

    def __len__(self) -> int:
        return self._num_hashes

    def __iter__(self) -> Iterator[int]:
        """Iterate over the slots that have a hash, ascending."""
        return (slot for slot, link in enumerate(self._links) if link != FREE)

    @property
    def nbytes(self) -> int:
        return self._heads.nbytes + self._links.nbytes + self._hashes.nbytes

    def find(self, key: bytes) -> int:
        """Return the slot that has this hash, -1 if none does; ValueError if `key` is not a hash."""
        hashes = self._hashes
        try:
            slot = self._heads[hash(key) & self._mask] if len(key) == HASH_BYTES else NOT_A_HASH
        except TypeError:
            slot = NOT_A_HASH
        while slot >= 0 and _hash_at(hashes, slot * HASH_BYTES)[0] != key:
            slot = self._links[slot]
        if slot < 0 and (slot == NOT_A_HASH or type(key) is not bytes):
            raise not_a_hash(key)
        return slot

    def has(self, slot: int, key: bytes) -> bool:
        """Return whether the slot, which has a hash, has this one."""
        is_same: bool = _hash_at(self._hashes, slot * HASH_BYTES)[0] == key
        return is_same

    def get(self, slot: int) -> bytes | None:
        """Return the hash of a slot; None if it has none."""
        if self._links[slot] == FREE:
            return None
        key: bytes = _hash_at(self._hashes, slot * HASH_BYTES)[0]
        return key

    def put(self, slot: int, key: bytes) -> None:
        """Give a slot without a hash one that no slot has yet."""
        assert self._links[slot] == FREE, f"slot {slot} has a hash already"
        assert len(key) == HASH_BYTES, f"a hash has {HASH_BYTES} bytes, not {len(key)}"
        bucket = hash(key) & self._mask
        self._links[slot] = self._heads[bucket]
        self._heads[bucket] = slot
        self._hashes[slot * HASH_BYTES : (slot + 1) * HASH_BYTES] = key
        self._num_hashes += 1

    def drop(self, slot: int) -> bytes:
        """Remove the hash of a slot and return it."""
        key = self.get(slot)
        assert key is not None, f"slot {slot} has no hash"
        bucket = hash(key) & self._mask
        other = self._heads[bucket]
        if other == slot:
            self._heads[bucket] = self._links[slot]
        else:
            while self._links[other] != slot:
                other = self._links[other]
            self._links[other] = self._links[slot]
        self._links[slot] = FREE
        self._num_hashes -= 1
        return key

    def check(self) -> None:
        """Assert that every slot with a hash is in its bucket once and is found by it."""
        seen: set[int] = set()
        for bucket, head in enumerate(self._heads):
            slot = head
            while slot >= 0:
                assert slot not in seen, f"slot {slot} is in a bucket twice"
                seen.add(slot)
                key = self.get(slot)
                assert key is not None and hash(key) & self._mask == bucket, f"slot {slot} is in a wrong bucket"
                assert self.find(key) == slot, f"the hash of slot {slot} is found at {self.find(key)}"
                slot = self._links[slot]
        assert seen == set(self), f"slots in buckets: {sorted(seen)}, with hashes: {list(self)}"
        assert len(seen) == self._num_hashes, f"{len(seen)} hashes, counted {self._num_hashes}"


class IdRows:
    """Up to `block_tokens` ids, as u32 little-endian, for each of `num_blocks` blocks; empty for unpublished ones."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self._row_bytes = ID_BYTES * block_tokens
        self._row_at = Struct(f"{self._row_bytes}s").unpack_from
        self._data = np.zeros(num_blocks * self._row_bytes, np.uint8).data  # [num_blocks, block_tokens]; see above
        self.lengths = np.zeros(num_blocks, np.uint32).data  # ids in each row; read-only for others

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self.lengths.nbytes

    def put(self, block: int, data: bytes) -> None:
        """Fill the row with these ids."""
        assert 0 < len(data) <= self._row_bytes and not len(data) % ID_BYTES, f"{len(data)} bytes in a row"
        start = block * self._row_bytes
        self._data[start : start + len(data)] = data
        self.lengths[block] = len(data) // ID_BYTES

    def drop(self, block: int) -> None:
        """Empty the row."""
        self.lengths[block] = 0

    def holds(self, block: int, data: bytes) -> bool:
        """Return whether the row holds exactly these ids."""
        if self.lengths[block] * ID_BYTES != len(data):
            return False
        is_same: bool = self._row_at(self._data, block * self._row_bytes)[0].startswith(data)
        return is_same

    def data(self, block: int) -> bytes:
        """Return a copy of the row's ids as bytes."""
        row: bytes = self._row_at(self._data, block * self._row_bytes)[0]
        return row[: ID_BYTES * self.lengths[block]]

    def ids(self, block: int) -> TokenIds:
        """Return a copy of the row's ids, read-only."""
        return np.frombuffer(self.data(block), dtype="<u4")


class FreeList:
    """Blocks 0 to `num_blocks - 1`, all free and untouched at first; the block freed last is allocated first.

    A flag of each says whether it may still hold bytes of an earlier user.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._is_used = bytearray(num_blocks)  # 1: allocated since `take_used` last returned it

    def __len__(self) -> int:
        return len(self._free)

    @property
    def nbytes(self) -> int:
        return 4 * len(self._is_used) + len(self._is_used)

    def pop(self) -> int:
        """Allocate a block; there must be one."""
        block = self._free.pop()
        self._is_used[block] = 1
        return block

    def append(self, block: int) -> None:
        """Free a block."""
        self._free.append(block)

    def take_used(self) -> list[int]:
        """Return the free blocks that were allocated since this last returned them."""
        used = [block for block in self._free if self._is_used[block]]
        for block in used:
            self._is_used[block] = 0
        return used

    def check(self, free: set[int]) -> None:
        """Assert that exactly these are free, and that every other one is marked as used."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert set(self._free) == free, f"free: {sorted(self._free)}, but not held or published: {sorted(free)}"
        unnoted = [block for block, used in enumerate(self._is_used) if not used and block not in free]
        assert not unnoted, f"blocks {unnoted} were allocated and are not marked as used"
