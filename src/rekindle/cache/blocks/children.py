"""Which child of a parent shares the most leading ids with what comes next, in arrays.

Owns who is whose child, by numbers, and one bit tree for each set of siblings. The ids are the rows' own; which name a
parent's number stands for is somebody else's.
Invariants: no two siblings hold the same ids; on a way down the places grow; n siblings have n - 1 forks.

A tree (a crit-bit tree, after Morrison's PATRICIA, 1968) forks only where siblings differ: to go down by the bits of
the query ends at a sibling that shares as much with it as any does, and one comparison tells how much. That costs the
forks passed, some log2 of the siblings where their ids are spread, and not the number of siblings. Each fork knows the
last added of those below, so that of equals the newest is found: to use an old one would keep it from leaving.

    place  bits are ordered as the ids are; before those of an id comes one that says whether there is such an id, so
           that a tail ends before whatever ids a longer sibling has: byte of the ids << 4 | 0, or 1 + bit of the byte
    links  left and right of each fork at 2 * fork, then the top of each parent's tree. >= 0: a fork, < 0: the block
           ~link, EMPTY: a parent without children
"""

from __future__ import annotations

from array import array

from rekindle.cache.blocks.id_column import ID_BYTES, IdRows

NOBODY = -1
EMPTY = 2**31 - 1


class ChildIndex:
    """Up to `num_blocks` blocks, each under one parent; parents are numbers from 0, as many as there may be."""

    def __init__(self, num_blocks: int, rows: IdRows) -> None:
        self._rows = rows
        self._parents = array("i", [NOBODY]) * num_blocks
        self._stamps = array("q", [0]) * num_blocks  # in the order in which blocks were added
        self._num_added = 0
        self._places = array("i", [0]) * num_blocks  # of forks
        self._latest = array("i", [0]) * num_blocks  # of forks: the last added block below
        self._links = array("i", [EMPTY]) * (3 * num_blocks)
        self._tops = 2 * num_blocks  # where parents begin in `links`
        self._spare = array("i")  # forks given back
        self._num_forks = 0  # that were ever taken

    @property
    def nbytes(self) -> int:
        ints = self._parents, self._places, self._latest, self._links, self._spare
        return 8 * len(self._stamps) + sum(4 * len(one) for one in ints)

    def parent(self, block: int) -> int:
        """Return the block's parent, -1 when it is nobody's child."""
        return self._parents[block]

    def has_children(self, parent: int) -> bool:
        where = self._tops + parent
        return where < len(self._links) and self._links[where] != EMPTY

    def find(self, parent: int, data: bytes) -> tuple[int, int] | None:
        """Return the child with the most leading ids in common with `data`, and how many; None without children.

        Of several it is the one that was added last.
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
        """Make a block a child by the ids in its row; False, and nothing happens, if a sibling has the same."""
        assert self._parents[block] == NOBODY, f"block {block} has a parent already"
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
        """Take a block from its parent; its ids must still stand in its row."""
        parent = self._parents[block]
        assert parent >= 0, f"block {block} is nobody's child"
        self._parents[block] = NOBODY
        links, places = self._links, self._places
        above, where = NOBODY, self._tops + parent
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
        """Assert that every block is found by its ids, once, and that no fork is lost."""
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
                    assert latest == self._latest[link], f"fork {link}: {latest} came last, not {self._latest[link]}"
                    pending += [(below, place) for below in self._links[2 * link : 2 * link + 2]]
                    continue
                num_blocks += 1
                assert self._parents[~link] == parent, f"block {~link} is a child of {parent} and does not know"
                nearest = self._nearest(parent, self._rows.data(~link))
                assert nearest == ~link, f"the ids of block {~link} lead to block {nearest}"
        num_children = len(self._parents) - self._parents.count(NOBODY)
        assert num_blocks == num_children, f"{num_blocks} blocks hang in trees, {num_children} have a parent"
        num_kept = self._num_forks - len(self._spare)
        assert num_forks == num_kept, f"{num_forks} forks hang in trees, {num_kept} are in use"

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
        """Hang a block into the tree where its ids leave those of all others: at `place`."""
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
    """Return the first place where the ids differ, or one ends; -1 when they are the same."""
    if a == b:
        return -1
    shorter = min(len(a), len(b))
    differing = int.from_bytes(a[:shorter], "little") ^ int.from_bytes(b[:shorter], "little")
    if not differing:
        return shorter << 4
    bit = (differing & -differing).bit_length() - 1
    return bit >> 3 << 4 | (bit & 7) + 1
