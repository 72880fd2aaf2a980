"""Beginnings of prompts that stay stored because requests marked them: a hidden sequence of its own for each.

Each stands on the blocks that its turn left, under a name made of the agent and the text before the mark, and is pinned
on disk until its time is over; whoever marks the same again pins it anew. One that another stands for (it begins with
the same text, and is kept as long) is not kept beside it; of too many those whose time ends first go before it, so that
pins never take the disk from the turns of others. They are nobody's memory: not matched, not counted, and gone with the
agent that asked for them. Owned by the intake thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from rekindle.agent_ids import breakpoint_prefix, kind_of
from rekindle.engine.blocks.save_queue import Forgotten, Pinned, StoreCommand
from rekindle.engine.memory.branches import Branch, BranchBook
from rekindle.engine.memory.sequences import record_of
from rekindle.engine.request import FinishedTurn

MOST_OF_AGENT = 16  # the rest ends first
RENEWED_SHARE = 0.1  # of its time, before a pin is written again


class Breakpoints:
    """The kept beginnings in a branch book. `save` queues orders for the store behind all that was queued before.

    All of a namespace have `max_tokens`, each block counted as often as it is kept.
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
        """Take in what the store has kept."""
        self._names.setdefault((namespace, name[: len(breakpoint_prefix(""))]), {})[name] = None

    def of(self, namespace: str, agent: str) -> list[Branch]:
        """What is kept for an agent; what has been forgotten meanwhile is not."""
        return self._in((namespace, breakpoint_prefix(agent)))

    def _in(self, key: tuple[str, str]) -> list[Branch]:
        found = {name: self._book.get(key[0], name, 0) for name in self._names.pop(key, ())}
        left = {name: None for name, branch in found.items() if branch is not None}
        if left:
            self._names[key] = left
        return [branch for branch in found.values() if branch is not None]

    def turn_ended(self, turn: FinishedTurn) -> None:
        """Keep what the turn's request marked, as far as whole blocks of it are on their way to the disk."""
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
        self._save(Pinned(turn.namespace, name, until))
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
        """Forget in the book what is kept for an agent; return it."""
        return [gone for branch in self.of(namespace, agent) for gone in self._book.drop(namespace, branch.agent)]

    def _forget(self, branch: Branch) -> None:
        self._book.drop(branch.namespace, branch.agent)
        self._save(Forgotten(branch.namespace, branch.agent))

    def _until(self, branch: Branch) -> float:
        return self._book.pinned_until(branch.namespace, branch.agent, self._now()) or 0.0

    def check(self) -> None:
        """Assert that every kept beginning in the book is known, under the mark of its agent."""
        for (namespace, mark), names in self._names.items():
            assert all(name.startswith(mark) for name in names), f"a name of {namespace} stands under another mark"
        kept = {each for each in self._book.everybody() if not kind_of(each[1]).is_memory}
        known = {(namespace, name) for (namespace, _), names in self._names.items() for name in names}
        assert kept <= known, f"{len(kept - known)} kept beginnings are in the book alone"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
