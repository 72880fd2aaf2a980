"""Find the child of a parent that shares the most leading ids with a query, in arrays.

Owns the parent of each block, by number, and one bit tree per set of siblings. The ids belong to the rows; which hash a
parent's number stands for is owned elsewhere.
Invariants: no two siblings hold the same ids; places increase along every path down; n siblings have n - 1 forks.

A tree (a crit-bit tree, after Morrison's PATRICIA, 1968) forks only where siblings differ: descending by the bits of
the query ends at a sibling that shares as many ids with it as any, and one comparison counts them. The cost is the
forks passed, about log2 of the siblings if their ids are spread out, not the number of siblings. Each fork stores the
last block added below it, so that ties go to the newest: using an old one would keep it from being evicted.

    place  bits in id order; each byte's bits are preceded by a presence bit, so that a tail sorts before any longer
           sibling: byte of the ids << 4 | 0 for presence, or 1 + bit of the byte
    links  left and right of each fork at 2 * fork, then the top of each parent's tree. >= 0: a fork, < 0: the block
           ~link, EMPTY: a parent without children
"""

from __future__ import annotations

from array import array

from rekindle.cache.blocks.columns import ID_BYTES, IdRows

NO_PARENT = -1
EMPTY = 2**31 - 1


class ChildIndex:
    """Up to `num_blocks` blocks, each with one parent; parents are numbers from 0, without a limit."""

    def __init__(self, num_blocks: int, rows: IdRows) -> None:
        self._rows = rows
        self._parents = array("i", [NO_PARENT]) * num_blocks
        self._stamps = array("q", [0]) * num_blocks  # in the order in which blocks were added
        self._num_added = 0
        self._places = array("i", [0]) * num_blocks  # of forks
        self._latest = array("i", [0]) * num_blocks  # of forks: the block below that was added last
        self._links = array("i", [EMPTY]) * (3 * num_blocks)
        self._tops = 2 * num_blocks  # where parents begin in `links`
        self._spare = array("i")  # freed forks
        self._num_forks = 0  # ever taken

    @property
    def nbytes(self) -> int:
        ints = self._parents, self._places, self._latest, self._links, self._spare
        return 8 * len(self._stamps) + sum(4 * len(one) for one in ints)

    def parent(self, block: int) -> int:
        """Return the block's parent, -1 if it has none."""
        return self._parents[block]

    def has_children(self, parent: int) -> bool:
        where = self._tops + parent
        return where < len(self._links) and self._links[where] != EMPTY

    def find(self, parent: int, data: bytes) -> tuple[int, int] | None:
        """Return the child with the most leading ids in common with `data`, and how many; None without children.

        Ties go to the one added last.
        """
        if not self.has_children(parent):
            return None
        place = _first_difference(data, self._rows.data(self._nearest(parent, data)))
        num_common = (len(data) if place < 0 else place >> 4) // ID_BYTES
        link, end = self._links[self._tops + parent], num_common * ID_BYTES << 4
        while link >= 0 and self._places[link] < end:
            link = self._links[2 * link + _bit(data, self._places[link])]
        return self._latest_below(link), num_common

    def add(self, block: int, parent: int) -> bool:
        """Add a block as a child, by the ids in its row; False, with no effect, if a sibling has the same ids."""
        assert self._parents[block] == NO_PARENT, f"block {block} has a parent already"
        if not self.has_children(parent):
            self._set_top(parent, ~block)
        else:
            data = self._rows.data(block)
            place = _first_difference(data, self._rows.data(self._nearest(parent, data)))
            if place < 0:
                return False
            self._fork(parent, block, data, place)
        self._parents[block] = parent
        self._num_added += 1
        self._stamps[block] = self._num_added
        return True

    def remove(self, block: int) -> None:
        """Remove a block from its parent; its ids must still be in its row."""
        parent = self._parents[block]
        assert parent >= 0, f"block {block} has no parent"
        self._parents[block] = NO_PARENT
        links, places = self._links, self._places
        above, where = NO_PARENT, self._tops + parent
        if links[where] == ~block:
            links[where] = EMPTY
            return
        data, way = self._rows.data(block), []
        while (link := links[where]) >= 0:
            above, where = where, 2 * link + _bit(data, places[link])
            way.append(link)
        assert link == ~block, f"block {block} is not where its ids lead"
        links[above] = links[where ^ 1]
        self._spare.append(way.pop())
        while way and self._latest[way[-1]] == block:
            fork = way.pop()
            self._latest[fork] = self._later_below(fork)

    def check(self) -> None:
        """Assert that every block is found once by its ids, and that no fork is lost."""
        num_blocks = num_forks = 0
        for parent, top in enumerate(self._links[self._tops :]):
            pending = [(top, -1)] if top != EMPTY else []
            while pending:
                link, above = pending.pop()
                if link >= 0:
                    num_forks += 1
                    place = self._places[link]
                    assert place > above, f"fork {link}: place {place} is not after {above}"
                    latest = self._later_below(link)
                    assert latest == self._latest[link], f"fork {link}: {latest} is latest, not {self._latest[link]}"
                    pending += [(below, place) for below in self._links[2 * link : 2 * link + 2]]
                    continue
                num_blocks += 1
                assert self._parents[~link] == parent, f"block {~link} is in the tree of {parent}, not its parent"
                nearest = self._nearest(parent, self._rows.data(~link))
                assert nearest == ~link, f"the ids of block {~link} lead to block {nearest}"
        num_children = len(self._parents) - self._parents.count(NO_PARENT)
        assert num_blocks == num_children, f"{num_blocks} blocks are in trees, {num_children} have a parent"
        num_used = self._num_forks - len(self._spare)
        assert num_forks == num_used, f"{num_forks} forks are in trees, {num_used} are in use"

    def _set_top(self, parent: int, link: int) -> None:
        missing = self._tops + parent + 1 - len(self._links)
        if missing > 0:
            self._links.extend([EMPTY] * missing)
        self._links[self._tops + parent] = link

    def _nearest(self, parent: int, data: bytes) -> int:
        link = self._links[self._tops + parent]
        while link >= 0:
            link = self._links[2 * link + _bit(data, self._places[link])]
        return ~link

    def _latest_below(self, link: int) -> int:
        return self._latest[link] if link >= 0 else ~link

    def _later_below(self, fork: int) -> int:
        left, right = (self._latest_below(link) for link in self._links[2 * fork : 2 * fork + 2])
        return left if self._stamps[left] > self._stamps[right] else right

    def _fork(self, parent: int, block: int, data: bytes, place: int) -> None:
        """Insert a block into the tree at `place`, where its ids differ from all others."""
        links, places = self._links, self._places
        where = self._tops + parent
        while (link := links[where]) >= 0 and places[link] < place:
            self._latest[link] = block
            where = 2 * link + _bit(data, places[link])
        fork, side = self._take_fork(), _bit(data, place)
        places[fork], self._latest[fork] = place, block
        links[2 * fork + side] = ~block
        links[2 * fork + 1 - side] = link
        links[where] = fork

    def _take_fork(self) -> int:
        if self._spare:
            return self._spare.pop()
        self._num_forks += 1
        return self._num_forks - 1


def _bit(data: bytes, place: int) -> int:
    byte, bit = place >> 4, place & 15
    if byte >= len(data):
        return 0
    return data[byte] >> (bit - 1) & 1 if bit else 1


def _first_difference(a: bytes, b: bytes) -> int:
    """Return the first place where the ids differ or one ends; -1 if they are equal."""
    if a == b:
        return -1
    shorter = min(len(a), len(b))
    differing = int.from_bytes(a[:shorter], "little") ^ int.from_bytes(b[:shorter], "little")
    if not differing:
        return shorter << 4
    bit = (differing & -differing).bit_length() - 1
    return bit >> 3 << 4 | (bit & 7) + 1
