"""What agents remember: the branch book and the text matcher kept in step, and what of them goes to the store.

Owned by the intake thread. A branch is known to the book always, to the matcher while its text is worth keeping; its
ids come from the turn that made it, or from the store's index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rekindle.cache.hashing import BlockHash, chain_hashes
from rekindle.cache.matcher import Matcher, StoredBranch
from rekindle.engine.branches import Branch, BranchBook
from rekindle.engine.request import FinishedTurn
from rekindle.engine.saving import Forgotten, SaveOrder
from rekindle.errors import BadRequest, NotFound
from rekindle.store.warm import SequenceRecord, WarmStore
from rekindle.text.prompt import PromptEncoder

logger = logging.getLogger(__name__)


class AgentMemory:
    """Agents, their branches, their texts. `save` queues a sequence, or its end, behind its blocks;
    `demote` lets all but a branch's first blocks leave hot memory before others."""

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        matcher: Matcher,
        book: BranchBook,
        store: WarmStore | None,
        block_tokens: int,
        save: Callable[[SaveOrder], None],
        demote: Callable[[Branch, int], None],
        now: Callable[[], float],
    ) -> None:
        self.book = book
        self.matcher = matcher
        self._encoder = encoder
        self._store = store
        self._block_tokens = block_tokens
        self._save = save
        self._demote = demote
        self._now = now
        self._to_index: list[Branch] = []

    def open(self) -> int:
        """Take in the sequences the store knows; return how many named agents are warm."""
        if self._store is None:
            return 0
        for record in self._store.sequences():
            self.book.put(_branch_of(record))
        self._to_index = sorted(self.book.branches(), key=lambda branch: branch.last_use)
        return sum(1 for _ in self.book.agents())

    def index_one_more(self) -> bool:
        """Make one more stored branch findable by its text, most recent first; False when nothing is left."""
        while self._to_index:
            branch = self._to_index.pop()
            current = self.book.get(branch.namespace, branch.agent, branch.number)
            if current is not None and current.ids is None:
                self.know(current)
                return True
        return False

    def know_agent(self, namespace: str, agent: str) -> list[Branch]:
        """An agent's branches with their ids, findable by text, most recently used first."""
        return [known for branch in self.book.of(namespace, agent) if (known := self.know(branch)) is not None]

    def know(self, branch: Branch) -> Branch | None:
        """The branch with its ids and in the matcher; None when the store does not give them.

        It is forgotten when its blocks are gone. Where the index could only not be read it stays, under its number:
        the next read may do better.
        """
        if branch.ids is None:
            ids = self._stored_ids(branch)
            if ids is None:
                logger.warning("agent %s: branch %d is not readable and starts cold", branch.agent, branch.number)
                if self._store is None or self._store.has_lost(_record_of(branch)):
                    self.forget(branch)
                return None
            branch = replace(branch, ids=ids, names=tuple(chain_hashes(branch.root, ids, self._block_tokens)))
            self.book.put(branch)
            self._index(branch)
        return branch

    def is_elsewhere(self, namespace: str, agent: str) -> bool:
        """Whether an agent that has nothing here is known to another model of the same store."""
        known = bool(self.book.of(namespace, agent))
        return not known and self._store is not None and self._store.known_elsewhere(namespace, agent)

    def _stored_ids(self, branch: Branch) -> np.ndarray | None:
        if self._store is None:
            return None
        record = _record_of(branch)
        ids = self._store.sequence_ids(record)
        return ids if len(ids) == branch.num_tokens else None

    def _index(self, branch: Branch) -> None:
        assert branch.ids is not None
        self.matcher.add(
            StoredBranch(branch.namespace, branch.agent, branch.number, branch.ids, branch.canonical_tokens)
        )

    def end_turn(self, turn: FinishedTurn) -> None:
        """Continue or start a branch for the turn, make it findable, queue it for the store."""
        self.know_agent(turn.namespace, turn.agent)
        known = min(turn.canonical_prompt, len(turn.ids))
        canonical = self._encoder.canonical_tokens(turn.ids, known=known)
        ended = self.book.end_turn(turn, canonical_tokens=canonical, now=self._now())
        if ended.extended is not None:
            self._demote(ended.extended, len(ended.extended.names or ()))
        for old in ended.dropped:
            self._demote(old, 0)
            self._unindex(old)
            self._save(Forgotten(old.namespace, old.agent, old.number))
        if ended.branch.ids is not turn.ids:
            return
        self._index(ended.branch)
        if turn.head_tokens:
            self._save(replace(_record_of(ended.branch), num_tokens=turn.head_tokens))

    def _unindex(self, branch: Branch) -> None:
        self.matcher.remove(branch.namespace, branch.agent, branch.number)

    def forget(self, branch: Branch) -> None:
        """Drop one branch from book, matcher and store."""
        self.book.remove(branch)
        self._unindex(branch)
        self._save(Forgotten(branch.namespace, branch.agent, branch.number))

    def delete(self, namespace: str, agent: str) -> tuple[list[Branch], Forgotten]:
        """Forget an agent everywhere but in hot memory; return its branches (with ids where they were at hand), and
        the order whose `done` tells when the store has forgotten them, too."""
        if not self.book.of(namespace, agent):
            raise NotFound(f"no agent {agent!r}", param="agent")
        self.know_agent(namespace, agent)
        branches = self.book.drop(namespace, agent)
        for branch in branches:
            self._unindex(branch)
        order = Forgotten(namespace, agent)
        self._save(order)
        return branches, order

    def restore(self, branches: Sequence[Branch]) -> None:
        """Take back branches that the store could not forget, so that they are seen and can be deleted again."""
        for branch in branches:
            if self.book.get(branch.namespace, branch.agent, branch.number) is None:
                self.book.put(replace(branch, ids=None, names=None))

    def fork(self, namespace: str, source: str, target: str) -> None:
        """Give `target` every branch of `source`, sharing all blocks; refused if `target` has a memory already."""
        branches = self.know_agent(namespace, source)
        if not branches:
            raise NotFound(f"no agent {source!r} to fork from", param="agent")
        if self.book.of(namespace, target):
            raise BadRequest(f"agent {target!r} has a memory already: delete it or fork to another id", param="agent")
        for branch in reversed(branches):
            twin = replace(branch, agent=target, saved_tokens=0, last_use=self._now())
            self.book.put(twin)
            self._index(twin)
            self._save(_record_of(twin))

    def rewind(self, namespace: str, agent: str, turns: int) -> int:
        """Take back the last turns of the branch used last; return the tokens that are left.

        With no more turns than that left, the branch is forgotten.
        """
        branches = self.know_agent(namespace, agent)
        if not branches:
            raise NotFound(f"no agent {agent!r} to rewind", param="agent")
        branch = branches[0]
        if not 1 <= turns <= len(branch.turn_ends):
            raise BadRequest(
                f"agent {agent!r} has {len(branch.turn_ends)} turns, {turns} cannot be taken back", param="turns"
            )
        left = branch.turn_ends[: len(branch.turn_ends) - turns]
        self._unindex(branch)
        if not left:
            self.forget(branch)
            return 0
        assert branch.ids is not None and branch.names is not None
        end = left[-1]
        last = (end - 1) // self._block_tokens
        shorter = replace(
            branch,
            ids=branch.ids[:end],
            names=branch.names[: end // self._block_tokens],
            head=branch.names[last] if last < len(branch.names) else branch.head,
            num_tokens=end,
            canonical_tokens=min(branch.canonical_tokens, end),
            saved_tokens=min(branch.saved_tokens, end),
            turn_ends=left,
            last_use=self._now(),
        )
        self.book.put(shorter)
        self._index(shorter)
        self._save(_record_of(shorter))
        return end

    def check(self) -> None:
        """Assert that matcher and book are each sound."""
        self.matcher.check()
        self.book.check()


def _record_of(branch: Branch) -> SequenceRecord:
    return SequenceRecord(
        namespace=branch.namespace,
        agent=branch.agent,
        branch=branch.number,
        root=branch.root,
        head=branch.head,
        num_tokens=branch.num_tokens,
        canonical_tokens=branch.canonical_tokens,
        last_use=branch.last_use,
        turn_ends=branch.turn_ends,
    )


def _branch_of(record: SequenceRecord) -> Branch:
    return Branch(
        namespace=record.namespace,
        agent=record.agent,
        number=record.branch,
        root=BlockHash(record.root),
        head=BlockHash(record.head),
        num_tokens=record.num_tokens,
        canonical_tokens=record.canonical_tokens,
        saved_tokens=record.num_tokens,
        last_use=record.last_use,
        turn_ends=record.turn_ends,
        ids=None,
        names=None,
    )
