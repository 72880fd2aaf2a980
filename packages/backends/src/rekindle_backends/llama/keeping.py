"""Turns whose KV only a slot has, until the slot's state is read, cut into blocks, and on its way to the store.

    unkept ──rested, wanted, or somebody waits──▶ read ──▶ copied into blocks ──▶ published, saved
       └──another turn continues it──▶ unkept, with what waits for both            └──▶ what waited goes to the store

A slot whose state at the end of a prompt is wanted, too (see `partings`), goes back to there once it is read.

Owns when a state is read, and the blocks that are filled from one. What a slot's file does not have is not kept. Called
on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.table import BlockTable
from rekindle.cache.blocks.windows import WindowSlots
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.sequence import Sequence
from rekindle.errors import RekindleError
from rekindle.parts import WindowPart
from rekindle_backends.client import Backend
from rekindle_backends.llama.points import Points
from rekindle_backends.llama.slot_file import SlotFile
from rekindle_backends.llama.slots import Slot, Slots, Unkept, num_common
from rekindle_backends.llama.states import States
from rekindle_backends.llama.transfer import has_state
from rekindle_backends.llama.waiting import Waiting

logger = logging.getLogger(__name__)
REST_S = 0.05  # shortest rest of a slot before it is read
MOST_UNKEPT_S = 60.0  # then it is read when it is next free, however short its rests are, whatever computes
SHORT_S = 0.05  # llama-server computes nothing while it writes a state: so long, others may wait at any time
STEP_TOKENS = 512  # of a state, for which blocks get their parts of windows at once
MOST_STUCK = 3  # slots in a row that could not go back, before none is asked to


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read of a slot: its state, and that after `goes_to` tokens, if it was asked and could go `back`."""

    file: SlotFile
    goes_to: int | None = None
    back: SlotFile | None = None


class Keeping:
    """Keeps the turns of these slots; `post` has something done on the engine's thread, from any thread."""

    def __init__(
        self,
        *,
        backend: Backend,
        cache: PrefixCache,
        states: States,
        slots: Slots,
        points: Points,
        post: Callable[[Callable[[], None]], None],
        clock: Callable[[], float],
    ) -> None:
        self.held: set[BlockTable] = set()  # of states that are being read
        self.waiting = Waiting(slots, cache.saving)
        self.num_stuck = 0  # slots in a row that could not go back, of this process of the server
        self.num_filling = 0  # states whose rows are being copied into blocks
        ending = cache.arena.layout.ending
        self.keeps_tails = bool(ending)  # parts that end go on where they end alone, so tails go to disk with them
        self._has_windows = any(isinstance(kind, WindowPart) for kind in ending.values())
        self._backend = backend
        self._cache = cache
        self._states = states
        self._slots = slots
        self._points = points
        self._post = post
        self._clock = clock
        self._seconds_per_token = 0.0  # of reading a state

    def step(self, now: float) -> None:
        """Begin to read the slots that are due."""
        for at, slot in self._due():
            if at <= now:
                self.keep(slot)

    def seconds_left(self, now: float) -> float | None:
        """In how many seconds the next slot is due; None if none is."""
        return min((max(0.0, at - now) for at, _ in self._due()), default=None)

    def _due(self) -> list[tuple[float, Slot]]:
        free = [(slot, slot.unkept) for slot in self._slots if not slot.is_busy]
        return [(self._due_at(slot, unkept), slot) for slot, unkept in free if unkept is not None]

    def _due_at(self, slot: Slot, unkept: Unkept) -> float:
        """When a free slot is read: an agent that comes back sooner than that pays for no reading.

        A state that takes long to read waits until no other slot computes.
        """
        if unkept.urgent:
            return 0.0
        read_s = self._seconds_per_token * len(unkept.ids)
        if read_s > SHORT_S and any(each.is_busy and not each.is_read for each in self._slots):
            return unkept.since + MOST_UNKEPT_S
        return min(slot.used + max(REST_S, read_s), unkept.since + MOST_UNKEPT_S)

    def keep(self, slot: Slot) -> None:
        """Begin to read the state of a free slot."""
        assert slot.unkept is not None and not slot.is_busy, "there is nothing to keep, or it computes"
        slot.is_busy = slot.is_read = True
        goes_to = slot.unkept.back
        if goes_to is not None and (self.num_stuck >= MOST_STUCK or not slot.can_go_back(goes_to)):
            goes_to = None
        try:
            self._backend.run(self._read(slot, slot.unkept, goes_to, self._clock()))
        except RekindleError as error:
            self._kept_nothing(slot, slot.unkept, error)

    async def _read(self, slot: Slot, unkept: Unkept, goes_to: int | None, began: float) -> None:
        """Read a slot's state, and then that after an earlier token, if it goes there. On the backend's thread."""
        try:
            file = await self._states.save(slot.number, len(unkept.ids))
            back = None if goes_to is None else await self._states.go_back(slot.number, unkept.ids[:goes_to])
        except Exception as error:
            # Border: whatever fails here costs this turn's KV, which is computed again.
            self._post(partial(self._kept_nothing, slot, unkept, error))
            return
        self._post(self._guarded(slot, unkept, partial(self._copy, slot, unkept, _Read(file, goes_to, back), began)))

    def _note_back(self, slot: Slot, read: _Read) -> None:
        """Note where a slot is that was to go back, and give up with a server whose slots cannot."""
        if read.goes_to is None:
            return
        slot.go_back(0 if read.back is None else read.goes_to)
        self.num_stuck = 0 if read.back is not None else self.num_stuck + 1
        if self.num_stuck == MOST_STUCK:
            logger.error("slots of this llama-server cannot go back in their text: none is asked to any more")

    def _guarded(self, slot: Slot, unkept: Unkept, work: Callable[[], None]) -> Callable[[], None]:
        """Work on a state that was read: a failure costs its KV, and nobody waits for it."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._kept_nothing(slot, unkept, error)
                raise

        return run

    def _copy(self, slot: Slot, unkept: Unkept, read: _Read, began: float) -> None:
        """Begin to copy what is new of a state into blocks; it may be less, or more, than was believed."""
        self._note_back(slot, read)
        if slot.unkept is not unkept:  # its agent was forgotten meanwhile
            self.free(slot)
            return
        num_tokens = num_common(read.file.tokens.astype(np.uint32), unkept.ids)
        back = [] if read.back is None else [len(read.back.tokens)]
        points = [*back, num_tokens] if has_state(read.file, num_tokens) else back
        sequence = self._sequence(unkept, num_tokens, points)
        first = sequence.table.num_tokens
        if num_tokens == first and not (first and self._has_windows):
            self._cache.end(sequence, is_remembered=True)  # some may have left the disk since
            self._kept(slot)
            return
        if not self._carry(sequence, unkept.resume_points, back):
            sequence.table.release()
            self._kept(slot)
            return
        self.held.add(sequence.table)
        self.num_filling += 1
        try:
            self._backend.run(self._fill(slot, unkept, read, sequence, first, began))
        except RekindleError as error:
            self._not_filled(slot, unkept, sequence.table, error)

    def _sequence(self, unkept: Unkept, num_tokens: int, points: list[int]) -> Sequence:
        """A sequence of the first tokens of a turn, with those of its blocks that are in memory, up to one that may
        lack what a file has: there are files of the states at these `points`."""
        ids, pool = unkept.ids[:num_tokens], self._cache.pool
        sequence = Sequence(unkept.root, ids, self._cache.new_table(), "continuation", "prefill")
        staying = () if self._points else (num_tokens, *(at for at in unkept.resume_points if at <= num_tokens))
        sequence.resume_points = {*points, *staying}
        sequence.saves, sequence.hot_tokens = unkept.saves, min(unkept.num_reused, num_tokens)
        known = pool.try_reuse_prefix(unkept.root, ids)
        for index in sorted((at - 1) // pool.block_tokens for at in points):
            if index < len(known) and not self._points.snapshots.end(known[index]):
                pool.release_all(known[index:])
                del known[index:]
        given = self._with_windows(known, unkept.root)
        sequence.table.append_shared(known, len(known) * pool.block_tokens)
        for slots, block in given:
            slots.release(block)
        return sequence

    def _with_windows(self, blocks: list[int], root: BlockHash) -> list[tuple[WindowSlots, int]]:
        """Give known blocks the parts of windows that a table of them holds, empty where they lack one; return these,
        each held once.

        Without room for one, nothing is known: all is copied again.
        """
        given: list[tuple[WindowSlots, int]] = []
        pool, layout = self._cache.pool, self._cache.arena.layout
        for slots, part in zip(pool.windows, layout.ending, strict=True):
            first = slots.kind.first_needed(len(blocks) * pool.block_tokens, pool.block_tokens)
            there = [block for block in blocks[first:] if slots.has(block)]
            for block in there:
                slots.hold(block)  # or the next block may be given its slot
                given.append((slots, block))
            for block in blocks[first:]:
                if slots.has(block):
                    continue
                if not slots.take(block, pool.group(root)):
                    for others, each in given:
                        others.release(each)
                    pool.release_all(blocks)
                    blocks.clear()
                    return []
                self._cache.arena.wipe_row(part, self._cache.arena.row(part, block))
                given.append((slots, block))
        return given

    def _has_room(self, sequence: Sequence, back: Collection[int]) -> bool:
        """Reserve blocks for a sequence, with their parts of windows for the end and for what a slot goes `back` to;
        what they held is wiped.

        Where there is no room nothing is evicted, but for parts of windows.
        """
        table, cache, pool = sequence.table, self._cache, self._cache.pool
        num_before, step = len(table.blocks), STEP_TOKENS if self._has_windows else sequence.num_prompt
        has_blocks = -(-sequence.num_prompt // pool.block_tokens) - num_before <= pool.num_free + pool.num_cached
        while table.num_tokens < sequence.num_prompt:
            end = min(sequence.num_prompt, table.num_tokens + step)
            is_prepared = has_blocks and cache.prepare(sequence, end)
            if has_blocks and not is_prepared and self._has_windows:
                table.end_parts()  # the end comes first
                back, is_prepared = (), cache.prepare(sequence, end)
            if not is_prepared:
                logger.warning("hot memory has no room for %d tokens: they are not kept", sequence.num_prompt)
                return False
            table.num_tokens = end
            if self._has_windows:
                table.end_parts([at for at in back if at <= end])
        cache.ending.mark(table, back)
        for block in table.blocks[num_before:]:
            for slots in pool.windows:
                if slots.has(block) and not slots.is_held(block):
                    slots.drop(block)
            cache.arena.wipe(block)
        return True

    def _carry(self, sequence: Sequence, staying: Set[int], back: Collection[int]) -> bool:
        """Reserve blocks for a sequence, the first of which gets the state of an earlier turn that is in it, if it has
        none of its own or that one is `staying`; False without room for them.

        That state is in a tail, which leaves the disk once a longer block is in its place, or in a block that goes on
        with another reply.
        """
        pool, size, index = self._cache.pool, self._cache.pool.block_tokens, len(sequence.table.blocks)
        own = sequence.resume_points & {*range(index * size + 1, (index + 1) * size + 1)}
        earlier = self._points.earlier(sequence, index, staying) if self._points else None
        end = 0 if earlier is None else self._points.snapshots.end(earlier)
        if earlier is None or own & staying or (own and end not in staying):
            return self._has_room(sequence, back)
        sequence.resume_points = (sequence.resume_points - own) | {end}
        pool.share(earlier)
        (slots,) = pool.windows
        slots.hold(earlier)
        has_room = self._has_room(sequence, back)
        if has_room and slots.has(block := sequence.table.blocks[index]):
            self._points.snapshots.copy(earlier, block)
        slots.release(earlier)
        pool.release(earlier)
        return has_room

    async def _fill(
        self, slot: Slot, unkept: Unkept, read: _Read, sequence: Sequence, first: int, began: float
    ) -> None:
        """Copy the rows and states of files into the blocks of a sequence. On the backend's thread."""
        try:
            await self._states.take(read.file, sequence.table.blocks, first, sequence.num_prompt, back=read.back)
        except Exception as error:
            # Border: as above.
            self._post(partial(self._not_filled, slot, unkept, sequence.table, error))
            return
        self._post(self._guarded(slot, unkept, partial(self._publish, slot, unkept, sequence, began)))

    def _not_filled(self, slot: Slot, unkept: Unkept, table: BlockTable, error: Exception) -> None:
        """Drop blocks that could not be filled."""
        self.num_filling -= 1
        self.drop(table)
        self._kept_nothing(slot, unkept, error)

    def _publish(self, slot: Slot, unkept: Unkept, sequence: Sequence, began: float) -> None:
        """Give blocks that are filled their hashes, and queue them for the store."""
        self.num_filling -= 1
        if slot.unkept is not unkept:
            self.drop(sequence.table)
            self.free(slot)
            return
        self.held.discard(sequence.table)
        self._seconds_per_token = (self._clock() - began) / max(1, sequence.num_prompt)
        sequence.num_computed = sequence.num_prompt
        self._cache.publish(sequence)
        if self._points:
            self._cache.ending.mark(sequence.table, sequence.resume_points)
        if not self.keeps_tails and sequence.saves == "all":
            # The tail stays in memory: on disk it would be written again with every turn.
            sequence.saves, sequence.hot_tokens = "seen", sequence.num_prompt
        self._cache.end(sequence, is_remembered=True)
        self._kept(slot)

    def _kept(self, slot: Slot) -> None:
        """Queue what waited for a state, of which all was kept that could be; the store has no blocks of the rest."""
        self.waiting.give_up(slot)
        self.free(slot)

    def _kept_nothing(self, slot: Slot, unkept: Unkept, error: BaseException) -> None:
        """Give up a state that cannot be read: its turn is in its slot alone, until that is taken."""
        logger.warning("the state of slot %d could not be read, so it is not kept: %s", slot.number, error)
        if slot.unkept is unkept:
            self.waiting.give_up(slot)
        self.free(slot)

    def lose(self, slot: Slot, why: str) -> None:
        """Drop an unkept turn: the store says what is missing of what waits for it, unless another slot has it."""
        if slot.unkept is not None:
            num_tokens = len(slot.unkept.ids)
            logger.warning("KV of %d tokens is lost (%s): it is computed again when it is needed", num_tokens, why)
            self.waiting.give_up(slot)

    def free(self, slot: Slot) -> None:
        """Let a slot that was read, or emptied, be taken."""
        slot.is_busy = slot.is_read = False

    def drop(self, table: BlockTable) -> None:
        """Release the blocks of a state that nobody reads or writes any more; nothing stays of what was not published,
        as its agent may have been purged."""
        self.held.discard(table)
        for block in filter(self._cache.pool.is_private, table.blocks):
            self._cache.arena.wipe(block)
        table.release()

    def hand_over(self) -> int:
        """Have all states read; return how many are not, and what the store has not accepted yet."""
        unkept = [slot.unkept for slot in self._slots if slot.unkept is not None]
        for each in unkept:
            each.urgent = True
        return len(unkept) + len(self._cache.saving)
