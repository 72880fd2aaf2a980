"""Retention: forget agents that were not used for long, and branches whose KV no longer exists anywhere.

Owned by the intake thread, which calls `idle` when it has nothing else to do, and whenever `is_due`: an engine that is
never idle forgets as well. Times are wall clock; a last use in the future (the clock went back) counts as now. Pinned
agents stay. Three rules:

    age        named agents are forgotten after `agent_ttl_s`, unnamed conversations after `anonymous_ttl_s`, cached
               breakpoints when their pin ends
    nowhere    a branch that the store has dropped is forgotten if memory holds less than half of it, too; what is left
               of it on disk is remembered, unless another branch ends there, too: then it is a prefix that agents
               share, not a memory of one. Without a store every branch is looked up in memory
    number     there are at most as many branches with nothing durable as there are blocks in memory: each needs at
               least one to be of use
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rekindle.agent_ids import kind_of
from rekindle.engine.memory.branches import Branch, KnownBranch
from rekindle.engine.memory.memory import AgentMemory

EVERY_S = 60.0
LEFT_SHARE = 0.5  # a little is always left where agents share a prefix


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Ages in seconds (None: any), and how many branches may have nothing durable."""

    agent_ttl_s: float | None
    anonymous_ttl_s: float
    max_unsaved: int


class Retention:
    """Forgets in idle time. `ask_hot` queries the engine for tokens in memory, `run` runs on the intake thread."""

    def __init__(
        self,
        memory: AgentMemory,
        rules: RetentionRules,
        *,
        ask_hot: Callable[[list[Branch]], Future[list[int]]],
        run: Callable[[Callable[[], None]], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._rules = rules
        self._ask_hot = ask_hot
        self._run = run
        self._now = now
        self._clock = clock
        self._next = clock() + EVERY_S
        self._lost: dict[tuple[str, str, int], None] = {}  # to look up in the next idle time
        self._hot_only: dict[tuple[str, str, int], None] = {}  # were in memory at the last look-up; to look up again

    @property
    def is_due(self) -> bool:
        """Whether `idle` must run now, even if there is other work."""
        return self._clock() >= self._next

    def idle(self) -> float:
        """Do what is due; return the seconds until there may be more to do."""
        if self._lost:
            self._look(list(self._lost))
        if self.is_due:
            self._next = self._clock() + EVERY_S
            self.expire()
        return max(0.0, self._next - self._clock())

    def expire(self) -> None:
        """Forget the agents unused for too long, and check whether memory still has what only memory had."""
        now, book = self._now(), self._memory.book
        for namespace, agent in book.everybody():
            last_use = self._memory.last_use(namespace, agent)
            kind = kind_of(agent)
            ttl = self._rules.anonymous_ttl_s if kind.is_temporary else self._rules.agent_ttl_s
            is_old = not kind.is_memory or (ttl is not None and now - last_use > ttl)
            if is_old and book.pinned_until(namespace, agent, now) is None:
                self._memory.drop(namespace, agent)
        if self._memory.has_store:
            self._look(list(self._hot_only))
        else:
            self._look([(branch.namespace, branch.agent, branch.number) for branch in book.branches()])

    def lost(self, namespace: str, agent: str, number: int, num_tokens: int) -> None:
        """Record that the store has evicted part of a branch and has `num_tokens` left."""
        if self._memory.lost(namespace, agent, number, num_tokens):
            self._lost[namespace, agent, number] = None

    def bound(self) -> None:
        """Forget branches with nothing durable when there are too many, unnamed and least recently used first."""
        book, most = self._memory.book, self._rules.max_unsaved
        if book.num_unsaved <= most:
            return
        now = self._now()
        unsaved = [branch for branch in book.branches() if not branch.saved_tokens]
        for branch in sorted(unsaved, key=lambda branch: (not kind_of(branch.agent).is_temporary, branch.last_use)):
            if book.num_unsaved <= most - most // 10:
                return
            if book.pinned_until(branch.namespace, branch.agent, now) is None:
                self._memory.forget(branch)

    def _look(self, keys: Sequence[tuple[str, str, int]]) -> None:
        for key in keys:
            self._lost.pop(key, None)
            self._hot_only.pop(key, None)
        branches = [branch for key in keys if (branch := self._memory.book.get(*key)) is not None]
        if branches:
            answer = self._ask_hot(branches)
            answer.add_done_callback(lambda done: self._run(lambda: self._judge(branches, done)))

    def _judge(self, branches: Sequence[Branch], answer: Future[list[int]]) -> None:
        """Forget branches that are neither in memory nor on disk; cut those of which the disk has more than memory."""
        if answer.exception() is not None:
            return  # the engine has ended, and its memory with it
        durable = self._memory.durable()
        num_ends = Counter(record.head for record in durable.values() if kind_of(record.agent).is_memory)
        for branch, hot_tokens in zip(branches, answer.result(), strict=True):
            key = branch.namespace, branch.agent, branch.number
            if self._memory.book.get(*key) is not branch:
                continue  # used or saved meanwhile
            if not branch.saved_tokens and hot_tokens < LEFT_SHARE * branch.num_tokens:
                self._memory.forget(branch)
            elif not self._memory.has_store or branch.saved_tokens == branch.num_tokens:
                continue
            elif not isinstance(branch, KnownBranch) or hot_tokens <= branch.saved_tokens:
                left = durable.get(key)
                if left is not None and num_ends[left.head] > 1:
                    num_ends[left.head] -= 1
                    left = None
                self._memory.cut(branch, left)
            else:
                self._hot_only[key] = None
