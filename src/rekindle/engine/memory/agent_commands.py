"""Commands on agents' memories: forget, purge, pin, fork, rewind.

Each takes effect in the book at once and is submitted to the store as a command; the caller waits for that command, not
the intake, and undoes the change here if the store refuses. Owned by the intake thread, like the memory it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.agent_ids import kind_of
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.core.purge import HotPurge
from rekindle.engine.memory.branches import Branch, KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.engine.memory.sequences import branch_hashes, durable_tokens, to_save
from rekindle.errors import BadRequest, NotFound
from rekindle.store.commands import Delete, Move, Pin, Purge
from rekindle.store.values import SequenceRecord


@dataclass(frozen=True, slots=True)
class Before:
    """Branches as they were before a change, and until when (wall clock) their agent was pinned."""

    branches: tuple[Branch, ...]
    pinned_until: float | None = None

    def without_ids(self) -> Before:
        """Return the same branches, whose ids are read from the store if it still has them."""
        return replace(self, branches=tuple(each.without_ids() for each in self.branches))


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind left, the state before it, and its command to the store."""

    num_tokens: int
    before: Before
    command: Move | Delete


class AgentCommands:
    """Changes of one engine's agents. Raises NotFound for an agent that is not known.

    `cancel_anticipation` drops idle work for an agent's next prompt; called if it is forgotten or offloaded.
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
        # Forgotten agents that may have bytes left on disk: they can be purged again, though nothing else is known.
        self.unproved: set[tuple[str, str]] = set()

    def _known(self, namespace: str, agent: str) -> None:
        if not self._memory.book.of(namespace, agent):
            raise NotFound(f"no agent {agent!r}", param="agent")

    def _take_out(self, namespace: str, agent: str) -> tuple[Before, list[Branch]]:
        """Remove an agent's branches and breakpoints from the book; the latter may be all that is left of it."""
        if not self._memory.breakpoints.of(namespace, agent) and (namespace, agent) not in self.unproved:
            self._known(namespace, agent)
        self._cancel_anticipation(namespace, agent)
        self._memory.know_agent(namespace, agent)
        until = self._memory.book.pinned_until(namespace, agent, self._now())
        kept = self._memory.breakpoints.take_out(namespace, agent)
        return Before((*self._memory.take_out(namespace, agent), *kept), until), kept

    def delete(self, namespace: str, agent: str) -> tuple[Before, list[Delete]]:
        """Forget an agent everywhere but in hot memory; return its branches (with ids if they were in memory), and the
        commands whose `done` is set when the store has forgotten them, too."""
        before, kept = self._take_out(namespace, agent)
        commands = [Delete(namespace, name) for name in (*(each.agent for each in kept), agent)]
        for command in commands:
            self._memory.save(command)
        return before, commands

    def purge(self, namespace: str, agent: str, idle: frozenset[BlockHash]) -> tuple[Before, HotPurge]:
        """Forget an agent; return its branches, and what to overwrite in memory (`idle`: blocks without a reference at
        the time of the request). The commands in it are done when the store has overwritten its part."""
        before, kept = self._take_out(namespace, agent)
        marked = tuple(Purge(namespace, branch.agent) for branch in kept)
        command, size = Purge(namespace, agent), self._block_tokens
        for each in (*marked, command):
            self._memory.save(each)
        own = frozenset[BlockHash]().union(*(branch_hashes(branch, size) for branch in before.branches))
        return before, HotPurge(command, own, self.claimed(), idle, marked)

    def claimed(self) -> frozenset[BlockHash]:
        """Return the blocks that branches of the book use, at least their heads."""
        branches = self._memory.book.branches()
        return frozenset[BlockHash]().union(*(branch_hashes(branch, self._block_tokens) for branch in branches))

    def pin(self, namespace: str, agent: str, until: float) -> tuple[Pin, float]:
        """Pin an agent until then (wall clock; 0: unpin); return the command, `done` when the store has it, and until
        when the agent was pinned before. QuotaExceeded if the namespace may not pin that much."""
        self._known(namespace, agent)
        before = self._memory.book.pinned_until(namespace, agent, self._now()) or 0.0
        return self._memory.pins.pin(namespace, agent, until), before

    def undo_pin(self, command: Pin, before: float) -> None:
        """Restore the pin an agent had before."""
        if self._memory.book.of(command.namespace, command.agent):
            self._memory.book.pin(command.namespace, command.agent, before)

    def restore(self, before: Before) -> None:
        """Put back branches that the store could not forget, so that they are listed and can be deleted again."""
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
        """Return the branches of an agent of which less is durable than could be."""
        return [
            branch
            for branch in self._memory.know_agent(namespace, agent)
            if branch.saved_tokens < durable_tokens(branch, self._block_tokens)
        ]

    def branches_to_offload(self, namespace: str, agent: str) -> list[KnownBranch]:
        """Return the branches to offload; idle work for the next prompt is cancelled, as it would load them again."""
        self._cancel_anticipation(namespace, agent)
        return self._memory.know_agent(namespace, agent)

    def since(
        self, namespace: str, agent: str, branches: Sequence[KnownBranch]
    ) -> tuple[list[Branch], list[KnownBranch]]:
        """Return which of an agent's branches are not durable, and which of the given ones are as they were; without
        those that a request has used since: they go on, and stay."""
        now = {each.number: each.last_use for each in self._memory.book.of(namespace, agent)}
        used = {each.number: each.last_use for each in branches}
        resting = [each for each in branches if now.get(each.number) == each.last_use]
        unsaved = [each for each in self.unsaved(namespace, agent) if each.last_use == used.get(each.number)]
        return unsaved, resting

    def fork(self, namespace: str, source: str, target: str) -> tuple[list[KnownBranch], Move]:
        """Give `target` every branch of `source`, sharing all blocks; BadRequest if `target` has a memory already.

        Returns the branches of `target`, and the command that makes them durable.
        """
        branches = self._memory.know_agent(namespace, source)
        if not branches:
            raise NotFound(f"no agent {source!r} to fork from", param="agent")
        self.check_new(namespace, target)
        copies = [replace(branch, agent=target, saved_tokens=0, last_use=self._now()) for branch in reversed(branches)]
        for copy in copies:
            self._put(copy)
        command = Move(namespace, target, "fork", to_save(copies, self._block_tokens))
        self._memory.save(command)
        return copies, command

    def check_new(self, namespace: str, agent: str) -> None:
        """Raise BadRequest if an agent has a memory."""
        if self._memory.book.of(namespace, agent):
            why = f"agent {agent!r} has a memory already: delete it, or choose another id for the new one"
            raise BadRequest(why, param="agent")

    def take_in(
        self, namespace: str, agent: str, branches: Sequence[KnownBranch], stored: Sequence[SequenceRecord]
    ) -> Move:
        """Give an agent these branches, whose blocks are stored as far as `stored` says; return the command that makes
        that durable. BadRequest if the agent has a memory."""
        self.check_new(namespace, agent)
        for branch in branches:
            self._put(branch)
        command = Move(namespace, agent, "import", tuple(stored))
        self._memory.save(command)
        return command

    def undo_fork(self, copies: Sequence[Branch]) -> None:
        """Forget what a fork or an import has put here and nobody has continued; a store that hangs forgets it
        later."""
        for copy in copies:
            now = self._memory.book.get(copy.namespace, copy.agent, copy.number)
            if now is not None and (now.head, now.num_tokens) == (copy.head, copy.num_tokens):
                self._memory.unindex(now)
                self._memory.book.remove(now)
                self._memory.save(Delete(now.namespace, now.agent, now.number))

    def rewind(self, namespace: str, agent: str, turns: int) -> Rewound:
        """Take back the last turns of the branch used last; if no turn is left, forget the branch."""
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
        if not left or not left[-1]:  # a turn may end at 0: where another reply took the place of its beginning
            return Rewound(0, before, self._memory.forget(branch))
        shorter = self._shortened(branch, left)
        self._memory.unindex(branch)
        self._put(shorter)
        command = Move(namespace, agent, "rewind", to_save([shorter], self._block_tokens))
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
        """Restore the branch, unless a request has continued what was left of it."""
        (branch,) = rewound.before.branches
        now = self._memory.book.get(branch.namespace, branch.agent, branch.number)
        if now is not None and now.num_tokens == rewound.num_tokens:
            self._memory.unindex(now)
            self._put(branch)
        elif now is None:
            self.restore(rewound.before)
