"""What people ask of agents' memories: forget, purge, pin, fork, rewind. Each is done in the book at once and ordered
from the store; the caller waits for the command, not the intake, and has it undone here where the store refuses.

Owned by the intake thread, as the memory it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.agent_ids import kind_of
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.save_queue import Forgotten, Moved, Pinned, Purged
from rekindle.engine.core.purge import Purge
from rekindle.engine.memory.branches import Branch, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.sequences import branch_hashes, durable_tokens, to_save
from rekindle.errors import BadRequest, NotFound


@dataclass(frozen=True, slots=True)
class Before:
    """Branches as they were before a change, and until when (wall clock) an agent of theirs was pinned."""

    branches: tuple[Branch, ...]
    pinned_until: float | None = None

    def without_ids(self) -> Before:
        """The same branches, to be read from the store where it still has them."""
        return replace(self, branches=tuple(each.without_ids() for each in self.branches))


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind left, what was before it, and the store's part of it."""

    num_tokens: int
    before: Before
    command: Moved | Forgotten


class AgentCommands:
    """Changes of one engine's agents. Raises NotFound for an agent that is not known.

    `void` is told of whoever is forgotten: what was to be made of the agent's last turn goes, too.
    """

    def __init__(
        self,
        memory: AgentMemory,
        *,
        cancel_anticipation: Callable[[str, str], None],
        block_tokens: int,
        now: Callable[[], float],
    ) -> None:
        self._memory = memory
        self._cancel_anticipation = cancel_anticipation
        self._block_tokens = block_tokens
        self._now = now
        # Forgotten, with bytes that may be left on disk: to be purged again, though nothing is known of them.
        self.unproved: set[tuple[str, str]] = set()

    def _known(self, namespace: str, agent: str) -> None:
        if not self._memory.book.of(namespace, agent):
            raise NotFound(f"no agent {agent!r}", param="agent")

    def _take_out(self, namespace: str, agent: str) -> tuple[Before, list[Branch]]:
        """Take an agent's branches out of the book, and what is kept for it, which may be all that is left."""
        if not self._memory.breakpoints.of(namespace, agent) and (namespace, agent) not in self.unproved:
            self._known(namespace, agent)
        self._cancel_anticipation(namespace, agent)
        self._memory.know_agent(namespace, agent)
        until = self._memory.book.pinned_until(namespace, agent, self._now())
        kept = self._memory.breakpoints.take_out(namespace, agent)
        return Before((*self._memory.take_out(namespace, agent), *kept), until), kept

    def delete(self, namespace: str, agent: str) -> tuple[Before, list[Forgotten]]:
        """Forget an agent everywhere but in hot memory; return its branches (with ids where they were at hand), and
        the commands whose `done` tells when the store has forgotten them, too."""
        before, kept = self._take_out(namespace, agent)
        commands = [Forgotten(namespace, name) for name in (*(each.agent for each in kept), agent)]
        for command in commands:
            self._memory.save(command)
        return before, commands

    def purge(self, namespace: str, agent: str, idle: frozenset[BlockHash]) -> tuple[Before, Purge]:
        """Forget an agent; return its branches, and what is to be overwritten in memory (`idle`: held by nobody when it
        was asked for). The commands in it tell when the store has overwritten its part."""
        before, kept = self._take_out(namespace, agent)
        marked = tuple(Purged(namespace, branch.agent) for branch in kept)
        command, size = Purged(namespace, agent), self._block_tokens
        for each in (*marked, command):
            self._memory.save(each)
        own = frozenset[BlockHash]().union(*(branch_hashes(branch, size) for branch in before.branches))
        return before, Purge(command, own, self.claimed(), idle, marked)

    def claimed(self) -> frozenset[BlockHash]:
        """The blocks that branches of the book use, at least their heads."""
        branches = self._memory.book.branches()
        return frozenset[BlockHash]().union(*(branch_hashes(branch, self._block_tokens) for branch in branches))

    def pin(self, namespace: str, agent: str, until: float) -> tuple[Pinned, float]:
        """Keep an agent until then (wall clock; 0: no longer); the command's `done` tells when the store does, too, and
        the number until when it was pinned before. QuotaExceeded where the namespace may not pin so much."""
        self._known(namespace, agent)
        before = self._memory.book.pinned_until(namespace, agent, self._now()) or 0.0
        return self._memory.pins.pin(namespace, agent, until), before

    def undo_pin(self, command: Pinned, before: float) -> None:
        """Have an agent pinned as it was before."""
        if self._memory.book.of(command.namespace, command.agent):
            self._memory.book.pin(command.namespace, command.agent, before)

    def restore(self, before: Before) -> None:
        """Take back branches that the store could not forget, so that they are seen and can be deleted again."""
        for branch in before.branches:
            if self._memory.book.get(branch.namespace, branch.agent, branch.number) is None:
                self._put(branch)
        named = [branch for branch in before.branches if kind_of(branch.agent).is_memory]
        if named and before.pinned_until is not None:
            self._memory.book.pin(named[0].namespace, named[0].agent, before.pinned_until)

    def _put(self, branch: Branch) -> None:
        self._memory.book.put(branch)
        if not kind_of(branch.agent).is_memory:
            self._memory.breakpoints.know(branch.namespace, branch.agent)
        elif isinstance(branch, KnownBranch):
            self._memory.index(branch)

    def unsaved(self, namespace: str, agent: str) -> list[Branch]:
        """Branches of an agent of which less is durable than could be."""
        return [
            branch
            for branch in self._memory.know_agent(namespace, agent)
            if branch.saved_tokens < durable_tokens(branch, self._block_tokens)
        ]

    def branches_to_evict(self, namespace: str, agent: str) -> list[KnownBranch]:
        """What is to leave memory; what was to be made of the last turn would bring it back."""
        self._cancel_anticipation(namespace, agent)
        return self._memory.know_agent(namespace, agent)

    def fork(self, namespace: str, source: str, target: str) -> tuple[list[KnownBranch], Moved]:
        """Give `target` every branch of `source`, sharing all blocks; refused if `target` has a memory already.

        Returns its branches, and the command that makes them durable.
        """
        branches = self._memory.know_agent(namespace, source)
        if not branches:
            raise NotFound(f"no agent {source!r} to fork from", param="agent")
        if self._memory.book.of(namespace, target):
            raise BadRequest(f"agent {target!r} has a memory already: delete it or fork to another id", param="agent")
        copies = [replace(branch, agent=target, saved_tokens=0, last_use=self._now()) for branch in reversed(branches)]
        for copy in copies:
            self._put(copy)
        command = Moved(namespace, target, "fork", to_save(copies, self._block_tokens))
        self._memory.save(command)
        return copies, command

    def undo_fork(self, copies: Sequence[Branch]) -> None:
        """Forget what a fork gave, as far as nobody has gone on from it; a store that hangs does so in the end."""
        for copy in copies:
            now = self._memory.book.get(copy.namespace, copy.agent, copy.number)
            if now is not None and (now.head, now.num_tokens) == (copy.head, copy.num_tokens):
                self._memory.unindex(now)
                self._memory.book.remove(now)
                self._memory.save(Forgotten(now.namespace, now.agent, now.number))

    def rewind(self, namespace: str, agent: str, turns: int) -> Rewound:
        """Take back the last turns of the branch used last.

        With no more turns than that left, the branch is forgotten.
        """
        branches = self._memory.know_agent(namespace, agent)
        if not branches:
            raise NotFound(f"no agent {agent!r} to rewind", param="agent")
        branch = branches[0]
        if not 1 <= turns <= len(branch.turn_ends):
            raise BadRequest(
                f"agent {agent!r} has {len(branch.turn_ends)} turns, {turns} cannot be taken back", param="turns"
            )
        before = Before((branch,), self._memory.book.pinned_until(namespace, agent, self._now()))
        left = branch.turn_ends[: len(branch.turn_ends) - turns]
        if not left:
            return Rewound(0, before, self._memory.forget(branch))
        shorter = self._shortened(branch, left)
        self._memory.unindex(branch)
        self._put(shorter)
        command = Moved(namespace, agent, "rewind", to_save([shorter], self._block_tokens))
        self._memory.save(command)
        return Rewound(shorter.num_tokens, before, command)

    def _shortened(self, branch: KnownBranch, turn_ends: tuple[int, ...]) -> KnownBranch:
        end = turn_ends[-1]
        last = (end - 1) // self._block_tokens
        return replace(
            branch,
            ids=branch.ids[:end],
            hashes=branch.hashes[: end // self._block_tokens],
            head=branch.hashes[last] if last < len(branch.hashes) else branch.head,
            num_tokens=end,
            canonical_tokens=min(branch.canonical_tokens, end),
            saved_tokens=min(branch.saved_tokens, end),
            turn_ends=turn_ends,
            last_use=self._now(),
        )

    def undo_rewind(self, rewound: Rewound) -> None:
        """Have the branch as it was, unless somebody has gone on from what was left."""
        (branch,) = rewound.before.branches
        now = self._memory.book.get(branch.namespace, branch.agent, branch.number)
        if now is not None and now.num_tokens == rewound.num_tokens:
            self._memory.unindex(now)
            self._put(branch)
        elif now is None:
            self.restore(rewound.before)
