"""Limits how much of the disk a tenant may pin: pinned blocks are never evicted, so one tenant could fill the disk.

Half of a tenant's part of the disk; a single tenant may pin all of it. What was pinned when the engine started stays
pinned, however much it was. A pin beyond the limit is refused; if pinned agents grow beyond it, the least recently used
one is unpinned, which is logged. Owned by the intake thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from rekindle.agent_ids import kind_of
from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.memory.branches import BranchBook, KnownBranch
from rekindle.engine.memory.sequences import branch_hashes
from rekindle.errors import QuotaExceeded
from rekindle.store.commands import Pin, StoreCommand

logger = logging.getLogger(__name__)
PINNED_SHARE = 0.5  # of a tenant's part of the disk


def most_pinned(disk_blocks: int, num_tenants: int, namespace_share: float) -> float:
    """Return the blocks that each of the tenants may pin; inf for one that has the disk to itself."""
    part = min(namespace_share, 1 / num_tenants)
    return math.inf if part == 1 else PINNED_SHARE * part * disk_blocks


class Pins:
    """The pins in a branch book. `save` queues commands for the store after everything queued before."""

    def __init__(
        self,
        book: BranchBook,
        *,
        block_tokens: int,
        max_blocks: float,
        save: Callable[[StoreCommand], None],
        now: Callable[[], float],
    ) -> None:
        self._book = book
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._save = save
        self._now = now
        self._at_start: dict[str, int] = {}  # blocks by namespace, if more than the limit

    def know(self) -> None:
        """Record what is pinned in the book at the start."""
        if self._max_blocks < math.inf:
            for namespace in {namespace for namespace, _ in self._book.pins()}:
                num_blocks = self._num_blocks(namespace, self._of(namespace))
                if num_blocks > self._max_blocks:
                    self._at_start[namespace] = num_blocks

    def pin(self, namespace: str, agent: str, until: float) -> Pin:
        """Pin a known agent until then (wall clock; 0: unpin); QuotaExceeded if that is too much."""
        if until > 0 and self._max_blocks < math.inf:
            num_blocks = self._num_blocks(namespace, [*self._of(namespace, but=agent), agent])
            if num_blocks > self._most(namespace):
                raise QuotaExceeded(
                    f"pinned agents of namespace {namespace!r} may have {self._tokens(self._most(namespace))} tokens "
                    f"on disk, with {agent!r} they would have {self._tokens(num_blocks)}: unpin or delete some",
                    param="agent",
                )
        self._book.pin(namespace, agent, until)
        command = Pin(namespace, agent, until)
        self._save(command)
        return command

    def grown(self, namespace: str, agent: str) -> None:
        """After a turn of an agent, unpin the least recently used agents if too much is pinned."""
        if self._max_blocks == math.inf or self._book.pinned_until(namespace, agent, self._now()) is None:
            return
        pinned = sorted(self._of(namespace), key=lambda each: self._book.of(namespace, each)[0].last_use)
        while pinned and self._num_blocks(namespace, pinned) > self._most(namespace):
            oldest = pinned.pop(0)
            self._book.pin(namespace, oldest, 0.0)
            self._save(Pin(namespace, oldest, 0.0))
            logger.warning(
                "agent %s of %s is no longer pinned: pinned agents of a namespace may have %d tokens on disk",
                oldest,
                namespace,
                self._tokens(self._most(namespace)),
            )

    def _most(self, namespace: str) -> float:
        return max(self._max_blocks, self._at_start.get(namespace, 0))

    def _tokens(self, num_blocks: float) -> int:
        return int(num_blocks) * self._block_tokens

    def _of(self, namespace: str, but: str | None = None) -> list[str]:
        """Return the pinned agents of a namespace; breakpoints are excluded, they have their own limit."""
        now = self._now()
        mine = [agent for space, agent in self._book.pins() if space == namespace and agent != but]
        pinned = [agent for agent in mine if kind_of(agent).is_memory]
        return [agent for agent in pinned if self._book.pinned_until(namespace, agent, now) is not None]

    def _num_blocks(self, namespace: str, agents: list[str]) -> int:
        """Count the blocks these agents use; those of branches without ids count once for each branch."""
        known, num_unknown = set[BlockHash](), 0
        for agent in agents:
            for branch in self._book.of(namespace, agent):
                if isinstance(branch, KnownBranch):
                    known |= branch_hashes(branch, self._block_tokens)
                else:
                    num_unknown += -(-branch.num_tokens // self._block_tokens)
        return len(known) + num_unknown
