"""Slots by name, in arrays: a million names cost some 40 bytes each, not an object each.

Owns which slot bears which name. Does not know what a slot or a name stands for; whoever puts a name in picks the slot.
Invariants: a slot bears one name at most, a name stands at one slot at most. The table does not grow.

    heads  [num_buckets]   the slot put last into each bucket, -1: none      bucket = hash of the name, by its low bits
    links  [num_slots]     the slot before it in the same bucket, -1: none; FREE: the slot bears no name
    names  [num_slots, 32]

The arrays are numpy's, which asks for huge pages, and are read through `memoryview` and `Struct`: of a million names at
random places that takes two thirds of the time of `bytearray` and `array`, and of a single int less than numpy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import numpy as np

from rekindle.cache.blocks.hashing import HASH_BYTES

END = -1
FREE = -2
NO_NAME = -3
_name_at = Struct(f"{HASH_BYTES}s").unpack_from


def no_name(value: object) -> ValueError:
    """The refusal of what is no name."""
    found = str(len(value)) if isinstance(value, bytes) else type(value).__name__
    return ValueError(f"names of blocks and of roots have {HASH_BYTES} bytes, not {found}")


class NameTable:
    """`num_slots` slots, 0 to `num_slots - 1`, each with a name of 32 bytes or none. Everything is O(1)."""

    def __init__(self, num_slots: int) -> None:
        num_buckets = 1 << (num_slots - 1).bit_length()  # one to two for each slot
        self._mask = num_buckets - 1
        self._heads = np.full(num_buckets, END, np.int32).data
        self._links = np.full(num_slots, FREE, np.int32).data
        self._names = np.zeros(num_slots * HASH_BYTES, np.uint8).data
        self._num_names = 0

    def __len__(self) -> int:
        return self._num_names

    def __iter__(self) -> Iterator[int]:
        """Iterate over the slots that bear a name, ascending."""
        return (slot for slot, link in enumerate(self._links) if link != FREE)

    @property
    def nbytes(self) -> int:
        return self._heads.nbytes + self._links.nbytes + self._names.nbytes

    def find(self, name: bytes) -> int:
        """Return the slot that bears the name, -1 when none does; ValueError for what is no name."""
        names = self._names
        try:
            slot = self._heads[hash(name) & self._mask] if len(name) == HASH_BYTES else NO_NAME
        except TypeError:
            slot = NO_NAME
        while slot >= 0 and _name_at(names, slot * HASH_BYTES)[0] != name:
            slot = self._links[slot]
        if slot < 0 and (slot == NO_NAME or type(name) is not bytes):
            raise no_name(name)
        return slot

    def bears(self, slot: int, name: bytes) -> bool:
        """Say whether the slot, which has a name, has this one."""
        is_same: bool = _name_at(self._names, slot * HASH_BYTES)[0] == name
        return is_same

    def name(self, slot: int) -> bytes | None:
        """Return the name of a slot, None when it has none."""
        if self._links[slot] == FREE:
            return None
        name: bytes = _name_at(self._names, slot * HASH_BYTES)[0]
        return name

    def put(self, slot: int, name: bytes) -> None:
        """Give a slot without a name one that no slot bears yet."""
        assert self._links[slot] == FREE, f"slot {slot} has a name already"
        assert len(name) == HASH_BYTES, f"a name has {HASH_BYTES} bytes, not {len(name)}"
        bucket = hash(name) & self._mask
        self._links[slot] = self._heads[bucket]
        self._heads[bucket] = slot
        self._names[slot * HASH_BYTES : (slot + 1) * HASH_BYTES] = name
        self._num_names += 1

    def drop(self, slot: int) -> bytes:
        """Take the name of a slot away, and return it."""
        name = self.name(slot)
        assert name is not None, f"slot {slot} has no name"
        bucket = hash(name) & self._mask
        other = self._heads[bucket]
        if other == slot:
            self._heads[bucket] = self._links[slot]
        else:
            while self._links[other] != slot:
                other = self._links[other]
            self._links[other] = self._links[slot]
        self._links[slot] = FREE
        self._num_names -= 1
        return name

    def check(self) -> None:
        """Assert that every named slot stands in the bucket of its name, once, and is found under it."""
        seen: set[int] = set()
        for bucket, head in enumerate(self._heads):
            slot = head
            while slot >= 0:
                assert slot not in seen, f"slot {slot} stands in a bucket twice"
                seen.add(slot)
                name = self.name(slot)
                assert name is not None and hash(name) & self._mask == bucket, f"slot {slot} is in a wrong bucket"
                assert self.find(name) == slot, f"the name of slot {slot} is found at {self.find(name)}"
                slot = self._links[slot]
        assert seen == set(self), f"slots in buckets: {sorted(seen)}, with names: {list(self)}"
        assert len(seen) == self._num_names, f"{len(seen)} names, counted {self._num_names}"
