"""What agents remember: keeps the branch book and the text matcher in step, and saves their changes to the store.

Owned by the intake thread. The book always has a branch, the matcher only while its text fits the text index's budget;
its ids come from the turn that made it, or from the store's index. A durable branch dropped from the index keeps no ids
here: they are read again on its agent's next request. `retention` decides what to forget by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from rekindle.agent_ids import kind_of
from rekindle.cache.blocks.hashing import chain_hashes
from rekindle.engine.memory.beginnings import Beginnings
from rekindle.engine.memory.branches import Branch, BranchBook, KnownBranch, TurnEnd
from rekindle.engine.memory.breakpoints import Breakpoints
from rekindle.engine.memory.histories import Histories
from rekindle.engine.memory.pins import Pins
from rekindle.engine.memory.preambles import Preambles
from rekindle.engine.memory.sequences import branch_of, cut, durable_tokens, record_of, to_save
from rekindle.engine.memory.summaries import Summaries
from rekindle.engine.memory.system_texts import SystemTexts
from rekindle.engine.request import FinishedTurn
from rekindle.matching.matcher import Matcher, StoredBranch
from rekindle.spec import Change
from rekindle.store.commands import Delete, Pin, StoreCommand
from rekindle.store.warm import SequenceRecord, WarmStore
from rekindle.text.pictures import is_known
from rekindle.text.prompt import PromptEncoder

logger = logging.getLogger(__name__)
T = TypeVar("T")


class OnMemory(Protocol):
    """Runs `work` on the thread that owns memory, and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


class AgentMemory:
    """Agents, their branches, their texts. `save` queues a command to the store after the blocks of its sequence;
    `demote` makes all but a branch's first blocks the first to be evicted from hot memory. A tenant's breakpoints have
    at most `max_breakpoint_tokens` in total; it may pin `max_pinned_blocks`."""

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        matcher: Matcher,
        book: BranchBook,
        store: WarmStore | None,
        block_tokens: int,
        save: Callable[[StoreCommand], None],
        demote: Callable[[Branch, int], None],
        now: Callable[[], float],
        vocab_size: int,
        max_breakpoint_tokens: float = math.inf,
        max_pinned_blocks: float = math.inf,
    ) -> None:
        self.book = book
        self.matcher = matcher
        self._encoder = encoder
        self._store = store
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self.save = save
        self._demote = demote
        self._now = now
        self.breakpoints = Breakpoints(
            book, block_tokens=block_tokens, max_tokens=max_breakpoint_tokens, save=save, now=now
        )
        self.pins = Pins(book, block_tokens=block_tokens, max_blocks=max_pinned_blocks, save=save, now=now)
        self._beginnings = Beginnings(book, block_tokens=block_tokens)
        self.preambles = Preambles()
        self.histories = Histories()
        self.system_texts = SystemTexts()
        self.summaries = Summaries()
        self._to_index: list[Branch] = []

    @property
    def has_store(self) -> bool:
        """Whether memory can be durable."""
        return self._store is not None

    def open(self) -> int:
        """Read the sequences of the store; return how many named agents are warm."""
        if self._store is None:
            return 0
        now = self._now()
        for record in self._store.sequences():
            self.book.put(branch_of(replace(record, last_use=min(record.last_use, now))))
            if not kind_of(record.agent).is_memory:
                self.breakpoints.know(record.namespace, record.agent)
        for (namespace, agent), until in self._store.pins().items():
            if self.book.of(namespace, agent):
                self.book.pin(namespace, agent, until)
        self.pins.know()
        findable = (branch for branch in self.book.branches() if kind_of(branch.agent).is_memory)
        self._to_index = sorted(findable, key=lambda branch: branch.last_use)
        return sum(1 for _ in self.book.agents())

    def index_one_more(self) -> bool:
        """Make one more stored branch findable by its text, most recent first; False when none or no room is left."""
        while self._to_index:
            branch = self._to_index.pop()
            current = self.book.get(branch.namespace, branch.agent, branch.number)
            if current is not None and not isinstance(current, KnownBranch):
                self.matcher.index.dropped.clear()
                self.know(current)
                if not self.matcher.index.dropped:
                    return True
                self._to_index.clear()  # the rest would evict branches used more recently
        return False

    def know_agent(self, namespace: str, agent: str) -> list[KnownBranch]:
        """Return an agent's branches with their ids, findable by text, most recently used first."""
        return [known for branch in self.book.of(namespace, agent) if (known := self.know(branch)) is not None]

    def know(self, branch: Branch) -> KnownBranch | None:
        """Return the branch with its ids, and add it to the matcher; None if the store cannot read them.

        The branch is forgotten if its blocks are gone. If only the read of the index failed, it stays under its number:
        the next read may succeed.
        """
        if isinstance(branch, KnownBranch):
            return branch
        ids = self._stored_ids(branch)
        if ids is None and (shorter := self._shorter(branch)) is not None:
            self.book.put(shorter)
            return self.know(shorter)
        if ids is None:
            logger.warning("agent %s: branch %d is not readable and starts cold", branch.agent, branch.number)
            if self._store is None or self._store.has_lost(record_of(branch)):
                self.forget(branch)
            return None
        known = branch.with_ids(ids, tuple(chain_hashes(branch.root, ids, self._block_tokens)))
        self.book.put(known)
        self.index(known)
        return known

    def elsewhere(self, namespace: str, agent: str) -> tuple[Change, ...] | None:
        """What differs in the store's memory of an agent that has nothing here, but was known under another
        fingerprint; None if it was not."""
        known = bool(self.book.of(namespace, agent))
        return None if known or self._store is None else self._store.known_elsewhere(namespace, agent)

    def _stored_ids(self, branch: Branch) -> np.ndarray | None:
        if self._store is None:
            return None
        record = record_of(branch)
        ids = self._store.sequence_ids(record)
        is_whole = len(ids) == branch.num_tokens and is_known(ids, self._vocab_size)
        return ids if is_whole else None

    def index(self, branch: KnownBranch) -> None:
        """Make a branch findable by its text."""
        self.matcher.add(
            StoredBranch(branch.namespace, branch.agent, branch.number, branch.ids, branch.canonical_tokens)
        )

    def release_ids(self) -> None:
        """Release the ids of durable branches no longer findable by text; call it between two matches."""
        dropped = self.matcher.index.dropped
        unfindable, dropped[:] = list(dropped), []
        for stored in unfindable:
            branch = self.book.get(stored.namespace, stored.agent or "", stored.branch)
            if isinstance(branch, KnownBranch) and branch.ids is stored.ids:
                self._release(branch)

    def _release(self, branch: KnownBranch) -> None:
        is_durable = self._store is not None and branch.saved_tokens == branch.num_tokens
        if is_durable and not self.matcher.is_findable(branch.namespace, branch.agent, branch.number):
            self.unindex(branch)
            self.book.put(branch.without_ids())

    def saved(self, namespace: str, agent: str, number: int, num_tokens: int) -> None:
        """Record that a transaction has made this much of a branch durable."""
        is_first = not any(branch.saved_tokens for branch in self.book.of(namespace, agent))
        self.book.mark_saved(namespace, agent, number, num_tokens)
        branch = self.book.get(namespace, agent, number)
        if branch is None:
            return
        until = self.book.pinned_until(namespace, agent, self._now())
        if is_first and until is not None and kind_of(agent).is_memory:  # pinned before the store knew it
            self.save(Pin(namespace, agent, until))
        if isinstance(branch, KnownBranch):
            self._release(branch)

    def lost(self, namespace: str, agent: str, number: int, num_tokens: int) -> bool:
        """Record that the store has `num_tokens` left of a branch; return whether the branch is known."""
        branch = self.book.get(namespace, agent, number)
        if branch is not None:
            self.book.put(replace(branch, saved_tokens=min(num_tokens, branch.num_tokens)))
        return branch is not None

    def durable(self) -> dict[tuple[str, str, int], SequenceRecord]:
        """Return every branch as the store has it now; O(all of them)."""
        records = self._store.sequences() if self._store is not None else []
        return {(record.namespace, record.agent, record.branch): record for record in records}

    def cut(self, branch: Branch, record: SequenceRecord | None) -> None:
        """Shorten a branch to its durable part; forget it if nothing is durable (None)."""
        if record is None:
            self.forget(branch)
            return
        self.unindex(branch)
        shorter = cut(branch, record, self._block_tokens)
        self.book.put(shorter)
        if isinstance(shorter, KnownBranch):
            self.index(shorter)

    def _shorter(self, branch: Branch) -> Branch | None:
        """Return what the store has left of a branch that it has shortened; None if it has not."""
        record = self.durable().get((branch.namespace, branch.agent, branch.number))
        return branch_of(record) if record is not None and record.num_tokens < branch.num_tokens else None

    def last_use(self, namespace: str, agent: str) -> float:
        """Return when a known agent was last used; times in the future are set to now, so that they age from now on."""
        now, branches = self._now(), self.book.of(namespace, agent)
        for branch in branches:
            if branch.last_use > now:
                self.book.put(replace(branch, last_use=now))
        return min(now, branches[0].last_use)

    def end_turn(self, turn: FinishedTurn) -> None:
        """Continue or start a branch for the turn, make it findable, queue it for the store."""
        self._remember(turn)
        self.pins.grown(turn.namespace, turn.agent)
        if turn.breakpoints and self._store is not None:
            self.breakpoints.turn_ended(turn)

    def _remember(self, turn: FinishedTurn) -> None:
        self.know_agent(turn.namespace, turn.agent)
        known = min(turn.canonical_prompt, len(turn.ids))
        canonical = self._encoder.canonical_tokens(turn.ids, known=known)
        ended = self.book.end_turn(turn, canonical_tokens=canonical, now=self._now())
        self._drop_excess(ended)
        if ended.branch.ids is not turn.ids:
            if self._store is not None:
                self._store.touch(turn.namespace, turn.agent, ended.branch.number, ended.branch.last_use)
            # Part of it was evicted from disk meanwhile, or is seen for the second time.
            if ended.branch.saved_tokens < durable_tokens(ended.branch, self._block_tokens):
                self._save([ended.branch])
            return
        self.index(ended.branch)
        if ended.branch.seen_blocks is not None:
            self._save_beginning(ended.branch, ended.branch.seen_blocks)
        elif turn.head_tokens:
            self.save(record_of(ended.branch, turn.head_tokens))

    def _save_beginning(self, branch: KnownBranch, num_blocks: int) -> None:
        """Keep the blocks of a branch that were seen before on disk, by its own record or another's."""
        if self._store is None or not num_blocks:
            return
        owner = self._beginnings.owner(branch, num_blocks)
        if owner is None:
            self._beginnings.note(branch, num_blocks)
            self._save([branch])
        else:
            self.book.put(replace(owner, last_use=branch.last_use))
            self._store.touch(owner.namespace, owner.agent, owner.number, branch.last_use)

    def _save(self, branches: Sequence[Branch]) -> None:
        for record in to_save(branches, self._block_tokens):
            self.save(record)

    def adopt(self, branch: KnownBranch) -> bool:
        """Remember a branch that was computed elsewhere; False if it was known. It is durable with its next turn."""
        self.know_agent(branch.namespace, branch.agent)
        adopted = self.book.adopt(branch)
        if adopted is None:
            return False
        self._drop_excess(adopted)
        self.index(adopted.branch)
        return True

    def _drop_excess(self, ended: TurnEnd) -> None:
        """Forget what no longer has a place of its own."""
        if ended.extended is not None:
            self._demote(ended.extended, len(ended.extended.hashes))
        for old in ended.dropped:
            self._demote(old, 0)
            self.unindex(old)
            self.save(Delete(old.namespace, old.agent, old.number))

    def unindex(self, branch: Branch) -> None:
        """Remove a branch from the matcher; a no-op if it is not there."""
        self.matcher.remove(branch.namespace, branch.agent, branch.number)

    def forget(self, branch: Branch) -> Delete:
        """Drop one branch from book, matcher and store; its blocks are evicted from memory first."""
        self._demote(branch, 0)
        self.book.remove(branch)
        self.unindex(branch)
        command = Delete(branch.namespace, branch.agent, branch.number)
        self.save(command)
        return command

    def drop(self, namespace: str, agent: str) -> Delete:
        """Forget an agent in book, matcher and store; its blocks are evicted from memory first."""
        for branch in self.take_out(namespace, agent):
            self._demote(branch, 0)
        for kept in self.breakpoints.take_out(namespace, agent):
            self.save(Delete(namespace, kept.agent))
        command = Delete(namespace, agent)
        self.save(command)
        return command

    def take_out(self, namespace: str, agent: str) -> list[Branch]:
        """Forget an agent, but for its breakpoints and what the store has; return its branches."""
        self.preambles.drop(namespace, agent)
        self.histories.drop(namespace, agent)
        self.system_texts.drop(namespace, agent)
        self.summaries.drop(namespace, agent)
        branches = self.book.drop(namespace, agent)
        for branch in branches:
            self.unindex(branch)
        return branches

    def unsaved(self, since: float) -> list[Branch]:
        """Return the branches used since then (wall clock) that are not entirely durable, and should be."""
        branches = [branch for branch in self.book.branches() if branch.seen_blocks is None]
        return [branch for branch in branches if branch.saved_tokens < branch.num_tokens and branch.last_use >= since]

    def check(self) -> None:
        """Assert the invariants of matcher, book, breakpoints, preambles, histories, system texts, summaries."""
        self.matcher.check()
        self.book.check()
        self.breakpoints.check()
        self._beginnings.check()
        self.preambles.check()
        self.histories.check()
        self.system_texts.check()
        self.summaries.check()
