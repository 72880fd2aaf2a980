"""What people ask of agents' memories: forget, purge, pin, fork, rewind. Each is done in the book at once and ordered
from the store; whoever asked waits for the order, not the intake.

Owned by the intake thread, as the memory it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rekindle.cache.hashing import BlockHash
from rekindle.engine.branches import Branch
from rekindle.engine.keeping import is_kept
from rekindle.engine.memory import AgentMemory
from rekindle.engine.purging import Purge
from rekindle.engine.saving import Forgotten, Pinned, Purged
from rekindle.engine.sequences import record_of, stands_on
from rekindle.errors import BadRequest, NotFound


class AgentEdits:
    """Changes of one engine's agents. Raises NotFound for an agent that is not known.

    `void` is told of whoever is forgotten: what was to be made of the agent's last turn goes, too.
    """

    def __init__(
        self, memory: AgentMemory, *, void: Callable[[str, str], None], block_tokens: int, now: Callable[[], float]
    ) -> None:
        self._memory = memory
        self._void = void
        self._block_tokens = block_tokens
        self._now = now

    def _known(self, namespace: str, agent: str) -> None:
        if not self._memory.book.of(namespace, agent):
            raise NotFound(f"no agent {agent!r}", param="agent")

    def _take_out(self, namespace: str, agent: str) -> tuple[list[Branch], list[Branch]]:
        """Take an agent's branches out of the book, and what is kept for it, which may be all that is left."""
        if not self._memory.keeping.of(namespace, agent):
            self._known(namespace, agent)
        self._void(namespace, agent)
        self._memory.know_agent(namespace, agent)
        return self._memory.take_out(namespace, agent), self._memory.keeping.take_out(namespace, agent)

    def delete(self, namespace: str, agent: str) -> tuple[list[Branch], list[Forgotten]]:
        """Forget an agent everywhere but in hot memory; return its branches (with ids where they were at hand), and
        the orders whose `done` tells when the store has forgotten them, too."""
        branches, kept = self._take_out(namespace, agent)
        orders = [Forgotten(namespace, name) for name in (*(each.agent for each in kept), agent)]
        for order in orders:
            self._memory.save(order)
        return [*branches, *kept], orders

    def purge(self, namespace: str, agent: str, idle: frozenset[BlockHash]) -> tuple[list[Branch], Purge]:
        """Forget an agent; return its branches, and what is to be overwritten in memory (`idle`: held by nobody when it
        was asked for). The orders in it tell when the store has overwritten its part."""
        branches, kept = self._take_out(namespace, agent)
        marked = tuple(Purged(namespace, branch.agent) for branch in kept)
        order, size = Purged(namespace, agent), self._block_tokens
        for each in (*marked, order):
            self._memory.save(each)
        branches = [*branches, *kept]
        own = frozenset[BlockHash]().union(*(stands_on(branch, size) for branch in branches))
        claimed = frozenset[BlockHash]().union(*(stands_on(branch, size) for branch in self._memory.book.branches()))
        return branches, Purge(order, own, claimed, idle, marked)

    def pin(self, namespace: str, agent: str, until: float) -> Pinned:
        """Keep an agent until then (wall clock; 0: no longer); the order's `done` tells when the store does, too."""
        self._known(namespace, agent)
        self._memory.book.pin(namespace, agent, until)
        order = Pinned(namespace, agent, until)
        self._memory.save(order)
        return order

    def restore(self, branches: Sequence[Branch]) -> None:
        """Take back branches that the store could not forget, so that they are seen and can be deleted again."""
        for branch in branches:
            if self._memory.book.get(branch.namespace, branch.agent, branch.number) is None:
                self._memory.book.put(replace(branch, ids=None, names=None))
                if is_kept(branch.agent):
                    self._memory.keeping.know(branch.namespace, branch.agent)

    def branches_to_evict(self, namespace: str, agent: str) -> list[Branch]:
        """What is to leave memory; what was to be made of the last turn would bring it back."""
        self._void(namespace, agent)
        return self._memory.know_agent(namespace, agent)

    def fork(self, namespace: str, source: str, target: str) -> None:
        """Give `target` every branch of `source`, sharing all blocks; refused if `target` has a memory already."""
        branches = self._memory.know_agent(namespace, source)
        if not branches:
            raise NotFound(f"no agent {source!r} to fork from", param="agent")
        if self._memory.book.of(namespace, target):
            raise BadRequest(f"agent {target!r} has a memory already: delete it or fork to another id", param="agent")
        for branch in reversed(branches):
            twin = replace(branch, agent=target, saved_tokens=0, last_use=self._now())
            self._memory.book.put(twin)
            self._memory.index(twin)
            self._memory.save(record_of(twin))

    def rewind(self, namespace: str, agent: str, turns: int) -> int:
        """Take back the last turns of the branch used last; return the tokens that are left.

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
        left = branch.turn_ends[: len(branch.turn_ends) - turns]
        self._memory.unindex(branch)
        if not left:
            self._memory.forget(branch)
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
        self._memory.book.put(shorter)
        self._memory.index(shorter)
        self._memory.save(record_of(shorter))
        return end
