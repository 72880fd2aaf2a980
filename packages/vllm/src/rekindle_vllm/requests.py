"""A request of another engine as the planner knows it: its records by name, and how far they are saved.

Sees token counts and token ids, no blocks and no tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, BlockIdentity, TokenIds, block_hash, token_ids
from rekindle.store.values import StoredBlock
from rekindle_vllm.names import Scope


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """A request of the engine. `token_ids` is its live sequence: prompt, then reply.

    Only its first `limit` tokens are matched and saved (None: all), those that token ids alone determine.
    """

    request_id: str
    token_ids: Sequence[int]
    scope: Scope
    agent: str | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in a step: tokens computed before it, and tokens in it.

    `begins`: it is new, or resumed with other blocks. `states`: what the engine keeps of it after this step, each the
    number of a group, a block of it, and the tokens after which that block has the state.
    """

    request_id: str
    computed: int
    tokens: int
    begins: bool = False
    states: Sequence[tuple[int, int, int]] = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of a prompt was not computed: tokens of it, found in the engine's memory and loaded from disk.

    `failed`: tokens that were to be loaded and were computed after all, as their records could not be read.
    """

    prompt_tokens: int
    hot: int
    loaded: int
    failed: int

    @property
    def reused(self) -> int:
        """Tokens that were not computed."""
        return self.hot + self.loaded


@dataclass(slots=True, eq=False)
class Tracked:
    """A request and its records; `hot` is None until it is scheduled.

    `done`: records that are saved, queued or offered. `points`: tokens after which the engine may go on, as their parts
    that end were loaded or offered; those up to `since` were considered. `kept`: the records of these, by part.
    `unread`: records that could not be loaded since it was last scheduled; from `readable` on none is tried again.
    """

    request: EngineRequest
    root: BlockHash
    record_tokens: int
    prompt_tokens: int = field(init=False)
    limit: int = field(init=False)
    names: list[BlockHash] = field(default_factory=list)
    asked: tuple[int, int] | None = None  # with how many ids and computed tokens
    found: tuple[int, list[StoredBlock]] = (0, [])  # from which record on
    promised: int = 0
    arrived: int = 0  # tokens that were loaded for it, or will be, while it waits
    done: int = 0
    offered: set[int] = field(default_factory=set)
    points: list[int] = field(default_factory=list)
    since: int = 0
    kept: set[tuple[int, int]] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    readable: int = 1 << 62
    is_prompt_saved: bool = False
    tainted: bool = False
    ended: bool = False
    hot: int | None = None
    loaded: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.token_ids)
        self.limit = 1 << 62 if self.request.limit is None else self.request.limit

    @property
    def reuse(self) -> Reuse | None:
        """What of its prompt was not computed; None if it was never scheduled."""
        return None if self.hot is None else Reuse(self.prompt_tokens, self.hot, self.loaded, self.failed)

    def extend_names(self, num_records: int) -> None:
        """Name the first `num_records` records; ids of a request never change once it has them."""
        have = len(self.names)
        if have >= num_records:
            return
        parent = self.names[-1] if have else self.root
        for ids in self.ids(have, num_records).reshape(-1, self.record_tokens):
            parent = block_hash(parent, ids)
            self.names.append(parent)

    def ids(self, first: int, end: int) -> TokenIds:
        """Token ids of records `first` to `end`."""
        part = self.request.token_ids[first * self.record_tokens : end * self.record_tokens]
        return np.array(token_ids(list(part)))

    def forget_from(self, record: int) -> None:
        """Count no part of this record and of later ones as kept, and no point that needs one."""
        self.points = [point for point in self.points if point <= record * self.record_tokens]
        self.kept = {(part, number) for part, number in self.kept if number < record}

    def points_from_start(self, step: int) -> set[int]:
        """Its points; where there is none in its prompt, also the last multiple of `step` that it began with."""
        start = ((self.hot or 0) + self.loaded) // step * step
        has_none = not any(point <= self.prompt_tokens for point in self.points)
        return {*self.points, start} if start and has_none else {*self.points}

    def points_in(self, names: Sequence[BlockHash]) -> list[int]:
        """The points that it shares with a request whose records have these names."""
        most = min(len(names), len(self.names))
        common = bisect_left(range(most), True, key=lambda record: self.names[record] != names[record])
        return [point for point in self.points if point <= common * self.record_tokens]

    def parent(self, record: int) -> BlockHash:
        """The name before that of a record."""
        return self.names[record - 1] if record else self.root

    def identities(self, records: Sequence[int]) -> Iterator[BlockIdentity]:
        """What these records, all of which have names, are in the store."""
        for number in records:
            yield BlockIdentity(self.names[number], self.parent(number), self.root, self.ids(number, number + 1))
