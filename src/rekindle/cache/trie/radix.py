"""A radix trie: entries under keys of ids, bytes or text, found by the longest prefix they share with another key.

Owns the entries, their last uses and their memory cost. The encoding of keys as bytes is in `keys`.
Invariants: no lookup changes the trie; every edge is a whole number of units (an id, a byte, a character), so no shared
prefix ends inside one; siblings differ in their first unit; below the root every node has an edge and is an entry or a
fork; a node's `latest` is the most recently used entry at or below it, the one with the greatest stamp.

Edges are compressed and compared as memory: one `startswith` per edge, and bisection on slices for the byte at which an
edge and a key diverge. A lookup costs the bytes compared plus the nodes passed, independent of the number of entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

from rekindle.cache.trie.keys import Key, Keys, NormalizedKey, key_kind

NODE_BYTES = 214  # a node, its edge's object header, its stamp and its entry in the parent's dict
FORK_BYTES = 190  # the dict of a node with children
V = TypeVar("V")


# Nodes of the radix trie: an edge below a parent, the children below it, and the entry that may end there.
#
# Owns values derived from a node's neighbours; the trie owns the set of nodes.


class Node(Generic[V]):
    """An edge below its parent, and the entry that ends there, if any."""

    __slots__ = ("children", "edge", "latest", "parent", "stamp", "value")

    value: V  # set only while there is an entry

    def __init__(self, edge: bytes, parent: Node[V] | None) -> None:
        self.edge = edge
        self.parent = parent
        self.children: dict[bytes, Node[V]] | None = None  # by the first unit of their edges; None: a leaf
        self.latest: Node[V] | None = None
        self.stamp = 0  # of the entry's last use; 0: no entry

    def key(self) -> bytes:
        edges = []
        node: Node[V] | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return b"".join(reversed(edges))

    def below(self) -> list[Node[V]]:
        return [] if self.children is None else list(self.children.values())

    def derive_latest(self) -> Node[V] | None:
        found = self if self.stamp else None
        for child in self.below():
            if child.latest is not None and (found is None or child.latest.stamp > found.stamp):
                found = child.latest
        return found


def top_down(root: Node[V]) -> Iterator[Node[V]]:
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending += node.below()


def recent_first(node: Node[V], without: Node[V] | None, limit: int) -> Iterator[V]:
    """Yield up to `limit` values at or below `node`, most recently used first, skipping the subtree `without`.

    Best-first search: a subtree is opened only when its latest entry is the next to yield.
    """
    queue: list[tuple[int, int, Node[V]]] = []  # negated stamp; 0: the node's own entry, 1: its whole subtree
    opened: Node[V] | None = node
    while limit > 0:
        if opened is not None:
            if opened.stamp:
                heapq.heappush(queue, (-opened.stamp, 0, opened))
            for child in opened.below():
                if child is not without and child.latest is not None:
                    heapq.heappush(queue, (-child.latest.stamp, 1, child))
        if not queue:
            return
        _, is_subtree, chosen = heapq.heappop(queue)
        opened = chosen if is_subtree else None
        if opened is None:
            yield chosen.value
            limit -= 1


def common_prefix(a: bytes, b: bytes, start: int = 0) -> int:
    """Length of the common prefix of `a[start:]` and `b`: memory compares, log2(len(b)) slices."""
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


class RadixTrie(Generic[V]):
    """A compressed trie from keys of one kind to values; the empty key is allowed.

        from rekindle.cache import RadixTrie

        trie = RadixTrie("text")
        trie.insert("system, tools", 1)
        print(trie, trie.find_longest_prefix("system, rules"))

    Keys are ids (a sequence of ints, or an integer array [n]; all in u32), bytes or text; lengths are counted in ids,
    bytes or characters. A key of another kind raises TypeError, an id outside u32 ValueError, with no effect. `insert`
    and `touch` record uses; lookups do not. Nothing is evicted automatically: the owner bounds the trie by removing
    keys while `num_bytes` is above its budget. One thread at a time.
    """

    def __init__(self, keys: Keys = "ids") -> None:
        self.keys = keys
        self._kind = key_kind(keys)
        self.root: Node[V] = Node(b"", None)  # of the empty key
        self._num_entries = 0
        self._clock = 0
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"<RadixTrie keys={self.keys!r}: {len(self):,} entries, {self.num_bytes:,} bytes>"

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, key: Key) -> bool:
        return self._exact(self._kind.to_bytes(key)) is not None

    @property
    def num_bytes(self) -> int:
        """Approximate memory of edges, nodes and forks; values are not counted."""
        return self._num_bytes

    def get(self, key: Key) -> V | None:
        """Return the value stored under exactly this key, without recording a use; None if there is none."""
        node = self._exact(self._kind.to_bytes(key))
        return None if node is None else node.value

    def find_longest_prefix(self, key: Key) -> tuple[int, V | None]:
        """Return the length of the longest prefix shared with any stored key, and a value whose key shares it.

        The prefix may end inside a stored key. Ties go to the most recently used. `(0, None)` if nothing is shared.
        O(length).
        """
        data = self._kind.to_bytes(key)
        node, _, length = self._descend(data)
        if not length or node.latest is None:
            return 0, None
        return self._kind.count(data, length), node.latest.value

    def candidates(self, key: Key, limit: int) -> list[tuple[int, V]]:
        """Return up to `limit` pairs of shared length and value, longest first, then most recently used first.

        Starts at the node of `find_longest_prefix` and climbs from there. An entry that shares nothing is not a
        candidate. Costs `limit` times the nodes on the path to an entry.
        """
        found: list[tuple[int, V]] = []
        data = self._kind.to_bytes(key)
        node, start, length = self._descend(data)
        done: Node[V] | None = None
        while length > 0 and len(found) < limit:
            shared = self._kind.count(data, length)
            found += [(shared, value) for value in recent_first(node, done, limit - len(found))]
            if node.parent is None:
                break
            done, node, length = node, node.parent, start
            start -= len(node.edge)
        return found

    def items(self) -> Iterator[tuple[NormalizedKey, V]]:
        """Iterate over all keys and values, sorted by the keys' bytes; the trie must not change during iteration.

        Keys are `bytes`, `str` or a read-only array of ids (u32).
        """
        pending = [(self.root, b"")]
        while pending:
            node, above = pending.pop()
            key = above + node.edge
            if node.stamp:
                yield self._kind.from_bytes(key), node.value
            pending += [(child, key) for child in sorted(node.below(), key=lambda child: child.edge, reverse=True)]

    def touch(self, key: Key) -> bool:
        """Make the entry with exactly this key the most recently used; False if there is none."""
        node = self._exact(self._kind.to_bytes(key))
        if node is not None:
            self._use(node)
        return node is not None

    def insert(self, key: Key, value: V) -> None:
        """Store the value under the key as the most recently used entry, replacing an existing one."""
        data = self._kind.to_bytes(key)
        node, start, length = self._descend(data)
        if length < start + len(node.edge):
            node = self._split(node, length - start)
        if length < len(data):
            node = self._attach(Node(data[length:], node))
        if not node.stamp:
            self._num_entries += 1
        node.value = value
        self._use(node)

    def remove(self, key: Key) -> V | None:
        """Remove the entry with exactly this key and return its value; None if there is none.

        A node then without entry and children is removed; one with a single child is merged with it.
        """
        node = self._exact(self._kind.to_bytes(key))
        if node is None:
            return None
        value = node.value
        del node.value
        node.stamp = 0
        self._num_entries -= 1
        stays = node
        if node.children is None and node.parent is not None:
            stays = node.parent
            self._detach(node)
        self._forget_latest(stays, node)
        if stays.parent is not None and not stays.stamp and len(stays.below()) == 1:
            self._merge(stays)
        return value

    def check(self) -> None:
        """Assert that bytes, counts and `latest` match recomputed ones, and that every node is needed."""
        num_bytes = 0
        stamps: list[int] = []
        for node in top_down(self.root):
            num_bytes += self._check_node(node)
            stamps += [node.stamp] if node.stamp else []
        assert num_bytes == self._num_bytes, f"num_bytes is {self._num_bytes}, nodes hold {num_bytes}"
        assert len(stamps) == self._num_entries, f"{self._num_entries} entries, {len(stamps)} in nodes"
        assert len(set(stamps)) == len(stamps) and max(stamps, default=0) <= self._clock, (
            "stamps are not unique or exceed the clock"
        )

    def _check_node(self, node: Node[V]) -> int:
        """Assert the invariants of one node; return its bytes."""
        where = f"node {node.key()[:40]!r}"
        if node is not self.root:
            assert node.edge, f"{where}: empty edge"
            assert self._kind.floor(node.edge, len(node.edge)) == len(node.edge), f"{where}: ends inside a unit"
            assert node.stamp or len(node.below()) > 1, f"{where}: neither entry nor fork"
        assert node.children is None or node.children, f"{where}: a dict without children"
        assert bool(node.stamp) == hasattr(node, "value"), f"{where}: stamp {node.stamp} and value disagree"
        assert node.latest is node.derive_latest(), f"{where}: latest is not the most recent entry below"
        for unit, child in (node.children or {}).items():
            assert child.parent is node and self._unit(child.edge, 0) == unit, f"{where}: child {unit!r} is misplaced"
        size = NODE_BYTES + len(node.edge) if node is not self.root else 0
        return size + (FORK_BYTES if node.children else 0)

    def _unit(self, data: bytes, start: int) -> bytes:
        return data[start : start + self._kind.widths[data[start]]]

    def _descend(self, data: bytes) -> tuple[Node[V], int, int]:
        """Return the node in whose edge the shared prefix ends, that edge's start, and the shared length, in bytes."""
        node, start, length, end = self.root, 0, 0, len(data)
        widths = self._kind.widths
        while length < end and node.children is not None:
            child = node.children.get(data[length : length + widths[data[length]]])
            if child is None:
                break
            node, start, edge = child, length, child.edge
            if not data.startswith(edge, length):
                return node, start, start + self._kind.floor(edge, common_prefix(data, edge, start))
            length += len(edge)
        return node, start, length

    def _exact(self, data: bytes) -> Node[V] | None:
        node, start, length = self._descend(data)
        return node if node.stamp and length == len(data) == start + len(node.edge) else None

    def _use(self, entry: Node[V]) -> None:
        self._clock += 1
        entry.stamp = self._clock
        node: Node[V] | None = entry
        while node is not None:
            node.latest = entry
            node = node.parent

    def _forget_latest(self, node: Node[V] | None, gone: Node[V]) -> None:
        while node is not None and node.latest is gone:
            node.latest = node.derive_latest()
            node = node.parent

    def _attach(self, node: Node[V]) -> Node[V]:
        parent = node.parent
        assert parent is not None
        if parent.children is None:
            parent.children = {}
            self._num_bytes += FORK_BYTES
        parent.children[self._unit(node.edge, 0)] = node
        self._num_bytes += NODE_BYTES + len(node.edge)
        return node

    def _detach(self, node: Node[V]) -> None:
        parent = node.parent
        assert parent is not None and parent.children is not None
        del parent.children[self._unit(node.edge, 0)]
        self._num_bytes -= NODE_BYTES + len(node.edge)
        if not parent.children:
            parent.children = None
            self._num_bytes -= FORK_BYTES

    def _split(self, node: Node[V], length: int) -> Node[V]:
        """Split the edge at `length` bytes with a new node and return it; the use that follows sets its `latest`."""
        upper = self._attach(Node(node.edge[:length], node.parent))
        node.edge, node.parent = node.edge[length:], upper
        upper.children = {self._unit(node.edge, 0): node}
        self._num_bytes += FORK_BYTES - length
        return upper

    def _merge(self, node: Node[V]) -> None:
        """Merge a node without entry with its only child; the child is kept, as it may be an entry."""
        (child,) = node.below()
        assert node.parent is not None and node.parent.children is not None
        child.edge, child.parent = node.edge + child.edge, node.parent
        node.parent.children[self._unit(child.edge, 0)] = child
        self._num_bytes -= NODE_BYTES + FORK_BYTES
