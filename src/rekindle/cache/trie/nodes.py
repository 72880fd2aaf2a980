"""Nodes of the radix trie: an edge below a parent, the children below it, and the entry that may end there.

Owns values derived from a node's neighbours; the trie owns the set of nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

V = TypeVar("V")


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
