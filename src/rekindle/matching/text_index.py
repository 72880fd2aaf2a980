"""Stored branches indexed by their text, within a budget of bytes.

Owns the keys of branches and one radix trie over them per namespace. Over budget, the least recently used branch of the
largest namespace loses its key and its index entry; `key` restores both. Does not know agents, nor what a key means.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rekindle.cache.trie.radix import FORK_BYTES, NODE_BYTES, RadixTrie


@dataclass(frozen=True, slots=True, eq=False)
class StoredBranch:
    """A sequence whose KV is stored: prompt and reply as computed; `canonical_tokens` equal a fresh encoding."""

    namespace: str
    agent: str | None
    branch: int
    ids: np.ndarray
    canonical_tokens: int


class TextIndex:
    """Keys of branches, found by their longest common prefix with another key. `key_of` derives a key from ids.

    `dropped` collects the branches dropped to make room or too large to fit at all; its owner takes them out.
    """

    def __init__(self, key_of: Callable[[np.ndarray], bytes], *, max_bytes: int) -> None:
        self._key_of = key_of
        self._max_bytes = max_bytes
        self.dropped: list[StoredBranch] = []
        self._keys: dict[StoredBranch, bytes] = {}
        self._by_use: dict[str, OrderedDict[StoredBranch, None]] = {}  # of a namespace, least recently used first
        self._bytes_of: Counter[str] = Counter()  # of the keys of a namespace
        self._tries: dict[str, RadixTrie[dict[StoredBranch, None]]] = {}
        self._key_bytes = 0

    def __iter__(self) -> Iterator[StoredBranch]:
        return iter(self._keys)

    def __contains__(self, branch: StoredBranch) -> bool:
        return branch in self._keys

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and tries."""
        return self._key_bytes + sum(trie.num_bytes for trie in self._tries.values())

    def key(self, branch: StoredBranch) -> bytes:
        """The branch's key; if it has none, computes it in O(its length) and indexes the branch."""
        key = self._keys.get(branch)
        return self.put(branch) if key is None else key

    def put(self, branch: StoredBranch) -> bytes:
        """Index a branch as the most recently used one, dropping others if needed; one too large is not indexed."""
        assert branch not in self._keys, "a branch is indexed once"
        key = self._key_of(branch.ids)
        if 2 * len(key) + NODE_BYTES + FORK_BYTES > self._max_bytes:
            self.dropped.append(branch)
            return key
        trie = self._tries.setdefault(branch.namespace, RadixTrie("bytes"))
        held = trie.get(key) or {}
        held[branch] = None
        trie.insert(key, held)
        self._keys[branch] = key
        self._by_use.setdefault(branch.namespace, OrderedDict())[branch] = None
        self._bytes_of[branch.namespace] += len(key)
        self._key_bytes += len(key)
        while self.num_bytes > self._max_bytes and len(self._keys) > 1:
            oldest = self._oldest(branch)
            self.drop(oldest)
            self.dropped.append(oldest)
        return key

    def _oldest(self, newest: StoredBranch) -> StoredBranch:
        """The branch to drop next; never the newest one."""
        mine = self._by_use[newest.namespace]
        others = [name for name in self._tries if name != newest.namespace or len(mine) > 1]
        largest = max(others, key=lambda name: self._bytes_of[name] + self._tries[name].num_bytes)
        return next(iter(self._by_use[largest]))

    def drop(self, branch: StoredBranch) -> None:
        """Remove a branch from the index; no effect if it is not indexed."""
        key = self._keys.pop(branch, None)
        if key is None:
            return
        self._key_bytes -= len(key)
        self._bytes_of[branch.namespace] -= len(key)
        del self._by_use[branch.namespace][branch]
        trie = self._tries[branch.namespace]
        held = trie.get(key)
        assert held is not None, "an indexed branch is in its trie"
        del held[branch]
        if not held:
            trie.remove(key)
        if not len(trie):
            del self._tries[branch.namespace], self._by_use[branch.namespace], self._bytes_of[branch.namespace]

    def use(self, branch: StoredBranch) -> None:
        """Make an indexed branch the most recently used one."""
        key = self._keys.get(branch)
        if key is not None:
            self._by_use[branch.namespace].move_to_end(branch)
            self._tries[branch.namespace].touch(key)

    def nearest(self, namespace: str, key: bytes, limit: int) -> list[tuple[int, StoredBranch]]:
        """Up to `limit` branches that share at least one byte with `key`, and how many, longest first."""
        trie = self._tries.get(namespace)
        found = trie.candidates(key, limit) if trie is not None else []
        return [(length, branch) for length, held in found for branch in reversed(held)][:limit]

    def check(self) -> None:
        """Assert that recomputed keys, tries and byte counts agree."""
        for branch, key in self._keys.items():
            assert key == self._key_of(branch.ids), f"branch {branch.branch} of {branch.agent}: not the key of its ids"
        assert self._key_bytes == sum(map(len, self._keys.values())), "key bytes are not the sum of the keys"
        in_tries: set[StoredBranch] = set()
        for namespace, trie in self._tries.items():
            trie.check()
            assert len(trie), f"namespace {namespace!r}: an empty trie was not removed"
            for entry_key, held in trie.items():
                assert held, f"namespace {namespace!r}: an entry without branches"
                for branch in held:
                    assert self._keys.get(branch) == entry_key, f"branch {branch.branch} of {branch.agent} is misplaced"
                    assert branch.namespace == namespace, (
                        f"branch {branch.branch} of {branch.agent} is in another namespace's trie"
                    )
                    in_tries.add(branch)
            assert self._bytes_of[namespace] == sum(len(self._keys[branch]) for branch in self._by_use[namespace])
        assert {branch for each in self._by_use.values() for branch in each} == set(self._keys)
        assert in_tries == set(self._keys), f"{len(in_tries)} branches in tries, {len(self._keys)} keys"
        assert self.num_bytes <= self._max_bytes or len(self._keys) == 1, f"{self.num_bytes} bytes are over budget"
