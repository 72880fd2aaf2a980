"""Entries under byte strings, found by the longest prefix they share with a key.

Owns the entries, their order of use and the bytes they cost. Does not know what the bytes spell.
Invariants: no lookup changes the tree; below the root every node has an edge and is an entry or a fork; siblings differ
in their first byte; a node's `latest` is the most recently used entry at or below it.

Edges are compressed and compared as memory: one `startswith` per edge, and bisection on slices for the byte at which
an edge and a key part. A lookup costs the bytes compared plus the nodes passed, and never the number of entries.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")

NODE_BYTES = 400  # a node with its dict, entry and place in the order of use, beside the bytes of its edge


class _Entry(Generic[V]):
    __slots__ = ("node", "stamp", "value")

    def __init__(self, node: _Node[V], value: V, stamp: int) -> None:
        self.node = node
        self.value = value
        self.stamp = stamp


class _Node(Generic[V]):
    __slots__ = ("children", "edge", "entry", "latest", "parent")

    def __init__(self, edge: bytes, parent: _Node[V] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[int, _Node[V]] = {}
        self.entry: _Entry[V] | None = None
        self.latest: _Entry[V] | None = None

    def key(self) -> bytes:
        edges = []
        node: _Node[V] | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))

    def derive_latest(self) -> _Entry[V] | None:
        below = [child.latest for child in self.children.values()]
        return max((entry for entry in (self.entry, *below) if entry is not None), key=_stamp, default=None)


def _stamp(entry: _Entry[V]) -> int:
    return entry.stamp


def common_prefix(a: bytes, b: bytes, start: int = 0) -> int:
    """Bytes that `a[start:]` and `b` share from their first on: memory compares, log2(len(b)) slices."""
    if a.startswith(b, start):
        return len(b)
    low, high = 0, min(len(a) - start, len(b))  # the first `low` bytes agree; no more than `high` do
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low


class RadixTree(Generic[V]):
    """A compressed trie from byte strings to values; the empty string is a key like any other.

    `insert` and `touch` are uses; lookups are not. The owner bounds the tree by dropping `oldest()` while `num_bytes`
    is above its budget.
    """

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(b"", None)
        self._order: OrderedDict[_Entry[V], None] = OrderedDict()  # least recently used first
        self._clock = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: bytes) -> bool:
        return self._exact(key) is not None

    def get(self, key: bytes) -> V | None:
        """Return the value stored under exactly this key; not a use."""
        entry = self._exact(key)
        return None if entry is None else entry.value

    def longest_prefix(self, key: bytes) -> tuple[int, V | None]:
        """Return the length of the longest prefix shared with any stored key, and a value that shares it.

        Of several the most recently used one. `(0, value)` when nothing is shared, `(0, None)` when the tree is empty.
        """
        node, _, length = self._descend(key)
        return length, None if node.latest is None else node.latest.value

    def candidates(self, key: bytes, limit: int) -> list[tuple[int, V]]:
        """Return up to `limit` pairs of shared length and value, longest first, then most recently used first.

        Those that share as much as `longest_prefix` come first, then the tree is climbed. An entry that shares nothing
        is not a candidate. Costs `limit` times the nodes on the way down to an entry.
        """
        found: list[tuple[int, V]] = []
        node, start, length = self._descend(key)
        done: _Node[V] | None = None
        while length > 0 and len(found) < limit:
            found += [(length, entry.value) for entry in _recent_first(node, done, limit - len(found))]
            if node.parent is None:
                break
            done, node, length = node, node.parent, start
            start -= len(node.edge)
        return found

    def items(self) -> Iterator[tuple[bytes, V]]:
        """Iterate over all keys and values in the order of the keys' bytes; the tree must not change meanwhile."""
        pending = [(self._root, b"")]
        while pending:
            node, above = pending.pop()
            key = above + node.edge
            if node.entry is not None:
                yield key, node.entry.value
            pending += [(node.children[byte], key) for byte in sorted(node.children, reverse=True)]

    def oldest(self) -> tuple[bytes, V] | None:
        """Return the least recently used entry, None when the tree is empty."""
        entry = next(iter(self._order), None)
        return None if entry is None else (entry.node.key(), entry.value)

    def touch(self, key: bytes) -> bool:
        """Make the entry of exactly this key the most recently used; False when there is none."""
        entry = self._exact(key)
        if entry is not None:
            self._use(entry)
        return entry is not None

    def insert(self, key: bytes, value: V) -> None:
        """Store the value under the key as the most recently used entry, in place of the one there may be."""
        node, start, length = self._descend(key)
        if length < start + len(node.edge):
            node = self._split(node, length - start)
        if length < len(key):
            node = self._attach(_Node(key[length:], node))
        if node.entry is None:
            node.entry = _Entry(node, value, 0)
        node.entry.value = value
        self._use(node.entry)

    def remove(self, key: bytes) -> V | None:
        """Take the entry of exactly this key out and return its value, None when there is none.

        A node left without entry and children goes, one left with a single child is merged with it.
        """
        entry = self._exact(key)
        if entry is None:
            return None
        del self._order[entry]
        node = entry.node
        node.entry = None
        if not node.children and node.parent is not None:
            parent = node.parent
            del parent.children[node.edge[0]]
            self.num_bytes -= NODE_BYTES + len(node.edge)
            node = parent
        self._forget_latest(entry.node, entry)
        if node.parent is not None and node.entry is None and len(node.children) == 1:
            self._merge(node)
        return entry.value

    def check(self) -> None:
        """Derive order, bytes and `latest` anew, and assert that every node has a reason to exist."""
        seen: set[_Entry[V]] = set()
        num_bytes = 0
        for node in _top_down(self._root):
            where = f"node {node.key()[:40]!r}"
            if node is not self._root:
                num_bytes += NODE_BYTES + len(node.edge)
                assert node.edge, f"{where}: empty edge"
                assert node.entry is not None or len(node.children) > 1, f"{where}: neither entry nor fork"
            for byte, child in node.children.items():
                assert child.parent is node and child.edge[0] == byte, f"{where}: child under {byte} is misplaced"
            if node.entry is not None:
                seen.add(node.entry)
                assert node.entry.node is node, f"{where}: its entry belongs to another node"
            assert node.latest is node.derive_latest(), f"{where}: latest is not the most recent entry below"
        assert num_bytes == self.num_bytes, f"num_bytes is {self.num_bytes}, nodes hold {num_bytes}"
        assert seen == set(self._order), f"{len(seen)} entries in nodes, {len(self._order)} in the order of use"
        stamps = [entry.stamp for entry in self._order]
        assert stamps == sorted(set(stamps)), "the order of use disagrees with the stamps"

    def _descend(self, key: bytes) -> tuple[_Node[V], int, int]:
        """Find the node in whose edge the shared prefix ends; where that edge starts; the length shared."""
        node, start, length = self._root, 0, 0
        while length < len(key):
            child = node.children.get(key[length])
            if child is None:
                break
            node, start = child, length
            length += common_prefix(key, child.edge, length)
            if length < start + len(child.edge):
                break
        return node, start, length

    def _exact(self, key: bytes) -> _Entry[V] | None:
        node, start, length = self._descend(key)
        return node.entry if length == len(key) == start + len(node.edge) else None

    def _use(self, entry: _Entry[V]) -> None:
        self._clock += 1
        entry.stamp = self._clock
        self._order[entry] = None
        self._order.move_to_end(entry)
        node: _Node[V] | None = entry.node
        while node is not None:
            node.latest = entry
            node = node.parent

    def _forget_latest(self, node: _Node[V] | None, gone: _Entry[V]) -> None:
        while node is not None and node.latest is gone:
            node.latest = node.derive_latest()
            node = node.parent

    def _attach(self, node: _Node[V]) -> _Node[V]:
        assert node.parent is not None
        node.parent.children[node.edge[0]] = node
        self.num_bytes += NODE_BYTES + len(node.edge)
        return node

    def _split(self, node: _Node[V], length: int) -> _Node[V]:
        """Put a new node `length` bytes into the edge and return it; its `latest` comes with the use that follows."""
        upper = self._attach(_Node(node.edge[:length], node.parent))
        upper.children[node.edge[length]] = node
        node.edge, node.parent = node.edge[length:], upper
        self.num_bytes -= length
        return upper

    def _merge(self, node: _Node[V]) -> None:
        """Join a node without entry with its only child; the child stays, so entries keep their node."""
        (child,) = node.children.values()
        child.edge, child.parent = node.edge + child.edge, node.parent
        assert node.parent is not None
        node.parent.children[node.edge[0]] = child
        self.num_bytes -= NODE_BYTES


def _top_down(root: _Node[V]) -> Iterator[_Node[V]]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children.values()


def _recent_first(node: _Node[V], without: _Node[V] | None, limit: int) -> Iterator[_Entry[V]]:
    """Yield up to `limit` entries at or below `node`, most recently used first, leaving out the subtree `without`.

    Best first: a subtree is opened only when its latest entry is the next to yield.
    """
    queue: list[tuple[int, int, _Node[V]]] = []  # minus a stamp; 0: the node's own entry, 1: all its subtree
    opened: _Node[V] | None = node
    while limit > 0:
        if opened is not None:
            if opened.entry is not None:
                heapq.heappush(queue, (-opened.entry.stamp, 0, opened))
            for child in opened.children.values():
                if child is not without and child.latest is not None:
                    heapq.heappush(queue, (-child.latest.stamp, 1, child))
        if not queue:
            return
        _, is_subtree, chosen = heapq.heappop(queue)
        opened = chosen if is_subtree else None
        if opened is None and chosen.entry is not None:
            yield chosen.entry
            limit -= 1
