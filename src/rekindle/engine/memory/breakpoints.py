"""Cached breakpoints: prompt prefixes that stay stored because requests marked them, each as a hidden sequence.

Each uses the blocks of its turn, under a name made of the agent and the prefix, and is pinned on disk until it expires;
marking the same prefix again renews the pin. A prefix of a longer one that is kept as long is not stored separately; if
there are too many, those that expire first are dropped early, so that pins never take the disk from other agents'
turns. They are not part of any memory: not matched, not counted, and deleted with the agent that requested them. Owned
by the intake thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from rekindle.agent_ids import breakpoint_prefix, kind_of
from rekindle.engine.memory.branches import Branch, BranchBook
from rekindle.engine.memory.sequences import record_of
from rekindle.engine.request import FinishedTurn
from rekindle.store.commands import Delete, Pin, StoreCommand

MOST_OF_AGENT = 16  # beyond that the first to expire are dropped
RENEWED_SHARE = 0.1  # of its time must have passed before a pin is written again


class Breakpoints:
    """The cached breakpoints in a branch book. `save` queues commands for the store after everything queued before.

    Those of a namespace have at most `max_tokens` in total; tokens that several share count for each.
    """

    def __init__(
        self,
        book: BranchBook,
        *,
        block_tokens: int,
        max_tokens: float,
        save: Callable[[StoreCommand], None],
        now: Callable[[], float],
    ) -> None:
        self._book = book
        self._block_tokens = block_tokens
        self._max_tokens = max_tokens
        self._save = save
        self._now = now
        self._names: dict[tuple[str, str], dict[str, None]] = {}  # of each (namespace, mark of an agent)

    def know(self, namespace: str, name: str) -> None:
        """Register a breakpoint that the store has."""
        self._names.setdefault((namespace, name[: len(breakpoint_prefix(""))]), {})[name] = None

    def of(self, namespace: str, agent: str) -> list[Branch]:
        """Return the breakpoints of an agent that still exist."""
        return self._in((namespace, breakpoint_prefix(agent)))

    def _in(self, key: tuple[str, str]) -> list[Branch]:
        found = {name: self._book.get(key[0], name, 0) for name in self._names.pop(key, ())}
        left = {name: None for name, branch in found.items() if branch is not None}
        if left:
            self._names[key] = left
        return [branch for branch in found.values() if branch is not None]

    def turn_ended(self, turn: FinishedTurn) -> None:
        """Store the breakpoints of the turn's request, as far as they lie in full blocks queued for the disk."""
        now, longest = self._now(), min(len(turn.hashes) * self._block_tokens, turn.head_tokens)
        for mark in sorted(turn.breakpoints, key=lambda mark: -mark.num_tokens):
            num_tokens = min(mark.num_tokens, longest)
            if num_tokens:
                self._keep(turn, num_tokens, now + mark.ttl_s, now)

    def _keep(self, turn: FinishedTurn, num_tokens: int, until: float, now: float) -> None:
        size, chain = self._block_tokens, set(turn.hashes)
        head = turn.hashes[(num_tokens - 1) // size]
        stands_for = [(branch, self._until(branch)) for branch in self.of(turn.namespace, turn.agent)]
        for branch, kept_until in stands_for:
            is_within = branch.root == turn.root and branch.head in chain
            is_longer = branch.num_tokens >= num_tokens
            if is_within and is_longer and kept_until >= until - RENEWED_SHARE * (until - now):
                return
            if is_within and branch.num_tokens < num_tokens and kept_until <= until:
                self._forget(branch)
        name = breakpoint_prefix(turn.agent) + _digest(turn.root + head + num_tokens.to_bytes(4, "little"))
        known = self._book.get(turn.namespace, name, 0)
        branch = Branch(
            namespace=turn.namespace,
            agent=name,
            number=0,
            root=turn.root,
            head=head,
            num_tokens=num_tokens,
            canonical_tokens=min(turn.canonical_prompt, num_tokens),
            saved_tokens=known.saved_tokens if known is not None else 0,
            last_use=now,
            turn_ends=(num_tokens,),
        )
        self._book.put(branch)
        self._book.pin(turn.namespace, name, until)
        self.know(turn.namespace, name)
        if branch.saved_tokens < num_tokens:
            self._save(record_of(branch))
        self._save(Pin(turn.namespace, name, until))
        self._bound(turn)

    def _bound(self, turn: FinishedTurn) -> None:
        mine = sorted(self.of(turn.namespace, turn.agent), key=self._until)
        for branch in mine[: max(0, len(mine) - MOST_OF_AGENT)]:
            self._forget(branch)
        tenants = [branch for key in list(self._names) if key[0] == turn.namespace for branch in self._in(key)]
        num_tokens = sum(branch.num_tokens for branch in tenants)
        for branch in sorted(tenants, key=self._until) if num_tokens > self._max_tokens else ():
            if num_tokens > self._max_tokens:
                self._forget(branch)
                num_tokens -= branch.num_tokens

    def take_out(self, namespace: str, agent: str) -> list[Branch]:
        """Remove an agent's breakpoints from the book and return them."""
        return [gone for branch in self.of(namespace, agent) for gone in self._book.drop(namespace, branch.agent)]

    def _forget(self, branch: Branch) -> None:
        self._book.drop(branch.namespace, branch.agent)
        self._save(Delete(branch.namespace, branch.agent))

    def _until(self, branch: Branch) -> float:
        return self._book.pinned_until(branch.namespace, branch.agent, self._now()) or 0.0

    def check(self) -> None:
        """Assert that every breakpoint in the book is registered, under the prefix of its agent."""
        for (namespace, mark), names in self._names.items():
            assert all(name.startswith(mark) for name in names), f"a name of {namespace} is under another prefix"
        kept = {each for each in self._book.everybody() if not kind_of(each[1]).is_memory}
        known = {(namespace, name) for (namespace, _), names in self._names.items() for name in names}
        assert kept <= known, f"{len(kept - known)} breakpoints are in the book alone"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
