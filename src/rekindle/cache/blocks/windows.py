"""Slots for parts that end (see `rekindle.parts`), of the blocks that have them.

Owns which blocks have such a part in hot memory, and where. Does not know its bytes, nor whether the block itself is
held. Slot 0 is that of all blocks without the part: nothing is written there, and what is read there is masked.

    take ──▶ held ──last release──▶ passed, or kept once marked ──its slot is taken, or its block emptied──▶ free

What nobody holds stays readable until another block needs its slot: first what a group over its quota has, then all
others; of these first what sequences have passed, the oldest first, then what resume points need, the least recently
used first. Groups are those of the pool; a slot is in that of the block that takes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from rekindle.cache.eviction.queue import Quotas, sort_key
from rekindle.parts import EndingPart

ABSENT = 0  # the slot of a block without the part


class WindowSlots:
    """`num_slots` slots for the parts of one kind in `num_blocks` blocks.

    `slot_of` [num_blocks] is the slot of each block, `ABSENT` for those without one.
    """

    def __init__(self, kind: EndingPart, *, num_slots: int, num_blocks: int) -> None:
        self.kind = kind
        self.num_slots = num_slots
        self.slot_of = np.zeros(num_blocks, dtype=np.int32)
        self._block_of = [-1] * num_slots
        self._refs = [0] * num_slots
        self._marked = bytearray(num_slots)
        self._free = list(range(num_slots - 1, ABSENT, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._used: set[int] = set()  # free slots that may hold data
        self._quotas: Quotas | None = None  # of slots that blocks have
        self._turn, self._turns = 1, [1] * num_slots  # odd; when each was last released or marked, with quotas

    def __repr__(self) -> str:
        held = self.num_slots - 1 - self.num_available
        return (
            f"<WindowSlots of {self.num_slots:,} slots for parts {self.kind.name}: {len(self._free):,} free, "
            f"{len(self._passed):,} passed, {len(self._kept):,} kept, {held:,} held>"
        )

    @property
    def num_available(self) -> int:
        """Number of slots that nobody holds."""
        return len(self._free) + len(self._passed) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Number of slots that blocks have."""
        return self.num_slots - 1 - len(self._free)

    @property
    def num_kept(self) -> int:
        """Number of slots that resume points need and nobody holds."""
        return len(self._kept)

    def has(self, block: int) -> bool:
        """Whether the block has its part."""
        return int(self.slot_of[block]) != ABSENT

    def is_held(self, block: int) -> bool:
        """Whether the block has its part and a holder of it."""
        return self._refs[int(self.slot_of[block])] > 0

    def take(self, block: int, group: int = 0) -> bool:
        """Give a block of a group without the part a slot and hold it; False on a shortage."""
        assert not self.slot_of[block], f"block {block} has a slot"
        if self._free:
            slot = self._free.pop()
            self._used.discard(slot)
        elif self._passed or self._kept:
            slot = self._pop_unheld()
            self._put(self._block_of[slot], ABSENT)
        else:
            return False
        self._put(block, slot)
        self._marked[slot] = False
        self._refs[slot] = 1
        if self._quotas is not None:
            self._quotas.add(slot, group)
        return True

    def hold(self, block: int) -> None:
        """Add a reference to a part that is there."""
        slot = int(self.slot_of[block])
        assert slot, f"block {block} has no slot"
        if not self._refs[slot]:
            self._unheld(slot).pop(slot)
        self._refs[slot] += 1

    def release(self, block: int) -> None:
        """Drop a reference; what nobody holds stays until its slot is needed."""
        slot = int(self.slot_of[block])
        assert self._refs[slot] > 0, f"the part of block {block} is not held"
        self._refs[slot] -= 1
        if not self._refs[slot]:
            self._unheld(slot)[slot] = None
            if self._quotas is not None:
                self._line_up(slot, self._quotas)

    def mark(self, block: int) -> None:
        """Note that a resume point needs the part of a block, if it is there: it outlives those passed."""
        slot = int(self.slot_of[block])
        if slot and not self._marked[slot]:
            self._marked[slot] = True
            if not self._refs[slot]:
                self._passed.pop(slot)
                self._kept[slot] = None
                if self._quotas is not None:
                    self._line_up(slot, self._quotas)

    def touch(self, block: int) -> None:
        """Record that the part of a block is used as a resume point needs it: it is replaced last."""
        self.hold(block)
        self.mark(block)
        self.release(block)

    def move(self, source: int, target: int) -> None:
        """Let `target` have the part and the references of `source`, a block of the same content with one holder."""
        slot = int(self.slot_of[source])
        if not slot:
            return
        if not self.slot_of[target]:
            self._put(source, ABSENT)
            self._put(target, slot)
            return
        if self._marked[slot]:
            self.mark(target)
        for _ in range(self._refs[slot]):
            self.hold(target)
        if self._refs[slot]:
            self._refs[slot] = 0
        else:
            self._unheld(slot).pop(slot)
        self._empty(source, slot)

    def drop(self, block: int) -> None:
        """Free the slot of a block that is emptied."""
        slot = int(self.slot_of[block])
        if slot:
            assert not self._refs[slot], f"block {block} is emptied while its part is held"
            self._unheld(slot).pop(slot)
            self._empty(block, slot)

    def take_used_free(self) -> list[int]:
        """Return the free slots that may still hold data: those freed since this last returned them."""
        used, self._used = sorted(self._used), set()
        return used

    def set_quota(self, group: int, most: int | None) -> None:
        """Take first from a group that has more than `most` slots, held ones included; None lifts the quota."""
        if self._quotas is None:
            self._quotas = Quotas(self._key_of, self.num_slots, self.num_used)
        self._quotas.limit(group, most, lambda: [slot for slot, block in enumerate(self._block_of) if block >= 0])

    def _pop_unheld(self) -> int:
        """Remove the slot that is taken next from its queue and group; there must be one that nobody holds."""
        slot = None if self._quotas is None else self._quotas.first()
        if slot is None:
            slot, _ = (self._passed or self._kept).popitem(last=False)
        else:
            self._unheld(slot).pop(slot)
        if self._quotas is not None:
            self._quotas.remove(slot)
        return slot

    def _line_up(self, slot: int, quotas: Quotas) -> None:
        """Put a slot that nobody holds last in the queue of its group, if that has a quota."""
        self._turn += 2
        self._turns[slot] = self._turn
        quotas.put(slot)

    def _key_of(self, slot: int) -> int | None:
        return None if self._refs[slot] else sort_key(self._marked[slot], 0.0, self._turns[slot], slot)

    def _unheld(self, slot: int) -> OrderedDict[int, None]:
        """Return the queue of a slot that nobody holds."""
        return self._kept if self._marked[slot] else self._passed

    def _empty(self, block: int, slot: int) -> None:
        self._put(block, ABSENT)
        self._block_of[slot] = -1
        self._free.append(slot)
        self._used.add(slot)
        if self._quotas is not None:
            self._quotas.remove(slot)

    def _put(self, block: int, slot: int) -> None:
        self.slot_of[block] = slot
        if slot:
            self._block_of[slot] = block

    def check(self, filled: Iterable[int], groups: Mapping[int, int] | None = None) -> None:
        """Assert that both directions agree, that every slot is in one place, that parts are of `filled` blocks, and
        with quotas that each counts against the group of its block, where `groups` has that."""
        found = {slot: block for block, slot in enumerate(self.slot_of.tolist()) if slot}
        taken = {slot: block for slot, block in enumerate(self._block_of) if block >= 0}
        assert found == taken, "slots and blocks do not agree"
        held = {slot for slot, refs in enumerate(self._refs) if refs}
        queues = [*self._free, *self._passed, *self._kept, *held]
        assert sorted(queues) == list(range(1, self.num_slots)), "a slot is in no place, or in two"
        assert held | {*self._passed, *self._kept} == set(taken), "a free slot has a block"
        assert all(self._marked[slot] for slot in self._kept), "a part is kept without a mark"
        assert not any(self._marked[slot] for slot in self._passed), "a marked part counts as passed"
        assert set(taken.values()) <= set(filled), "a free block has a part"
        if self._quotas is not None:
            self._quotas.check(taken, {*self._passed, *self._kept})
            for block, group in (groups or {}).items():
                counted = self._quotas.group(int(self.slot_of[block])) if self.has(block) else group
                assert counted == group, f"the part of block {block} of group {group} counts against {counted}"


def resume_position(
    num_tokens: int, kinds: Sequence[EndingPart], block_tokens: int, has_part: Callable[[int, int], bool]
) -> int:
    """Return the last resume point among the first `num_tokens` of a stored sequence; 0 if there is none.

    `has_part(index, which)`: whether block `index` of the sequence has its part `kinds[which]`. It is asked once
    for each block that one needs, and for one of each block that the point moves back.
    """
    position, at = num_tokens, 0
    first_known = [-(-num_tokens // block_tokens)] * len(kinds)  # blocks from here on have their parts
    while at < len(kinds):
        needed = kinds[at].first_needed(position, block_tokens)
        while first_known[at] > needed and has_part(first_known[at] - 1, at):
            first_known[at] -= 1
        if first_known[at] <= needed:
            at += 1
            continue
        missing = first_known[at] - 1
        position, at = missing * block_tokens, 0
        first_known = [min(first, missing) for first in first_known]
    return position
