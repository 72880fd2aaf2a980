"""The scheduler's side: which records of each request are on disk, and which of its blocks are saved in which step.

Owns the requests of the engine that have records. Sees token counts and block ids, no tensors, and no engine's types:
the contract tests run it against a stub of the scheduler. Called by the scheduler's thread alone.

    tokens of a request   | computed before | computed in this step | not yet
    its records           | done: saved, queued or offered | offered now | ...

What a step was said to do is confirmed by the workers' report. `done` falls back to what they had: on a failed load,
on a full staging buffer, and with the engine's own count when it recomputes or preempts. After a step that the store
had no room for, nothing is saved for nine times as long: an engine that computes faster than its disk writes loses a
tenth to it.

With one KV cache group, loads are part of the step that needs them. A request that saw blocks whose load failed, before
these were computed again, saves nothing any more. With several, blocks have no names that a failure could be reported
by: requests wait until their records have come, and are matched again if some did not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.store.values import StoredBlock
from rekindle_vllm.groups import Groups, Tables
from rekindle_vllm.owner import RecordOwner
from rekindle_vllm.points import ResumePoints
from rekindle_vllm.requests import EngineRequest, Reuse, Scheduled, Tracked
from rekindle_vllm.steps import ABSENT, Blocks, Load, Save, StepPlan, StepReport

logger = logging.getLogger(__name__)
PAUSE = 9  # seconds without saving for each second that saving took in vain
TablesOf = Callable[[str], Tables]  # a request's blocks now, by its id


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """A load that no report has confirmed: a part of records, for the request's tokens `start` to `end`.

    `is_first`: the request was not scheduled before.
    """

    tracked: Tracked
    start: int
    end: int
    records: Sequence[int]
    blocks: tuple[Blocks, ...]
    is_first: bool
    part: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Saving:
    """A save that no report has confirmed: a part of these records of a request."""

    tracked: Tracked
    records: Sequence[int]
    part: int = 0


class Planner:
    """Plans the loads and saves of an engine with these KV cache groups."""

    def __init__(self, owner: RecordOwner, groups: Groups, clock: Callable[[], float] = time.monotonic) -> None:
        self._owner = owner
        self._clock = clock
        self._groups = groups
        self._points = ResumePoints(groups)
        self._record_tokens = owner.layout.block_tokens
        assert self._record_tokens == groups.record_tokens and len(owner.layout.parts) == len(groups.parts)
        assert len(groups) > 1 or groups.pieces_per_block(0) == 1, "failed blocks are reported whole"
        self._requests: dict[str, Tracked] = {}
        self._loading: dict[int, _Loading] = {}
        self._saving: dict[int, _Saving] = {}
        self._ahead: list[Load] = []  # of requests that wait for them
        self._settled: list[int] = []
        self._dirty: set[int] = set()
        self._stopped = False
        self._paused_until = 0.0

    @property
    def loads_ahead(self) -> bool:
        """Whether requests wait for what is loaded for them, as with several groups."""
        return len(self._groups) > 1

    def match(self, request: EngineRequest, computed: int) -> int:
        """How many tokens after the `computed` ones can be loaded: at most all but one. May be asked again."""
        tracked = self._tracked(request)
        if self._stopped:
            return 0
        asked = len(request.token_ids), computed
        if tracked.asked != asked:
            tracked.asked = asked
            tracked.found = self._find(tracked, computed)
        return self._points.last(*tracked.found, computed) - computed

    def _find(self, tracked: Tracked, computed: int) -> tuple[int, list[StoredBlock]]:
        """The records from that of the `computed` token on that are on disk, and the number of the first."""
        usable = min(min(len(tracked.request.token_ids) - 1, tracked.limit) // self._record_tokens, tracked.readable)
        first = computed // self._record_tokens
        if usable <= first:
            return first, []
        tracked.extend_names(usable)
        found = self._owner.locate(tracked.names[first:usable], tracked.parent(first), tracked.ids(first, usable))
        earliest = None if first else self._points.earliest(found)
        if earliest is not None and not tracked.points:
            tracked.points.append(earliest)
        return first, found

    def promise(self, request_id: str, num_tokens: int, tables: Tables = ()) -> None:
        """The engine will load `num_tokens` of those that `match` found; 0: it computes them.

        If requests wait for loads, into the blocks of `tables`, in the next step.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if num_tokens and self.loads_ahead:
            self._load_ahead(tracked, num_tokens, tables)
        else:
            tracked.promised = num_tokens

    def plan(self, step: Sequence[Scheduled], tables_of: TablesOf) -> StepPlan:
        """What the workers do in this step. Blocks of requests that were never matched are left alone."""
        known = [(self._requests[each.request_id], each) for each in step if each.request_id in self._requests]
        loads = [load for tracked, each in known if (load := self._load(tracked, each, tables_of)) is not None]
        self._find_tainted(known, tables_of)
        for tracked, each in known:
            self._save_prompt(tracked, each)
        saves = [save for tracked, each in known for save in self._saves(tracked, each, tables_of)]
        ahead, self._ahead = self._ahead, []
        settled, self._settled = tuple(self._settled), []
        return StepPlan(self._owner.address, (*loads, *ahead), tuple(saves), settled)

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
                self._confirm_save(key, self._saving.pop(key), count, is_unfit=key in report.unfit)
        self._owner.forget([*report.loaded, *report.saved])

    def finish(self, request_id: str) -> Reuse | None:
        """The request ended, however it did: its turn is saved once its records are. None if it was never scheduled."""
        tracked = self._requests.pop(request_id, None)
        if tracked is None:
            return None
        tracked.ended = True
        if not tracked.offered:
            self._save_turn(tracked)
        return tracked.reuse

    def stop(self) -> None:
        """Match and save nothing from now on: what the engine computes is no longer what the fingerprint says."""
        self._stopped = True

    def _tracked(self, request: EngineRequest) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, self._owner.root(request.scope), self._record_tokens)
            self._requests[request.request_id] = tracked
        return tracked

    def _load_ahead(self, tracked: Tracked, num_tokens: int, tables: Tables) -> None:
        """Plan the loads of all parts that the engine needs after `num_tokens` more than it was asked for."""
        assert tracked.asked is not None, f"{tracked.request.request_id} was not matched"
        start = tracked.asked[1]
        end, (begin, found) = start + num_tokens, tracked.found
        for part in self._groups.parts:
            records = [record for record in self._groups.needed(part, end) if record >= begin]
            blocks = tuple(self._groups.pieces(part, record, tables, start, end) for record in records)
            key = self._owner.plan_load([found[record - begin] for record in records], part)
            self._loading[key] = _Loading(tracked, start, end, records, blocks, tracked.hot is None, part)
            self._ahead.append(Load(key, blocks, part, tracked.request.request_id))
            tracked.kept.update((part, record) for record in records)
        tracked.arrived = num_tokens
        tracked.points.append(end)

    def _load(self, tracked: Tracked, each: Scheduled, tables_of: TablesOf) -> Load | None:
        """The records that the engine counts as computed in this step, if it was promised any."""
        is_first, promised, loaded = tracked.hot is None, tracked.promised, tracked.promised or tracked.arrived
        tracked.promised, tracked.arrived, tracked.asked = 0, 0, None
        start = each.computed - promised
        if is_first:
            tracked.hot, tracked.loaded = each.computed - loaded, loaded
            tracked.failed = max(0, tracked.failed - each.computed)
        if each.begins:
            tracked.since = each.computed
            tracked.readable = 1 << 62
            tracked.unread.clear()
            tracked.extend_names(start // self._record_tokens)
            tracked.done = self._owner.num_known(tracked.names[: start // self._record_tokens])
        if not promised:
            return None
        records = range(start // self._record_tokens, -(-each.computed // self._record_tokens))
        begin, found = tracked.found
        tables = tables_of(each.request_id)
        blocks = tuple(self._groups.pieces(0, record, tables, start, each.computed) for record in records)
        key = self._owner.plan_load(found[records.start - begin : records.stop - begin])
        self._loading[key] = _Loading(tracked, start, each.computed, records, blocks, is_first)
        if tracked.done == records.start:  # so that loaded records are not looked up one by one
            tracked.done = each.computed // self._record_tokens
        return Load(key, blocks)

    def _find_tainted(self, known: Sequence[tuple[Tracked, Scheduled]], tables_of: TablesOf) -> None:
        """Mark requests that go on after blocks whose load failed, unless these are computed in this step."""
        if not self._dirty:
            return
        size = self._groups.block_tokens(0)
        tables = {each.request_id: tables_of(each.request_id)[0] for _, each in known}
        for _, each in known:
            end = -(-(each.computed + each.tokens) // size)
            self._dirty.difference_update(tables[each.request_id][each.computed // size : end])
        for loading in self._loading.values():
            self._dirty.difference_update(*loading.blocks)
        for tracked, each in known:
            if not self._dirty.isdisjoint(tables[each.request_id][: each.computed // size]):
                tracked.tainted = True

    def _saves(self, tracked: Tracked, each: Scheduled, tables_of: TablesOf) -> Iterator[Save]:
        """What is complete after this step and not yet on its way: records, and their parts that end."""
        tracked.done = min(tracked.done, each.computed // self._record_tokens)
        tokens = min(each.computed + each.tokens, len(tracked.request.token_ids), tracked.limit)
        end = tokens // self._record_tokens
        if tracked.tainted or self._stopped or self._clock() < self._paused_until:
            return
        points, tracked.since = self._points.reached(tracked, each, tokens), max(tracked.since, tokens)
        if end <= tracked.done and not points:
            return
        tracked.extend_names(end)
        first = tracked.done + self._owner.num_sound(tracked.names[tracked.done : end])
        tracked.done = max(tracked.done, end)
        tables = tables_of(each.request_id) if first < end or points else ()
        if first < end:
            blocks = [self._groups.pieces(0, record, tables) for record in range(first, end)]
            yield self._save(tracked, range(first, end), blocks, self._loads_of(tables[0], end))
        for point in points:
            yield from self._save_point(tracked, point, tables)

    def _save(
        self,
        tracked: Tracked,
        records: Sequence[int],
        blocks: Sequence[Blocks],
        after: tuple[int, ...] = (),
        part: int = 0,
    ) -> Save:
        key = self._owner.plan_save(tracked.identities(records), part)
        tracked.offered.add(key)
        self._saving[key] = _Saving(tracked, records, part)
        return Save(key, tuple(blocks), after, part)

    def _save_point(self, tracked: Tracked, point: int, tables: Tables) -> Iterator[Save]:
        """Save the parts that end of the records that a point needs, as far as the engine has them.

        It is a point only if it has them all: after a pause some may have been given back.
        """
        for part in self._groups.ending_parts:
            records = [record for record in self._groups.needed(part, point) if (part, record) not in tracked.kept]
            blocks = {record: self._groups.pieces(part, record, tables) for record in records}
            whole = [record for record in records if ABSENT not in blocks[record]]
            if whole:
                tracked.kept.update((part, record) for record in whole)
                yield self._save(tracked, whole, [blocks[record] for record in whole], part=part)
        if self._groups.needs(point) <= tracked.kept:
            tracked.points.append(point)

    def _loads_of(self, table: Sequence[int], end: int) -> tuple[int, ...]:
        """The unconfirmed loads into the blocks of the first `end` records."""
        if not self._loading or self.loads_ahead:
            return ()
        blocks = set(table[: end * self._record_tokens // self._groups.block_tokens(0)])
        return tuple(key for key, load in self._loading.items() if any(map(blocks.intersection, load.blocks)))

    def _confirm_load(self, loading: _Loading, count: int) -> None:
        tracked, missing = loading.tracked, loading.records[count:]
        if not missing:
            return
        if self.loads_ahead:
            intact = loading.start
            self._match_again(loading, missing[0])
        else:
            intact = max(loading.start, missing[0] * self._record_tokens)
            self._dirty.update(block for blocks in loading.blocks[count:] for block in blocks if block != ABSENT)
            if loading.is_first:
                tracked.loaded, tracked.failed = intact - loading.start, loading.end - intact
        logger.warning(
            "%s: %d of %d tokens from disk could not be read and are computed",
            tracked.request.request_id,
            loading.end - intact,
            loading.end - loading.start,
        )

    def _match_again(self, loading: _Loading, missing: int) -> None:
        """Forget what was found for a request that waits: the engine will ask again, or compute it.

        The `missing` record loses its other parts when it is saved again, so that they are saved again, too. If it is
        found once more and still cannot be read, the request computes it.
        """
        tracked = loading.tracked
        tracked.asked, tracked.arrived = None, 0
        if missing in tracked.unread:
            tracked.readable = min(tracked.readable, missing)
        tracked.unread.add(missing)
        tracked.forget_from(missing)
        if loading.is_first:
            tracked.failed = max(tracked.failed, loading.end)  # less what is there once it is scheduled

    def _confirm_save(self, key: int, saving: _Saving, count: int, *, is_unfit: bool) -> None:
        tracked, records = saving.tracked, saving.records
        tracked.offered.discard(key)
        if saving.part:
            self._lose(tracked, {(saving.part, record) for record in records[count:]}, again=not is_unfit)
        elif count < len(records):
            tracked.done = min(tracked.done, records[count])
            if is_unfit:
                tracked.limit = min(tracked.limit, records[count] * self._record_tokens)
        if tracked.ended and not tracked.offered:
            self._save_turn(tracked)

    def _lose(self, tracked: Tracked, lost: set[tuple[int, int]], *, again: bool) -> None:
        """Count no point that needs these parts; consider it `again`, while the engine has them."""
        tracked.kept -= lost
        points = [point for point in tracked.points if not lost.isdisjoint(self._groups.needs(point))]
        tracked.points = [point for point in tracked.points if point not in points]
        if again and points:
            tracked.since = min(tracked.since, *(point - 1 for point in points))

    def _save_prompt(self, tracked: Tracked, each: Scheduled) -> None:
        """Save the turn as it is once its prompt is: until then a killed process loses the parts that end."""
        is_complete = each.computed >= tracked.prompt_tokens and not tracked.offered
        if is_complete and not tracked.is_prompt_saved and self._groups.ending_parts:
            tracked.is_prompt_saved = True
            self._save_turn(tracked)

    def _save_turn(self, tracked: Tracked) -> None:
        if not tracked.done or self._stopped:
            return
        request, names = tracked.request, tracked.names[: tracked.done]
        points = tracked.points_from_start(self._groups.resume_tokens)
        self._owner.finish(
            request.scope,
            request.agent,
            tracked.root,
            names,
            [point for point in points if point <= tracked.done * self._record_tokens],
            worth=partial(self._points.worth_keeping, prompt_tokens=tracked.prompt_tokens),
            shared={point for other in self._requests.values() for point in other.points_in(names)},
            positions_of=self._groups.positions,
        )

    def check(self) -> None:
        """Assert that what is on its way belongs to requests, and that none has more done than it has names."""
        for tracked in self._requests.values():
            assert tracked.done <= len(tracked.names), f"{tracked.request.request_id} has saved what has no name"
            assert not tracked.ended, f"{tracked.request.request_id} ended and is still there"
        for key, saving in self._saving.items():
            assert key in saving.tracked.offered, f"save {key} is not its request's"
