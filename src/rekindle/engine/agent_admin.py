"""Administration of a running engine's agents, one at a time: inspect, pin, offload, fork, rewind, delete, purge.

Each operation calls the intake, then the engine, and waits for the store if it must be durable: what the store refuses
is undone, so that nothing has changed. Called from any thread except the engine's own.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import TypeVar

from rekindle.engine.components import Components
from rekindle.engine.core.interface import Core
from rekindle.engine.core.purge import HotPurge, evict_hashes, idle_hashes, wipe, withdraw
from rekindle.engine.gauges import hot_tokens
from rekindle.engine.memory.agent_commands import Before
from rekindle.engine.memory.branches import Branch, KnownBranch, parents, shared_tokens
from rekindle.engine.memory.sequences import to_save
from rekindle.engine.types import AgentInfo, BranchInfo, PurgeReport
from rekindle.errors import BadRequest, NotFound, PurgeUnproved, RekindleError, StoreError
from rekindle.store.commands import Move
from rekindle.store.values import SequenceRecord
from rekindle.store.warm import PurgeProof

logger = logging.getLogger(__name__)
T = TypeVar("T")

FLUSH_S = 60.0
PROOF_S = 600.0  # a purge reads back every slot that it freed


def infos(parts: Components, ask: Callable[[], Sequence[Sequence[Branch]]]) -> list[AgentInfo]:
    """Return the agents whose branches `ask` returns on the intake thread, most recently used first; one call per
    thread, however many agents there are."""
    now, book = time.time(), parts.memory.book

    def look() -> list[tuple[Sequence[Branch], float | None]]:
        found = [branches for branches in ask() if branches]
        return [(each, book.pinned_until(each[0].namespace, each[0].agent, now)) for each in found]

    agents = parts.intake.call(look).result()
    is_here = parts.has_kv  # a front keeps texts: where their KV is, is known to what computes
    longest = [max(branches, key=lambda branch: branch.num_tokens) for branches, _ in agents]
    hot = parts.loop.call(lambda core: hot_tokens(core.cache, longest)).result()
    is_durable = parts.is_in_place()
    found = [
        AgentInfo(
            namespace=branch.namespace,
            agent=branch.agent,
            branches=len(branches),
            num_tokens=branch.num_tokens,
            saved_tokens=branch.saved_tokens if is_durable else 0,
            hot_tokens=num_hot if is_here else 0,
            warm_tokens=max(0, branch.saved_tokens - num_hot) if is_durable and is_here else 0,
            last_use=max(each.last_use for each in branches),
            pinned_until=pinned,
        )
        for (branches, pinned), branch, num_hot in zip(agents, longest, hot, strict=True)
    ]
    return sorted(found, key=lambda info: -info.last_use)


class AgentAdmin:
    """What can be done to one agent. NotFound if it has no memory, StoreError if the disk refuses a durable change."""

    def __init__(self, parts: Components, namespace: str, agent: str) -> None:
        self._parts = parts
        self._agent = agent
        self._key = namespace, agent
        self._commands = parts.agent_commands

    def _ask(self, call: Callable[[], T]) -> T:
        """Call on the intake's thread and wait for the answer."""
        return self._parts.intake.call(call).result()

    def _run(self, call: Callable[[Core], T]) -> T:
        """Call on the engine's thread and wait for the answer."""
        return self._parts.loop.call(call).result()

    def info(self) -> AgentInfo:
        """Return its figures with its branches, the latest first."""

        def look() -> list[Sequence[Branch]]:
            return [self._parts.memory.know_agent(*self._key) or self._parts.memory.book.of(*self._key)]

        found = infos(self._parts, look)
        if not found:
            raise NotFound(f"no agent {self._agent!r}", param="agent")
        return replace(found[0], branch_infos=self._branch_infos())

    def _branch_infos(self) -> tuple[BranchInfo, ...]:
        book, size = self._parts.memory.book, self._parts.spec.layout.block_tokens

        def look() -> list[tuple[Branch, tuple[int, tuple[str, ...]]]]:
            everybody = book.branches()
            return [(branch, shared_tokens(branch, everybody, size)) for branch in book.of(*self._key)]

        branches = self._ask(look)
        is_here = self._parts.has_kv
        hot = self._run(lambda core: hot_tokens(core.cache, [branch for branch, _ in branches]))
        is_durable = self._parts.is_in_place()
        older = parents([branch for branch, _ in branches], size)
        return tuple(
            BranchInfo(
                number=branch.number,
                num_tokens=branch.num_tokens,
                saved_tokens=branch.saved_tokens if is_durable else 0,
                hot_tokens=num_hot if is_here else 0,
                warm_tokens=max(0, branch.saved_tokens - num_hot) if is_durable and is_here else 0,
                shared_tokens=num_shared,
                shared_with=agents,
                last_use=branch.last_use,
                num_turns=len(branch.turn_ends),
                parent=older.get(branch.number, (None, 0))[0],
                parent_tokens=older.get(branch.number, (None, 0))[1],
            )
            for (branch, (num_shared, agents)), num_hot in zip(branches, hot, strict=True)
        )

    def latest_ids(self) -> tuple[int, ...]:
        """Return the ids of the branch used last, here or else at another replica, if they can be read."""
        branches = self._ask(lambda: self._parts.memory.know_agent(*self._key))
        if not branches and self._parts.imports is not None:
            self._parts.imports.named(*self._key, self._ask)
            branches = self._ask(lambda: self._parts.memory.know_agent(*self._key))
        if not branches:
            raise NotFound(f"no agent {self._agent!r}", param="agent")
        return tuple(branches[0].ids.tolist())

    def offload(self) -> int:
        """As `Agent.offload`; BadRequest if another server has the KV."""
        if not self._parts.has_kv:
            raise BadRequest("offload: the memory is that of the server that computes, which decides what stays hot")
        self._check_place()
        branches = self._ask(lambda: self._commands.branches_to_offload(*self._key))
        if not branches:
            raise NotFound(f"no agent {self._agent!r}", param="agent")
        self._save_rest()
        is_flushed = self._parts.flush(FLUSH_S)
        unsaved, resting = self._ask(lambda: self._commands.since(*self._key, branches))
        if self._parts.store is not None and (unsaved or not is_flushed):
            raise self._not_saved("none of it was offloaded")
        return self._run(lambda core: self._evict(core, resting))

    def _save_rest(self) -> None:
        """Queue again the blocks of an agent that are in memory and not on disk: a failed save may succeed now."""
        unsaved = self._ask(lambda: self._commands.unsaved(*self._key))
        if unsaved:
            self._run(lambda core: _save_branches(core, unsaved))

    def _evict(self, core: Core, branches: Sequence[Branch]) -> int:
        evict_hashes(core.cache.pool, core.forget(*self._key))  # it would keep its ancestors in memory
        known = [branch for branch in branches if isinstance(branch, KnownBranch)]
        return sum(core.cache.evict_chain(branch.root, branch.ids, branch.hashes) for branch in known)

    def _check_open(self) -> None:
        """Raise StoreError if the store is enabled but could not be opened."""
        if self._parts.refused is not None:
            raise StoreError(f"nothing can be saved or deleted: {self._parts.refused}; then start again")

    def _check_place(self) -> None:
        """Raise StoreError if nothing can be made durable."""
        self._check_open()
        if not self._parts.is_in_place():
            raise StoreError("the store's directory was removed or replaced, so nothing can be saved: start again")

    def fork(self, target: str) -> None:
        """As `Agent.fork`, to an id that is checked."""
        self._check_place()
        self._save_rest()
        copies, command = self._ask(lambda: self._commands.fork(*self._key, target))
        if self._parts.store is not None:
            self._done_or_undone(
                command.done, lambda: self._commands.undo_fork(copies), self._not_saved("it is not forked")
            )

    def saved(self) -> list[KnownBranch]:
        """Make it durable, as far as the disk takes it; return its branches, the one used last first."""
        self._check_place()
        self._save_rest()
        self._parts.flush(FLUSH_S)
        branches = self._ask(lambda: self._parts.memory.know_agent(*self._key))
        if not branches:
            raise NotFound(f"no agent {self._agent!r}", param="agent")
        return branches

    def check_new(self) -> None:
        """Raise BadRequest if it has a memory, StoreError if nothing can be made durable."""
        self._check_place()
        self._ask(lambda: self._commands.check_new(*self._key))

    def take_in(self, branches: Sequence[KnownBranch], stored: Sequence[SequenceRecord]) -> None:
        """Give it these branches, whose blocks the store has as far as `stored` says. Durable when this returns; after
        an error it has no memory."""
        command = self._ask(lambda: self._commands.take_in(*self._key, branches, stored))
        self._done_or_undone(
            command.done, lambda: self._commands.undo_fork(branches), self._not_saved("it is not imported")
        )

    def _not_saved(self, so: str) -> StoreError:
        return StoreError(
            f"agent {self._agent!r} cannot be saved, so {so}: check free space, permissions and the disk of the "
            "store's directory (/health/ready says more), then try again"
        )

    def rewind(self, turns: int) -> int:
        """As `Agent.rewind`; after a StoreError it remembers everything as before."""
        self._check_place()
        self._save_rest()
        rewound = self._ask(lambda: self._commands.rewind(*self._key, turns))
        if self._parts.store is not None:
            undo, refusal = lambda: self._commands.undo_rewind(rewound), self._not_saved("it is not rewound")
            if isinstance(rewound.command, Move):
                self._done_or_undone(rewound.command.done, undo, refusal)
            else:
                self._undone_if_refused(rewound.command.done, undo)
        return rewound.num_tokens

    def _done_or_undone(self, done: Future[bool], undo: Callable[[], None], refusal: StoreError) -> None:
        """Wait for the store; if it did not carry out the command, undo it in the book and raise `refusal`."""
        if not self._undone_if_refused(done, undo):
            self._ask(undo)
            raise refusal

    def _undone_if_refused(self, done: Future[T], undo: Callable[[], None]) -> T:
        """Return the store's answer; on an error, undo the change in the book and raise."""
        try:
            return _answer(done)
        except RekindleError:
            self._ask(undo)
            raise

    def delete(self) -> None:
        """As `Agent.delete`, of what is here."""
        self._check_open()
        began = time.time()
        before, commands = self._ask(lambda: self._commands.delete(*self._key))
        if self._parts.store is not None:
            self._carried_out([command.done for command in commands], before, began)
        self._run(lambda core: self._evict(core, before.branches))

    def purge_forgotten(self, purged_at: float) -> bool:
        """Purge what is here of it, which another replica has forgotten, unless it was used since (wall clock); return
        whether that was done."""
        branches = self._ask(lambda: self._parts.memory.book.of(*self._key))
        if not branches or branches[0].last_use > purged_at:
            return False
        try:
            self.purge()
        except RekindleError as error:
            logger.error("agent %s, which another replica has purged, could not be purged here: %s", self._agent, error)
        return True

    def purge(self) -> PurgeReport:
        """As `Agent.purge`, of what is here. Memory is overwritten once the store has forgotten the agent: if the store
        refuses, nothing has changed."""
        self._check_open()
        began = time.time()
        idle = self._run(lambda core: idle_hashes(core.cache.pool))
        before, asked = self._ask(lambda: self._commands.purge(*self._key, idle))
        self._run(lambda core: withdraw(core, asked))
        proofs = self._proofs(asked, before, began) if self._parts.store is not None else []
        num_hot = self._wiped(asked)
        slots_freed, bytes_zeroed = sum(each.slots_freed for each in proofs), sum(each.bytes_zeroed for each in proofs)
        num_shared = proofs[-1].blocks_shared if proofs else 0
        return PurgeReport(self._agent, slots_freed, bytes_zeroed, num_shared, num_hot, self._num_left(asked))

    def _wiped(self, asked: HotPurge) -> int:
        """Overwrite the purged blocks in memory, except those in use again; return how many were overwritten."""
        claimed = asked.claimed | self._ask(self._commands.claimed)
        return self._run(lambda core: wipe(core, replace(asked, claimed=claimed)))

    def _proofs(self, asked: HotPurge, before: Before, began: float) -> list[PurgeProof]:
        """Return what the store read back.

        If the store refuses to forget the agent, it is as before. If it has forgotten it, or still may, the agent stays
        listed so that it can be purged again, and nothing of it is left in memory.
        """
        outcomes = [_outcome(command.done) for command in (*asked.breakpoints, asked.command)]
        errors = [each for each in outcomes if isinstance(each, RekindleError)]
        unproved = self._commands.unproved
        if not errors:
            self._ask(lambda: unproved.discard(self._key))
            self._save_again(began)
            return [each for each in outcomes if not isinstance(each, RekindleError)]
        is_refused = len(errors) == len(outcomes) and not any(isinstance(each, PurgeUnproved) for each in errors)
        if not is_refused:
            self._ask(lambda: unproved.add(self._key))
            self._wiped(asked)
            before = before.without_ids()  # a purge without proof must not make the text findable again
        self._ask(lambda: self._commands.restore(before))
        if is_refused:
            self._save_rest()  # queue again what was withdrawn
        raise errors[-1]

    def _num_left(self, purged: HotPurge) -> int:
        """Count the blocks of a purged agent that are still in memory."""
        return self._run(
            lambda core: sum(core.cache.pool.block_of(block_hash) is not None for block_hash in purged.own)
        )

    def pin(self, ttl_s: float | None) -> None:
        """As `Agent.pin`."""
        if ttl_s is not None and not ttl_s > 0:
            raise BadRequest(f"an agent is pinned for more than 0 seconds, not {ttl_s}", param="ttl_s")
        self._pin(math.inf if ttl_s is None else time.time() + ttl_s)

    def unpin(self) -> None:
        """As `Agent.unpin`; a no-op for one that is not pinned."""
        self._pin(0.0)

    def _pin(self, until: float) -> None:
        self._check_place()
        self._save_rest()
        command, before = self._ask(lambda: self._commands.pin(*self._key, until))
        if self._parts.store is None:
            return
        is_known = self._undone_if_refused(command.done, lambda: self._commands.undo_pin(command, before))
        if until and not is_known:  # what is not on disk is not pinned there either
            self._ask(lambda: self._commands.undo_pin(command, before))
            raise self._not_saved("it is not pinned")

    def _carried_out(self, done: Sequence[Future[T]], before: Before, began: float) -> list[T]:
        """Return the store's answers; on an error restore what it could not forget, so that the call can be retried."""
        try:
            answers = [_answer(each) for each in done]
        except RekindleError:
            self._ask(lambda: self._commands.restore(before))
            raise
        self._save_again(began)
        return answers

    def _save_again(self, began: float) -> None:
        """Queue again the turns that ended since a deletion `began`: they may depend on blocks that it removed.

        Earlier turns were in the store's queue before it; what was evicted for lack of disk space stays evicted.
        """
        unsaved = self._ask(lambda: self._parts.memory.unsaved(began))
        if unsaved:
            self._run(lambda core: _save_branches(core, unsaved))
        self._parts.flush(FLUSH_S)


def _outcome(done: Future[PurgeProof]) -> PurgeProof | RekindleError:
    try:
        return done.result(PROOF_S)
    except FutureTimeout:
        return PurgeUnproved(f"the store did not answer within {PROOF_S:.0f} s, and may forget the agent still")
    except RekindleError as error:
        return error


def _answer(done: Future[T]) -> T:
    try:
        return done.result(FLUSH_S)
    except FutureTimeout:
        raise StoreError(f"the store did not answer within {FLUSH_S:.0f} s; try again") from None


def _save_branches(core: Core, branches: Sequence[Branch]) -> None:
    for branch in branches:
        if isinstance(branch, KnownBranch):
            core.cache.save_again(branch.root, branch.ids, branch.hashes, branch.head)
            for record in to_save([branch], core.cache.pool.block_tokens):
                core.save(record)
