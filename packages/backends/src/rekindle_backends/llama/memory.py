"""The memory of agents at a llama-server: which slot computes a request, and what is restored there before.

    a request   takes a slot that has most of its tokens, or one whose state is put together from blocks, or another
    its end     its turn is known at once; its KV is in the slot alone until that is read (see `keeping`)

Owns which request has which slot. Never trusts a state: what it restores is made of rows that are there. Called on the
engine's thread.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np

from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.request import Request
from rekindle.engine.sequence import Ended, Head, Sequence
from rekindle.errors import Overloaded, RekindleError
from rekindle.parts import WindowPart
from rekindle.store.commands import StoreCommand
from rekindle_backends.client import RETRY_S, Backend
from rekindle_backends.llama.keeping import Keeping
from rekindle_backends.llama.partings import NOTHING_STAYS, Partings, Staying
from rekindle_backends.llama.points import MOST_KEPT, Points
from rekindle_backends.llama.slots import SPARE_TOKENS, Slot, Slots, Unkept, heads_of
from rekindle_backends.llama.states import States
from rekindle_backends.llama.transfer import resumable
from rekindle_backends.memory import Place

logger = logging.getLogger(__name__)
MOST_USELESS = 3  # restored states in a row of which nothing was reused, before none is restored any more


@dataclass(slots=True, eq=False)
class _Running:
    """A request in its slot of the server's `generation`; `num_restored` tokens were put there for it.

    `unread` are the blocks they are read from, until that begins: it never does for a request that ends before.
    `was_useless`: whether nothing of them was reused, once that is known.
    """

    slot: Slot
    generation: int
    num_restored: int = 0
    unread: BlockTable | None = None
    was_useless: bool | None = None


class SlotMemory:
    """The memory of one llama-server with `num_slots` slots. `generation` counts its starts: each empties all slots.

    If its model's replies may have reasoning, prompts are expected to leave it out later.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        cache: PrefixCache,
        states: States,
        num_slots: int,
        has_reasoning: bool,
        generation: Callable[[], int],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._points = Points(cache)
        self.restores = True  # False once this process of the server was found to do nothing with what it restores
        self._backend = backend
        self._cache = cache
        self._states = states
        self._count = generation
        self._generation = generation()
        self._wake = wake
        self._clock = clock
        self._running: dict[int, _Running] = {}  # by the number of the request
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._num_useless = 0
        spare = 0 if self._points else SPARE_TOKENS if cache.arena.layout.ending else None
        self.slots = Slots(num_slots, spare)
        windows = [kind.window for kind in cache.arena.layout.ending.values() if isinstance(kind, WindowPart)]
        self._partings = Partings(is_expected=has_reasoning or bool(self._points), least=max(windows, default=0))
        self.keeping = Keeping(
            backend=backend,
            cache=cache,
            states=states,
            slots=self.slots,
            points=self._points,
            post=self._post,
            clock=clock,
        )

    # Requests

    def place(self, request: Request) -> Place | Literal["wait", "loading"]:
        """Return the slot of a waiting request and what is restored there. "wait": for a slot, or until one is kept."""
        sequence = request.sequence
        is_remembered = sequence.reuse != "off" and self.restores
        num_stored = self._num_stored(sequence) if is_remembered else 0
        slot = self.slots.choose(sequence.root, sequence.ids, num_stored)
        if slot is None:
            return "wait"
        num_held = slot.common(sequence.root, sequence.ids) if sequence.reuse != "off" else 0
        if slot.unkept is not None and not _continues(request, slot, num_held, num_stored):
            self.keeping.keep(slot)
            return "wait"
        if num_held >= num_stored:
            return self._begin(request, slot, has_own=num_held > 0)
        if self._points:
            return self._resumed(request, slot, num_held)
        attached = self._cache.attach(sequence, (), alone=not self._running)
        if attached != "ready":
            return "loading" if attached == "loading" else "wait"
        return self._restored(request, slot, num_held)

    def _num_stored(self, sequence: Sequence) -> int:
        """How many tokens of a prompt are known to be in memory or on disk, whole blocks; with recurrent layers, up to
        where it can be resumed."""
        if self._points:
            return max((each.num_tokens for each in self._points.before(sequence, sequence.num_prompt - 1)), default=0)
        pool, size = self._cache.pool, sequence.block_tokens
        index = (sequence.num_prompt - 1) // size
        while index and pool.block_of(name := sequence.hash_at(index - 1)) is None and not self._cache.stored(name):
            index -= 1
        return index * size

    def _resumed(self, request: Request, slot: Slot, num_held: int) -> Place | Literal["wait", "loading"]:
        """Restore the last turn's end that a prompt has in common with what is stored, if its slot has less."""
        sequence, pool = request.sequence, self._cache.pool
        for point in self._points.before(sequence, sequence.num_prompt - 1):
            if point.num_tokens <= num_held:
                break
            blocks = self._points.bring(sequence, point, alone=not self._running)
            if isinstance(blocks, str):
                return blocks
            if blocks is None:
                continue
            num_tokens = resumable(self._cache.arena, blocks, point.num_tokens)
            if num_tokens > num_held:
                table, size = self._cache.new_table(), pool.block_tokens
                pool.release_all(blocks[-(-num_tokens // size) :])
                table.append_shared(blocks[: -(-num_tokens // size)], num_tokens)
                sequence.note_reused(num_tokens, map(pool.name, table.blocks))
                sequence.note_resumed(num_tokens, num_matched=max(num_tokens, point.num_tokens))
                return self._put_back(request, slot, table)
            pool.release_all(blocks)
            sequence.tried_loads.add(point.last)  # its state is after more tokens than the prompt shares
        return self._begin(request, slot, has_own=num_held > 0)

    def _begin(self, request: Request, slot: Slot, *, has_own: bool) -> Place:
        """Let a request use what its slot has, or nothing."""
        request.sequence.warm_tokens = 0
        self._take(request, _Running(slot, self._generation))
        return Place({"id_slot": slot.number, "cache_prompt": has_own})

    def _take(self, request: Request, running: _Running) -> None:
        running.slot.is_busy = True
        self._running[request.id] = running

    def _restored(self, request: Request, slot: Slot, num_held: int) -> Place:
        """Restore what a request's blocks have, if that is more than its slot has."""
        sequence = request.sequence
        table, sequence.table = sequence.table, self._cache.new_table()
        most = min(table.num_tokens, sequence.num_prompt - 1)
        num_tokens = resumable(self._cache.arena, table.blocks, most)
        if num_tokens <= num_held:
            table.release()
            return self._begin(request, slot, has_own=num_held > 0)
        sequence.num_computed = 0
        return self._put_back(request, slot, self._cut(table, num_tokens))

    def _put_back(self, request: Request, slot: Slot, table: BlockTable) -> Place:
        """Restore the tokens of a table in a slot before a request is computed there."""
        running = _Running(slot, self._generation, table.num_tokens, table)
        self._take(request, running)
        slot.forget()
        slot.floor = table.num_tokens
        self.keeping.held.add(table)
        prepare = partial(self._restore, running, table, request.sequence.ids[: table.num_tokens].copy())
        return Place({"id_slot": slot.number, "cache_prompt": True}, prepare)

    def _cut(self, table: BlockTable, num_tokens: int) -> BlockTable:
        """A table of the first tokens of another, which is released; it holds what the next token needs."""
        shorter = self._cache.new_table()
        blocks = table.blocks[: -(-num_tokens // self._cache.pool.block_tokens)]
        for block in blocks:
            self._cache.pool.share(block)
        shorter.append_shared(blocks, num_tokens)
        table.release()
        return shorter

    async def _restore(self, running: _Running, table: BlockTable, ids: np.ndarray) -> None:
        """Put a state together in a slot. On the backend's thread: one that cannot be is computed instead, in an empty
        slot, as the tokens that are there may be of another namespace. Overloaded if it cannot be emptied either."""
        number, running.unread = running.slot.number, None
        try:
            read = partial(self._post, partial(self.keeping.drop, table))
            await self._states.restore(number, table.blocks, ids, len(ids), read)
        except (RekindleError, OSError, ValueError) as error:
            running.num_restored = 0
            logger.warning("a state of %d tokens could not be restored, so it is computed: %s", len(ids), error)
            await self._empty(number)

    async def _empty(self, number: int) -> None:
        try:
            await self._states.erase(number)
        except RekindleError as error:
            why = f"slot {number} of llama-server can be neither restored nor emptied: {error}"
            raise Overloaded(why, retry_after_s=RETRY_S) from error

    def reused(self, request: Request, num_tokens: int) -> None:
        """Compare what the backend has reused with what was restored: some builds restore without effect."""
        running = self._running.get(request.id)
        if running is None or not running.num_restored or running.generation != self._generation:
            return
        was_useless = not num_tokens
        if running.was_useless in (was_useless, False):
            return  # it says so again with each batch of the prompt, and at the end
        running.was_useless = was_useless
        self._num_useless = self._num_useless + 1 if was_useless else 0
        if self._num_useless == MOST_USELESS:
            self.restores = False
            logger.error(
                "this llama-server uses nothing of the states that it restores: none is restored before it is started "
                "again"
            )

    def end(self, request: Request, *, keep: bool, num_known: int, num_computed: int) -> Ended:
        """End a request; what is to be kept is unkept until its slot's state is read."""
        sequence, running = request.sequence, self._running.get(request.id)
        sequence.table.release()
        if running is None or not keep:
            if running is not None and running.slot.unkept is None:
                running.slot.forget()
            return Ended(sequence.ids[:0].copy(), (), Head(sequence.root, 0))
        ids = sequence.ids[:num_computed].copy()
        staying = self._staying(request, ids) if self.keeping.keeps_tails else NOTHING_STAYS
        hashes, last = heads_of(sequence.root, ids, sequence.block_tokens)
        if running.generation == self._count():
            slot, before = running.slot, running.slot.unkept
            slot.root, slot.owner = sequence.root, (request.namespace, request.agent)
            slot.note(ids, sequence.num_prompt, sequence.reused_tokens)
            slot.unkept = Unkept(
                root=sequence.root,
                ids=ids,
                resume_points=staying.points,
                since=self._clock(),
                heads={*hashes, last},
                saves=sequence.saves,
                num_reused=sequence.reused_tokens,
                back=staying.back,
            )
            if before is not None:
                slot.unkept.saves = "all" if before.saves == "all" else sequence.saves
                slot.unkept.since, slot.unkept.urgent = before.since, before.urgent
                slot.unkept.commands = before.commands
                slot.unkept.back = before.back if slot.unkept.back is None else slot.unkept.back
        if self.keeping.keeps_tails:
            return Ended(ids, hashes, Head(last, len(ids)))
        return Ended(ids, hashes, Head(hashes[-1] if hashes else sequence.root, len(hashes) * sequence.block_tokens))

    def _staying(self, request: Request, ids: np.ndarray) -> Staying:
        """Note a turn's ids; what is to stay of it. In addition the last points before its end are kept, and those of
        windows at which others may part from it."""
        sequence, owner = request.sequence, (request.namespace, request.agent)
        if not self._points:
            staying = self._partings.note(owner, ids, sequence.num_prompt, ())
            sequence.resume_points |= staying.points
            return replace(staying, points=frozenset(at for at in sequence.resume_points if at <= len(ids)))
        found = [each.num_tokens for each in islice(self._points.before(sequence, len(ids)), MOST_KEPT + 2)]
        staying = self._partings.note(owner, ids, sequence.num_prompt, found)
        sequence.resume_points = {*found[:MOST_KEPT], *staying.points}
        if staying.back is not None and self._points.has_near(sequence, staying.back):
            return Staying(None, staying.points)
        return staying

    def left(self, request: Request) -> None:
        """Free the slot of a request."""
        running = self._running.pop(request.id, None)
        if running is not None:
            if running.unread is not None:
                self.keeping.drop(running.unread)
            running.slot.is_busy = False
            running.slot.used = self._clock()

    @property
    def is_writing(self) -> bool:
        """Whether rows are being copied into blocks that others know: their windows and states. New ones are
        known to nobody before they are full."""
        return self.keeping.keeps_tails and self.keeping.num_filling > 0

    def step(self, now: float) -> None:
        """Take what other threads report; begin to read the slots that are due."""
        while not self._events.empty():
            self._events.get_nowait()()
        if self._count() != self._generation:
            self._generation = self._count()
            self.restores, self._num_useless = True, 0  # it may be another build
            self.keeping.num_stuck = 0
            for slot in self.slots:
                self.keeping.lose(slot, "llama-server was started again")
                slot.forget()
        self.keeping.step(now)

    def seconds_left(self, now: float) -> float | None:
        """In how many seconds the next slot is due; None if none is."""
        return self.keeping.seconds_left(now)

    def _post(self, event: Callable[[], None]) -> None:
        """Have something done on the engine's thread. Any thread."""
        self._events.put(event)
        self._wake()

    def save(self, command: StoreCommand) -> None:
        """Queue a command for the store, after the states that it depends on."""
        self.keeping.waiting.save(command)

    def hand_over(self) -> int:
        """Have all states read; return how many are not, and what the store has not accepted yet."""
        return self.keeping.hand_over()

    def forget(self, namespace: str, agent: str) -> None:
        """Empty the slots that computed for an agent last, but for those whose turn is still to be kept: it ended since
        the agent was saved or deleted, and stays."""
        self._partings.forget((namespace, agent))
        for slot in self.slots:
            if slot.owner == (namespace, agent) and slot.unkept is None:
                slot.forget()
                if not slot.is_busy:
                    slot.is_busy = slot.is_read = True
                    self._backend.run(self._erase(slot))

    async def _erase(self, slot: Slot) -> None:
        """Empty a slot. On the backend's thread."""
        try:
            await self._states.erase(slot.number)
        except RekindleError as error:
            logger.warning("slot %d of llama-server could not be emptied: %s", slot.number, error)
        finally:
            self._post(partial(self.keeping.free, slot))

    def close(self) -> None:
        """Release what belongs to no request; no thread reads or writes blocks afterwards."""
        self._states.close()

    def check(self) -> None:
        """Assert that every request has a slot of its own, and that only states under way hold blocks."""
        numbers = [running.slot.number for running in self._running.values()]
        assert len(numbers) == len(set(numbers)), f"two requests have one slot: {sorted(numbers)}"
        busy = {slot.number for slot in self.slots if slot.is_busy and not slot.is_read}
        assert busy == set(numbers), f"slots {busy} are busy, requests have {set(numbers)}"
        if not self.keeping.held:
            assert not self._cache.pool.num_held, f"{self._cache.pool.num_held} blocks are held"


def _continues(request: Request, slot: Slot, num_held: int, num_stored: int) -> bool:
    """Whether a request's turn takes the place of the unkept one: it is of the same agent, and has all of its tokens in
    the slot, where nothing is restored."""
    assert slot.unkept is not None, "there is nothing to continue"
    is_of_owner = slot.owner == (request.namespace, request.agent)
    return is_of_owner and num_held >= max(len(slot.unkept.ids), num_stored)
