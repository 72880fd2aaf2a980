"""Collection: heads that are too old or too many are emptied, and objects that no head names are deleted.

An object that a head names is never deleted, and none that was written lately, as the head that will name it may not be
written yet. So objects are listed first, heads read after that, and each object is looked at once more before it goes.
A head is emptied by a swap, never deleted: it may be written at the same moment.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle_tier.exports import KNOWN_S
from rekindle_tier.heads import AgentHead, NewerHead, decode_head, tails
from rekindle_tier.objects import Listed, Objects
from rekindle_tier.sealing import BLOCKS, HEADS, PURGED, BadObject, Version, block_name

YOUNG_S = 2 * KNOWN_S  # so long nothing is deleted that no head names
TOMBSTONE_S = 30 * 86400.0  # replicas that were away for longer may not hear that an agent was purged
AT_ONCE = 256  # objects that are deleted, or heads that are read, together


@dataclass(frozen=True, slots=True)
class Limits:
    """How large the tier may become, in bytes of objects, and for how many seconds an unused agent is kept; None: no
    limit."""

    num_bytes: int | None = None
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did: heads emptied, objects and bytes deleted, and bytes of blocks that are left."""

    heads_emptied: int
    objects_deleted: int
    bytes_deleted: int
    bytes_left: int


@dataclass(frozen=True, slots=True)
class _Read:
    """An agent's head as it is in the tier, and the objects that it names."""

    name: str
    head: AgentHead
    version: Version
    names: frozenset[str]

    @property
    def last_use(self) -> float:
        return max(branch.last_use for branch in self.head.branches)


class Collection:
    """Collects in one tier. One replica at a time is enough; several do no harm. `now` is wall clock."""

    def __init__(
        self, objects: Objects, block_tokens: int, limits: Limits, *, now: Callable[[], float] = time.time
    ) -> None:
        self._objects = objects
        self._block_tokens = block_tokens
        self._limits = limits
        self._now = now

    def run(self) -> Collected:
        """Collect; TierUnavailable if the object store does not answer, NewerHead if another version writes there."""
        blocks = {each.name: each for each in self._objects.list(BLOCKS)}
        heads = list(self._heads())
        emptied = [each for each in self._superfluous(heads, blocks) if self._empty(each)]
        left = {each.name for each in heads} - {each.name for each in emptied}
        named = frozenset[str]().union(*(each.names for each in heads if each.name in left))
        deleted = self._delete([each for name, each in blocks.items() if name not in named])
        num_bytes = sum(each.num_bytes for each in deleted)
        bytes_left = sum(each.num_bytes for each in blocks.values()) - num_bytes
        self._delete_tombstones()
        return Collected(len(emptied), len(deleted), num_bytes, bytes_left)

    def delete_unshared(self, head: AgentHead) -> tuple[int, int]:
        """Delete the objects that a head names, or named when one of its turns ended, and no head in the tier does,
        however young they are; return how many, and how many stay because other agents share them."""
        names = self._names(head) | self._past_names(head)
        shared = frozenset[str]().union(*(each.names & names for each in self._heads()))
        doomed = sorted(names - shared)
        for start in range(0, len(doomed), AT_ONCE):
            self._objects.delete(doomed[start : start + AT_ONCE])
        return len(doomed), len(shared)

    def _heads(self) -> Iterator[_Read]:
        """Yield the heads that name something; a damaged one names nothing. NewerHead: nobody knows what it names."""
        for listed in self._objects.list(HEADS):
            try:
                got = self._objects.get(listed.name)
                head = None if got is None else decode_head(got[0])
            except NewerHead:
                raise
            except BadObject:
                continue
            if got is not None and head is not None and head.branches:
                yield _Read(listed.name, head, got[1], self._names(head))

    def _names(self, head: AgentHead) -> frozenset[str]:
        names: set[str] = set()
        for branch in head.branches:
            for at, block in enumerate(branch.blocks(self._block_tokens)):
                having = (part for part, blocks in branch.parts.items() if at in blocks)
                names.update(block_name(block.hash, part) for part in (0, *having))
        return frozenset(names)

    def _past_names(self, head: AgentHead) -> frozenset[str]:
        return frozenset(
            block_name(tail, part)
            for branch in head.branches
            for tail in tails(branch, self._block_tokens)
            for part in (0, *branch.parts)
        )

    def _superfluous(self, heads: Sequence[_Read], blocks: Mapping[str, Listed]) -> Iterator[_Read]:
        """Yield the heads to empty: those unused for too long, then the least recently used while there is too much."""
        uses = Counter(name for each in heads for name in each.names)
        num_bytes = sum(blocks[name].num_bytes for name in uses if name in blocks)
        most, ttl_s = self._limits.num_bytes, self._limits.ttl_s
        for each in sorted(heads, key=lambda read: read.last_use):
            is_old = ttl_s is not None and each.last_use < self._now() - ttl_s
            if not is_old and (most is None or num_bytes <= most):
                continue
            for name in each.names:
                uses[name] -= 1
                if not uses[name] and name in blocks:
                    num_bytes -= blocks[name].num_bytes
            yield each

    def _empty(self, read: _Read) -> bool:
        """Empty a head unless it has been written since it was read."""
        return self._objects.swap(read.name, replace(read.head, branches=()).encode(), read.version) is not None

    def _delete(self, candidates: Sequence[Listed]) -> list[Listed]:
        """Delete those of these objects that have not been written lately."""
        deleted = []
        for each in candidates:
            if each.modified > self._now() - YOUNG_S:
                continue
            modified = self._objects.modified(each.name)
            if modified is not None and modified <= self._now() - YOUNG_S:
                self._objects.delete([each.name])
                deleted.append(each)
        return deleted

    def _delete_tombstones(self) -> None:
        old = [each.name for each in self._objects.list(PURGED) if each.modified < self._now() - TOMBSTONE_S]
        for start in range(0, len(old), AT_ONCE):
            self._objects.delete(old[start : start + AT_ONCE])
