"""The entries of a cache by namespace, key and slot, and which of them are pinned.

Owns the slots: small reusable numbers by which the manager's order refers to entries; likewise the groups, one number
per namespace. Does not know limits, time, or what is evicted. One thread at a time.
Invariants: an entry is in the trie of its namespace under its whole key; a namespace without entries is removed; byte
totals are the sums over the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rekindle.cache.library.entries import CacheEntry
from rekindle.cache.trie.keys import Keys, NormalizedKey, key_kind
from rekindle.cache.trie.radix import RadixTrie

P = TypeVar("P")


class NamespaceTrie:
    """One namespace: the slots of its entries by key, its group, and how many are pinned."""

    __slots__ = ("group", "num_pinned", "trie")

    def __init__(self, keys: Keys, group: int) -> None:
        self.trie: RadixTrie[int] = RadixTrie(keys)
        self.group = group
        self.num_pinned = 0

    def __len__(self) -> int:
        return len(self.trie)


class EntryStore(Generic[P]):
    """Entries under keys of one kind; namespaces are fully separate."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._namespaces: dict[str, NamespaceTrie] = {}
        self._entries: dict[int, CacheEntry[P]] = {}
        self._free_slots: list[int] = []
        self._free_groups: list[int] = []
        self.num_groups = 0  # most namespaces ever present at once
        self.pinned: set[int] = set()
        self.num_bytes = 0
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, slot: int) -> CacheEntry[P]:
        return self._entries[slot]

    def namespace(self, namespace: str) -> NamespaceTrie | None:
        """The namespace's trie; None while it has no entry."""
        return self._namespaces.get(namespace)

    def slots(self, namespace: str | None) -> list[int]:
        """The slots of a namespace, or of all (None)."""
        return [slot for slot, entry in self._entries.items() if namespace in (None, entry.namespace)]

    def find(self, key: NormalizedKey, namespace: str) -> int | None:
        """The slot of the entry with exactly this key; O(its length)."""
        found = self._namespaces.get(namespace)
        return None if found is None else found.trie.get(key)

    def nearest(self, key: NormalizedKey, namespace: str) -> tuple[int, int | None]:
        """Length of the longest prefix of the key shared with an entry, and the entry's slot; (0, None) if none.

        Ties go to the entry with exactly this key, else to the most recently used.
        """
        found = self._namespaces.get(namespace)
        if found is None:
            return 0, None
        matched, slot = found.trie.find_longest_prefix(key)
        exact = found.trie.get(key) if matched == len(key) else None
        return matched, slot if exact is None else exact

    def use(self, slot: int) -> None:
        """Make the entry the most recently used of its namespace."""
        entry = self._entries[slot]
        self._namespaces[entry.namespace].trie.touch(entry.key)

    def put(self, entry: CacheEntry[P]) -> int:
        """Add an entry whose key is not present; return its slot."""
        found = self._namespaces.get(entry.namespace)
        if found is None:
            if not self._free_groups:
                self._free_groups.append(self.num_groups)
                self.num_groups += 1
            found = self._namespaces[entry.namespace] = NamespaceTrie(self._keys, self._free_groups.pop())
        slot = self._free_slots.pop() if self._free_slots else len(self._entries)
        self._entries[slot] = entry
        self.num_bytes += entry.num_bytes
        found.trie.insert(entry.key, slot)
        return slot

    def replace(self, slot: int, entry: CacheEntry[P]) -> None:
        """Replace the entry with the same key; the new one becomes the most recently used."""
        grown = entry.num_bytes - self._entries[slot].num_bytes
        self._entries[slot] = entry
        self.num_bytes += grown
        self.pinned_bytes += grown if slot in self.pinned else 0
        self.use(slot)

    def drop(self, slot: int) -> CacheEntry[P]:
        """Remove an entry, pinned or not."""
        if slot in self.pinned:
            self.unpin(slot)
        entry = self._entries.pop(slot)
        self.num_bytes -= entry.num_bytes
        self._free_slots.append(slot)
        found = self._namespaces[entry.namespace]
        found.trie.remove(entry.key)
        if not len(found):
            del self._namespaces[entry.namespace]
            self._free_groups.append(found.group)
        return entry

    def pin(self, slot: int) -> None:
        """Pin an unpinned entry."""
        self.pinned.add(slot)
        self.pinned_bytes += self._entries[slot].num_bytes
        self._namespaces[self._entries[slot].namespace].num_pinned += 1

    def unpin(self, slot: int) -> None:
        """Unpin a pinned entry."""
        self.pinned.remove(slot)
        self.pinned_bytes -= self._entries[slot].num_bytes
        self._namespaces[self._entries[slot].namespace].num_pinned -= 1

    def check(self, digest_of: Callable[[bytes], bytes]) -> None:
        """Assert that slots, groups, pins and bytes match recomputed ones, and content keys match `digest_of`."""
        found: dict[int, str] = {}
        for namespace, part in self._namespaces.items():
            part.trie.check()
            found |= dict(self._checked(namespace, part, digest_of))
            num_pinned = sum(found[slot] == namespace for slot in self.pinned & found.keys())
            assert num_pinned == part.num_pinned, f"{namespace!r}: {num_pinned} pinned, counted {part.num_pinned}"
        assert found.keys() == self._entries.keys(), f"{len(found)} slots in tries, {len(self._entries)} entries"
        slots = sorted([*self._entries, *self._free_slots])
        assert slots == list(range(len(slots))), "a slot is lost, or used and free at once"
        groups = sorted([*(part.group for part in self._namespaces.values()), *self._free_groups])
        assert groups == list(range(self.num_groups)), "a group is lost, or used and free at once"
        num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        assert num_bytes == self.num_bytes, f"{num_bytes} bytes, counted {self.num_bytes}"
        assert self.pinned <= self._entries.keys(), "a pinned slot has no entry"
        pinned_bytes = sum(self._entries[slot].num_bytes for slot in self.pinned)
        assert pinned_bytes == self.pinned_bytes, f"{pinned_bytes} bytes are pinned, counted {self.pinned_bytes}"

    def _checked(
        self, namespace: str, part: NamespaceTrie, digest_of: Callable[[bytes], bytes]
    ) -> Iterator[tuple[int, str]]:
        """Yield the slots of one namespace with its name, each after checking its entry."""
        assert len(part), f"namespace {namespace!r} has no entry but was not removed"
        kind = key_kind(self._keys)
        for key, slot in part.trie.items():
            entry, data = self._entries[slot], kind.to_bytes(key)
            where = f"slot {slot} of {namespace!r}"
            assert entry.namespace == namespace, f"{where}: its entry belongs to {entry.namespace!r}"
            assert kind.to_bytes(entry.key) == data, f"{where}: its entry has another key"
            assert entry.content_key == digest_of(data), f"{where}: the content key is another key's"
            yield slot, namespace
