"""The scheduler's side: which records of each request are on disk, and which of its blocks are saved in which step.

Owns the requests of the engine that have records. Sees token counts and block ids, no tensors, and no engine's types:
the contract tests run it against a stub of the scheduler. Called by the scheduler's thread alone.

    tokens of a request   | computed before | computed in this step | not yet
    its records           | done: saved, queued or offered | offered now | ...

What a step was said to do is confirmed by the workers' report. `done` falls back to what they had: on a failed load,
on a full staging buffer, and with the engine's own count when it recomputes or preempts. A request that saw blocks
whose load failed, before these were computed again, saves nothing any more. After a step that the store had no room
for, nothing is saved for nine times as long: an engine that computes faster than its disk writes loses a tenth to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rekindle.bridge.codec import ABSENT
from rekindle.bridge.names import Scope
from rekindle.bridge.owner import RecordOwner
from rekindle.bridge.steps import Blocks, Load, Save, StepPlan, StepReport
from rekindle.cache.blocks.hashing import BlockHash, TokenIds, block_hash, token_ids
from rekindle.cache.blocks.identity import BlockIdentity
from rekindle.store.values import StoredBlock

logger = logging.getLogger(__name__)
PAUSE = 9  # seconds without saving for each second that saving took in vain


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
    """A request's part in a step: tokens computed before it, tokens in it, and blocks that it was given.

    `replaces`: the blocks are all that it has, as for a new or resumed request.
    """

    request_id: str
    computed: int
    tokens: int
    blocks: Sequence[int]
    replaces: bool = False


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
class _Tracked:
    """A request and its records; `hot` is None until it is scheduled."""

    request: EngineRequest
    root: BlockHash
    prompt_tokens: int
    limit: int
    names: list[BlockHash] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    asked: tuple[int, int] | None = None  # with how many ids and computed tokens
    found: tuple[int, list[StoredBlock]] = (0, [])  # from which record on
    promised: int = 0
    done: int = 0
    offered: set[int] = field(default_factory=set)
    tainted: bool = False
    ended: bool = False
    hot: int | None = None
    loaded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A load that no report has confirmed: the request's tokens `start` to `end`, and blocks by record."""

    tracked: _Tracked
    start: int
    end: int
    first: int
    blocks: tuple[Blocks, ...]
    is_first: bool


class Planner:
    """Plans the loads and saves of an engine whose blocks have `block_tokens` tokens."""

    def __init__(self, owner: RecordOwner, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._clock = clock
        self._block_tokens = block_tokens
        self._record_tokens = owner.layout.block_tokens
        assert self._record_tokens % block_tokens == 0, (self._record_tokens, block_tokens)
        self._per_record = self._record_tokens // block_tokens
        self._requests: dict[str, _Tracked] = {}
        self._loading: dict[int, _Loading] = {}
        self._saving: dict[int, tuple[_Tracked, int, int]] = {}  # with the first record and their number
        self._settled: list[int] = []
        self._dirty: set[int] = set()
        self._stopped = False
        self._paused_until = 0.0

    def match(self, request: EngineRequest, computed: int) -> int:
        """How many tokens after the `computed` ones are on disk: at most all but one. May be asked again."""
        tracked = self._tracked(request)
        if self._stopped:
            return 0
        asked = len(request.token_ids), computed
        if tracked.asked != asked:
            tracked.asked = asked
            tracked.found = self._find(tracked, computed)
        first, found = tracked.found
        return max(0, (first + len(found)) * self._record_tokens - computed)

    def _find(self, tracked: _Tracked, computed: int) -> tuple[int, list[StoredBlock]]:
        """The records from that of the `computed` token on that are on disk, and the number of the first."""
        usable = min(len(tracked.request.token_ids) - 1, tracked.limit) // self._record_tokens
        first = computed // self._record_tokens
        if usable <= first:
            return first, []
        self._extend_names(tracked, usable)
        parent = tracked.names[first - 1] if first else tracked.root
        ids = self._ids(tracked.request, first, usable)
        return first, self._owner.locate(tracked.names[first:usable], parent, ids)

    def promise(self, request_id: str, num_tokens: int) -> None:
        """The engine will load `num_tokens` of those that `match` found; 0: it computes them."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.promised = num_tokens

    def plan(self, step: Sequence[Scheduled]) -> StepPlan:
        """What the workers do in this step. Blocks of requests that were never matched are left alone."""
        known = [(self._requests[each.request_id], each) for each in step if each.request_id in self._requests]
        for tracked, each in known:
            if each.replaces:
                tracked.table = []
            tracked.table += each.blocks
        loads = [load for tracked, each in known if (load := self._load(tracked, each)) is not None]
        self._find_tainted(known)
        saves = [save for tracked, each in known if (save := self._save(tracked, each)) is not None]
        settled, self._settled = tuple(self._settled), []
        return StepPlan(self._owner.address, tuple(loads), tuple(saves), settled)

    def report(self, report: StepReport) -> None:
        """Take what became of a step's loads and saves."""
        if report.stalled_s:
            self._paused_until = self._clock() + PAUSE * report.stalled_s
        for key, count in report.loaded.items():
            if key in self._loading:
                self._confirm_load(self._loading.pop(key), count)
                self._settled.append(key)
        for key, count in report.saved.items():
            if key in self._saving:
                tracked, first, num_records = self._saving.pop(key)
                tracked.offered.discard(key)
                if count < num_records:
                    tracked.done = min(tracked.done, first + count)
                if key in report.unfit:
                    tracked.limit = min(tracked.limit, (first + count) * self._record_tokens)
                if tracked.ended and not tracked.offered:
                    self._save_turn(tracked)
        self._owner.forget([*report.loaded, *report.saved])

    def finish(self, request_id: str) -> Reuse | None:
        """The request ended, however it did: its turn is saved once its records are. None if it was never scheduled."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return None
        tracked.ended = True
        if not tracked.offered:
            self._save_turn(tracked)
        if tracked.hot is None:
            return None
        return Reuse(tracked.prompt_tokens, tracked.hot, tracked.loaded, tracked.failed)

    def stop(self) -> None:
        """Match and save nothing from now on: what the engine computes is no longer what the fingerprint says."""
        self._stopped = True

    def _tracked(self, request: EngineRequest) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            limit = 1 << 62 if request.limit is None else request.limit
            tracked = _Tracked(request, self._owner.root(request.scope), len(request.token_ids), limit)
            self._requests[request.request_id] = tracked
        return tracked

    def _load(self, tracked: _Tracked, each: Scheduled) -> Load | None:
        """The records that the engine counts as computed in this step, if it was promised any."""
        is_first, promised = tracked.hot is None, tracked.promised
        tracked.promised, tracked.asked = 0, None
        start = each.computed - promised
        if is_first:
            tracked.hot, tracked.loaded = start, promised
        if each.replaces:
            self._extend_names(tracked, start // self._record_tokens)
            tracked.done = self._owner.num_known(tracked.names[: start // self._record_tokens])
        if not promised:
            return None
        first, end = start // self._record_tokens, -(-each.computed // self._record_tokens)
        begin, found = tracked.found
        groups = tuple(self._wanted(tracked, record, start, each.computed) for record in range(first, end))
        key = self._owner.plan_load(found[first - begin : end - begin])
        self._loading[key] = _Loading(tracked, start, each.computed, first, groups, is_first)
        if tracked.done == first:  # so that loaded records are not looked up one by one
            tracked.done = each.computed // self._record_tokens
        return Load(key, groups)

    def _wanted(self, tracked: _Tracked, record: int, start: int, end: int) -> Blocks:
        """The blocks of a record, `ABSENT` those that do not lie between these tokens."""
        numbers = range(record * self._per_record, (record + 1) * self._per_record)
        return tuple(
            tracked.table[number]
            if start <= number * self._block_tokens and (number + 1) * self._block_tokens <= end
            else ABSENT
            for number in numbers
        )

    def _find_tainted(self, known: Sequence[tuple[_Tracked, Scheduled]]) -> None:
        """Mark requests that go on after blocks whose load failed, unless these are computed in this step."""
        if not self._dirty:
            return
        for tracked, each in known:
            end = -(-(each.computed + each.tokens) // self._block_tokens)
            self._dirty.difference_update(tracked.table[each.computed // self._block_tokens : end])
        for loading in self._loading.values():
            self._dirty.difference_update(*loading.blocks)
        for tracked, each in known:
            if not self._dirty.isdisjoint(tracked.table[: each.computed // self._block_tokens]):
                tracked.tainted = True

    def _save(self, tracked: _Tracked, each: Scheduled) -> Save | None:
        """The records that are complete after this step and not yet on their way."""
        tracked.done = min(tracked.done, each.computed // self._record_tokens)
        tokens = min(each.computed + each.tokens, len(tracked.request.token_ids), tracked.limit)
        end = tokens // self._record_tokens
        if tracked.tainted or self._stopped or end <= tracked.done or self._clock() < self._paused_until:
            return None
        self._extend_names(tracked, end)
        first = tracked.done + self._owner.num_sound(tracked.names[tracked.done : end])
        tracked.done = end
        if first == end:
            return None
        key = self._owner.plan_save(self._identities(tracked, first, end))
        tracked.offered.add(key)
        self._saving[key] = tracked, first, end - first
        table = set(tracked.table[: end * self._per_record])
        after = tuple(key for key, load in self._loading.items() if any(map(table.intersection, load.blocks)))
        size = self._per_record
        groups = (tuple(tracked.table[record * size : (record + 1) * size]) for record in range(first, end))
        return Save(key, tuple(groups), after)

    def _identities(self, tracked: _Tracked, first: int, end: int) -> Iterable[BlockIdentity]:
        ids = self._ids(tracked.request, first, end).reshape(-1, self._record_tokens)
        for number in range(first, end):
            parent = tracked.names[number - 1] if number else tracked.root
            yield BlockIdentity(tracked.names[number], parent, tracked.root, ids[number - first])

    def _confirm_load(self, loading: _Loading, count: int) -> None:
        if count == len(loading.blocks):
            return
        tracked = loading.tracked
        intact = max(loading.start, (loading.first + count) * self._record_tokens)
        self._dirty.update(block for blocks in loading.blocks[count:] for block in blocks if block != ABSENT)
        if loading.is_first:
            tracked.loaded, tracked.failed = intact - loading.start, loading.end - intact
        logger.warning(
            "%s: %d of %d tokens from disk could not be read and are computed",
            tracked.request.request_id,
            loading.end - intact,
            loading.end - loading.start,
        )

    def _save_turn(self, tracked: _Tracked) -> None:
        if tracked.done and not self._stopped:
            request = tracked.request
            self._owner.finish(request.scope, request.agent, tracked.root, tracked.names[: tracked.done])

    def _extend_names(self, tracked: _Tracked, num_records: int) -> None:
        """Name the first `num_records` records; ids of a request never change once it has them."""
        have = len(tracked.names)
        if have >= num_records:
            return
        parent = tracked.names[-1] if have else tracked.root
        for ids in self._ids(tracked.request, have, num_records).reshape(-1, self._record_tokens):
            parent = block_hash(parent, ids)
            tracked.names.append(parent)

    def _ids(self, request: EngineRequest, first: int, end: int) -> TokenIds:
        """Token ids of records `first` to `end`."""
        part = request.token_ids[first * self._record_tokens : end * self._record_tokens]
        return np.array(token_ids(list(part)))

    def check(self) -> None:
        """Assert that what is on its way belongs to requests, and that none has more done than it has names."""
        for tracked in self._requests.values():
            assert tracked.done <= len(tracked.names), f"{tracked.request.request_id} has saved what has no name"
            assert not tracked.ended, f"{tracked.request.request_id} ended and is still there"
        for key, (tracked, _, _) in self._saving.items():
            assert key in tracked.offered, f"save {key} is not its request's"
