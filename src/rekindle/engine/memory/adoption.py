"""Memory that was computed elsewhere becomes this engine's: texts of an agent, and blocks for the store.

Texts may come without their blocks: a prompt that continues them then runs with the same ids, and what is not stored is
computed. Blocks without a text are found by prompts that contain their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from rekindle.cache.blocks.hashing import chain_hashes
from rekindle.engine.memory.branches import KnownBranch
from rekindle.engine.memory.memory import AgentMemory
from rekindle.store.branch_text import BranchText
from rekindle.store.values import BlockBytes
from rekindle.store.warm import WarmStore

FULL_S = 0.001  # how long to wait for room in the staging buffer before looking again


class Adoption:
    """Takes in branches on the intake thread, blocks on any other."""

    def __init__(
        self,
        memory: AgentMemory,
        store: WarmStore,
        *,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._store = store
        self._block_tokens = block_tokens
        self._clock = clock

    def branches(self, namespace: str, agent: str, branches: Sequence[BranchText]) -> int:
        """Remember an agent's texts, the least recently used first; return how many were new. On the intake thread."""
        num_new = 0
        for branch in sorted(branches, key=lambda each: each.last_use):
            num_new += self._memory.adopt(known_branch(namespace, agent, 0, branch, self._block_tokens))
        return num_new

    def blocks(self, blocks: Iterable[BlockBytes], *, timeout_s: float) -> int:
        """Store blocks, parents before children; return how many. What has not fitted in time is left out."""
        deadline, num_staged = self._clock() + timeout_s, 0
        for block in blocks:
            while not self._store.stage(block):
                if self._clock() > deadline:
                    return num_staged
                time.sleep(FULL_S)
            num_staged += 1
        if num_staged:
            self._store.flush(max(0.0, deadline - self._clock()))
        return num_staged


def known_branch(namespace: str, agent: str, number: int, branch: BranchText, block_tokens: int) -> KnownBranch:
    """Return a text with at least one id as an agent's branch, of which nothing is durable yet."""
    *_, last = branch.blocks(block_tokens)
    num_tokens = len(branch.ids)
    return KnownBranch(
        namespace=namespace,
        agent=agent,
        number=number,
        root=branch.root,
        head=last.hash,
        num_tokens=num_tokens,
        canonical_tokens=min(branch.canonical_tokens, num_tokens),
        saved_tokens=0,
        last_use=branch.last_use,
        turn_ends=branch.turn_ends,
        ids=branch.ids,
        hashes=tuple(chain_hashes(branch.root, branch.ids, block_tokens)),
    )
