"""The entries of a cache by namespace, key and slot, and what of them is pinned.

Owns the slots: small numbers, used again when free, under which the manager's order knows entries; so are the groups, a
number for each namespace. Does not know limits, time, or who leaves. One thread at a time.
Invariants: an entry is in the trie of its namespace under its whole key; a namespace without entries is gone; sums of
bytes are those of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rekindle.cache.library.entries import CacheEntry
from rekindle.cache.trie.keys import Keys, SpelledKey, key_kind
from rekindle.cache.trie.radix import RadixTrie

P = TypeVar("P")


class Space:
    """One namespace: the slots of its entries by key, its group, and how many are pinned."""

    __slots__ = ("group", "num_pinned", "trie")

    def __init__(self, keys: Keys, group: int) -> None:
        self.trie: RadixTrie[int] = RadixTrie(keys)
        self.group = group
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self.trie)


class EntryStore(Generic[P]):
    """Entries under keys of one kind; those of one namespace never meet another's."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._spaces: dict[str, Space] = {}
        self._entries: dict[int, CacheEntry[P]] = {}
        self._free_slots: list[int] = []
        self._free_groups: list[int] = []
        self.num_groups = 0  # that there ever were at once
        self.pinned: set[int] = set()
        self.num_bytes = 0
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, slot: int) -> CacheEntry[P]:
        return self._entries[slot]

    def space(self, namespace: str) -> Space | None:
        """The namespace; None while it has no entry."""
        return self._spaces.get(namespace)

    def slots(self, namespace: str | None) -> list[int]:
        """The slots of a namespace, or of all (None)."""
        return [slot for slot, entry in self._entries.items() if namespace in (None, entry.namespace)]

    def find(self, key: SpelledKey, namespace: str) -> int | None:
        """The slot of the entry of exactly this key; O(its length)."""
        space = self._spaces.get(namespace)
        return None if space is None else space.trie.get(key)

    def nearest(self, key: SpelledKey, namespace: str) -> tuple[int, int | None]:
        """How much of the key the nearest entry begins with, and its slot; (0, None) where none begins as it does.

        Of several the one of exactly this key, else the most recently used.
        """
        space = self._spaces.get(namespace)
        if space is None:
            return 0, None
        matched, slot = space.trie.find_longest_prefix(key)
        exact = space.trie.get(key) if matched == len(key) else None
        return matched, slot if exact is None else exact

    def use(self, slot: int) -> None:
        """Make the entry the most recently used of its namespace."""
        entry = self._entries[slot]
        self._spaces[entry.namespace].trie.touch(entry.key)

    def put(self, entry: CacheEntry[P]) -> int:
        """Take in an entry whose key is not here; return its slot."""
        space = self._spaces.get(entry.namespace)
        if space is None:
            if not self._free_groups:
                self._free_groups.append(self.num_groups)
                self.num_groups += 1
            space = self._spaces[entry.namespace] = Space(self._keys, self._free_groups.pop())
        slot = self._free_slots.pop() if self._free_slots else len(self._entries)
        self._entries[slot] = entry
        self.num_bytes += entry.num_bytes
        space.trie.insert(entry.key, slot)
        return slot

    def replace(self, slot: int, entry: CacheEntry[P]) -> None:
        """Put an entry in the place of one with the same key, as the most recently used."""
        grown = entry.num_bytes - self._entries[slot].num_bytes
        self._entries[slot] = entry
        self.num_bytes += grown
        self.pinned_bytes += grown if slot in self.pinned else 0
        self.use(slot)

    def drop(self, slot: int) -> CacheEntry[P]:
        """Take an entry out, pinned or not."""
        if slot in self.pinned:
            self.unpin(slot)
        entry = self._entries.pop(slot)
        self.num_bytes -= entry.num_bytes
        self._free_slots.append(slot)
        space = self._spaces[entry.namespace]
        space.trie.remove(entry.key)
        if not len(space):
            del self._spaces[entry.namespace]
            self._free_groups.append(space.group)
        return entry

    def pin(self, slot: int) -> None:
        """Count an entry as pinned that was not."""
        self.pinned.add(slot)
        self.pinned_bytes += self._entries[slot].num_bytes
        self._spaces[self._entries[slot].namespace].num_pinned += 1

    def unpin(self, slot: int) -> None:
        """Count a pinned entry as pinned no more."""
        self.pinned.remove(slot)
        self.pinned_bytes -= self._entries[slot].num_bytes
        self._spaces[self._entries[slot].namespace].num_pinned -= 1

    def check(self, digest_of: Callable[[bytes], bytes]) -> None:
        """Derive slots, groups, pins and bytes anew, and each content key with `digest_of`."""
        found: dict[int, str] = {}
        for namespace, space in self._spaces.items():
            space.trie.check()
            found |= dict(self._checked(namespace, space, digest_of))
            num_pinned = sum(found[slot] == namespace for slot in self.pinned & found.keys())
            assert num_pinned == space.num_pinned, f"{namespace!r}: {num_pinned} pinned, counted {space.num_pinned}"
        assert found.keys() == self._entries.keys(), f"{len(found)} slots in tries, {len(self._entries)} entries"
        slots = sorted([*self._entries, *self._free_slots])
        assert slots == list(range(len(slots))), "a slot is lost, or used and free at once"
        groups = sorted([*(space.group for space in self._spaces.values()), *self._free_groups])
        assert groups == list(range(self.num_groups)), "a group is lost, or used and free at once"
        num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        assert num_bytes == self.num_bytes, f"{num_bytes} bytes, counted {self.num_bytes}"
        assert self.pinned <= self._entries.keys(), "something is pinned that is not here"
        pinned_bytes = sum(self._entries[slot].num_bytes for slot in self.pinned)
        assert pinned_bytes == self.pinned_bytes, f"{pinned_bytes} bytes are pinned, counted {self.pinned_bytes}"

    def _checked(self, namespace: str, space: Space, digest_of: Callable[[bytes], bytes]) -> Iterator[tuple[int, str]]:
        """Slots of one namespace with its name, each after its entry was checked."""
        assert len(space), f"namespace {namespace!r} is kept without an entry"
        kind = key_kind(self._keys)
        for key, slot in space.trie.items():
            entry, data = self._entries[slot], kind.to_bytes(key)
            where = f"slot {slot} of {namespace!r}"
            assert entry.namespace == namespace, f"{where}: its entry is of {entry.namespace!r}"
            assert kind.to_bytes(entry.key) == data, f"{where}: its entry has another key"
            assert entry.content_key == digest_of(data), f"{where}: the content key is another key's"
            yield slot, namespace
