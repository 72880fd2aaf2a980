"""One step at a time: admit, plan, run, publish; `sampling` handles the logits.

Owns the scheduler, the prefix cache and the runner; called from one thread only. A failing request fails alone: a
step that raises is run again one request at a time, and the request that raises by itself fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.blocks.loads import Load
from rekindle.engine.blocks.prefix_cache import PrefixCache
from rekindle.engine.core.admission import Admission
from rekindle.engine.core.background import Background, IdleWork, OrphanBlocks
from rekindle.engine.core.interface import Core, CoreCounts
from rekindle.engine.core.launch import Launch, chunks_after, has_ended
from rekindle.engine.core.reporting import report_progress
from rekindle.engine.core.restore_checks import RestoreChecks
from rekindle.engine.core.sampling import Replies
from rekindle.engine.core.scheduler import Chunk, Scheduler
from rekindle.engine.core.shares import Shares
from rekindle.engine.core.speculation import Speculation
from rekindle.engine.request import FinishedTurn, Request, State
from rekindle.engine.sequence import Ended
from rekindle.errors import Overloaded, RekindleError, RequestFailed
from rekindle.model.batch import SequenceStep
from rekindle.model.loaded import Runner
from rekindle.model.row_scores import score_rows
from rekindle.worker import concealed, is_meant_for_thread

logger = logging.getLogger(__name__)


class EngineCore(Core):
    """The engine without its thread. `on_turn` is called with every ended sequence worth remembering."""

    def __init__(
        self,
        *,
        runner: Runner,
        cache: PrefixCache,
        scheduler: Scheduler,
        speculation: Speculation,
        checks: RestoreChecks,
        min_reuse_tokens: int,
        on_turn: Callable[[FinishedTurn], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.speculation = speculation
        self.checks = checks
        self.verdicts = checks.verdicts if checks.one_in else None
        self.num_steps = 0
        self.num_rows = 0  # of all forward passes, also those that ran again after a preemption
        self.step_s = 0.0
        self._ahead: Launch | None = None  # launched before the step before it was waited for
        self._waited = 0.0  # when a step was last waited for
        self._runner = runner
        self._clock = clock
        orphans = OrphanBlocks(cache.pool)
        self._replies = Replies(
            scheduler=scheduler,
            orphans=orphans,
            min_reuse_tokens=min_reuse_tokens,
            on_turn=on_turn,
            clock=clock,
            end=self._end,
        )
        self.admission = Admission(cache=cache, scheduler=scheduler, replies=self._replies, clock=clock)
        self.background = Background(cache=cache, scheduler=scheduler, orphans=orphans, min_tokens=min_reuse_tokens)

    def add(self, work: Request | IdleWork) -> None:
        """Queue a request or idle work. With a request the idle work for its agent is obsolete and ends."""
        if isinstance(work, IdleWork):
            self.background.add(work)
        else:
            self.background.cancel(work.namespace, work.agent)
            self.scheduler.add(work)

    def finish_load(self, load: Load, num_good: int) -> None:
        """Publish what a reader loaded; its request, or idle work, attaches again if it has not ended."""
        self.cache.loads.finish(load, num_good)
        self.checks.note(load, num_good)
        self.background.load_ended(load.sequence)
        request = next((each for each in self.scheduler.loading if each.sequence is load.sequence), None)
        if request is not None:
            request.times.load_s += self._clock() - request.times.load_started
            self.scheduler.move(request, State.WAITING)

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to do."""
        queues = self.scheduler
        if queues.running or queues.waiting:
            return True
        return (self.background.wants_step or self.checks.wants_step) and not queues.loading

    @property
    def num_preemptions(self) -> int:
        """How often running requests gave up their blocks and places to others."""
        return self.admission.num_preemptions

    @property
    def counts(self) -> CoreCounts:
        """The counters so far; the overhead of a step is what was spent neither in the model nor in the sampler."""
        outside_s = self.step_s - self._runner.model_s - self._replies.sample_s
        return CoreCounts(
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_rows=self.num_rows,
            step_s=self.step_s,
            num_draft_tokens=self.speculation.num_drafted,
            num_accepted_tokens=self.speculation.num_accepted,
            prompt_tokens=self.admission.num_prompt_tokens,
            reused_tokens=self.admission.num_reused_tokens,
            step_overhead_ms=1e3 * outside_s / max(1, self.num_steps),
            num_checking=len(self.checks),
            num_checked=self.checks.num_checked if self.checks.one_in else None,
            num_differed=self.checks.num_differed if self.checks.one_in else None,
        )

    def step(self) -> None:
        """Do everything that can be done now, with at most one forward pass; or end the one that was launched ahead."""
        began = self._clock()
        self._replies.drop_unwanted(began)
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.left:
            self._run(ahead.left, ahead)
            self.num_steps += 1
            self.step_s += self._clock() - began
        else:
            self._step_in_turn(began)
        self.cache.saving.pump()

    def _step_in_turn(self, began: float) -> None:
        if self.scheduler.everybody():
            self.background.yield_to_requests()
            self.checks.yield_to_requests()
        self.admission.admit(began)
        chunks = self._with_drafts(self._with_room(self.scheduler.plan(began)))
        if not self.scheduler.everybody():
            chunks = self.background.plan()
            if not chunks and self.checks.wants_step:
                self.checks.step()
        if chunks:
            self._run(chunks)
            self.num_steps += 1
            self.step_s += self._clock() - began

    def seconds_left(self) -> float | None:
        """Return the seconds until the first request times out, if one loads blocks and none runs; None when no request
        has a deadline."""
        return self.scheduler.seconds_left(self._clock()) if self.scheduler.loading else None

    def _report_progress(self, request: Request) -> None:
        report_progress(request, now=self._clock(), min_reuse_tokens=self._replies.min_reuse_tokens)

    def _with_room(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks whose blocks could be reserved, preempting requests for them (`Shares.pick_victim`)."""
        kept: list[Chunk] = []
        for chunk in chunks:
            request = chunk.request
            assert request is not None, "idle work reserves its own blocks"
            if request.state is not State.RUNNING:
                continue
            while not self.cache.prepare(chunk.sequence, chunk.start + chunk.num_rows):
                others = [r for r in self.scheduler.running if r is not request]
                if not others:
                    if not len(self.cache.loads):  # else their blocks come free when they report
                        self._replies.fail(request, Overloaded("the hot memory is full", retry_after_s=1.0))
                    break
                victim = Shares(self.scheduler, self.cache).pick_victim()
                self.admission.preempt(victim)
                kept = [other for other in kept if other.request is not victim]
                if victim is request:
                    break
            else:
                kept.append(chunk)
        return kept

    def _with_drafts(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks with the drafts that pay, as far as their blocks are there without preempting a request."""
        proposed = self.speculation.propose(chunks)
        return [
            chunk if not chunk.draft or self.cache.prepare(chunk.sequence, chunk.end) else without_draft(chunk)
            for chunk in proposed
        ]

    def _run(self, chunks: list[Chunk], ahead: Launch | None = None) -> None:
        """Compute a step of these chunks, which `ahead` has launched already."""
        sampled_s = self._replies.sample_s
        try:
            launch = ahead or self._launched(chunks)
            self._ahead = self._launched_after(launch)
            bad = launch.step.wait()
        except BaseException as error:
            self.settle()
            # Border: any error of the model's code, panics of libraries included, ends one request, not the engine.
            if is_meant_for_thread(error):
                raise
            if len(chunks) == 1 and chunks[0].draft:
                chunks = [without_draft(chunks[0])]
            elif len(chunks) == 1 and ahead is None:
                request = chunks[0].request
                name = "idle work" if request is None else f"request {request.id}"
                logger.exception("%s failed in its forward pass", name)
                self._fail(chunks[0], concealed("the forward pass failed", error))
                return
            for chunk in chunks:
                self._run([chunk])
            return
        now = self._clock()
        took = now - max(launch.began, self._waited) - (self._replies.sample_s - sampled_s)
        self._waited = now
        rows = sum(chunk.end - chunk.start for chunk in chunks)
        contexts = sum((chunk.end - chunk.start) * ((chunk.start + chunk.end) // 2) for chunk in chunks)
        self.num_rows += rows
        self.scheduler.costs.observe(rows=rows, row_contexts=contexts, seconds=took)
        self.speculation.observe(chunks, took)
        self._advance(launch, bad)
        if launch.drawing is not None and launch.drawing.is_redrawn:  # the step ahead has another token
            self.settle()

    def _launched(self, chunks: Sequence[Chunk]) -> Launch:
        """Begin a step and the draws from it."""
        steps = [
            SequenceStep(
                token_ids=chunk.token_ids,
                start=chunk.start,
                blocks=chunk.sequence.table.blocks,
                num_stored=chunk.sequence.table.num_tokens,
                logits="all" if chunk.draft or chunk.num_scored else "last" if chunk.samples else "none",
                pictures=chunk.sequence.picture_rows(chunk.start, chunk.start + chunk.num_rows),
            )
            for chunk in chunks
        ]
        began, step = self._clock(), self._runner.launch(steps)
        ends = np.cumsum([chunk.num_logits for chunk in chunks]).tolist()
        rows = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
        drawn = {
            index: (of_chunk[-1] if chunk.num_scored else of_chunk[0], chunk.request)
            for index, (chunk, of_chunk) in enumerate(zip(chunks, rows, strict=True))
            if chunk.samples and chunk.request is not None
        }
        picks = self._replies.draw(step, [row for row, _ in drawn.values()], [request for _, request in drawn.values()])
        return Launch(chunks, step, rows, dict(zip(drawn, picks, strict=True)), began)

    def _launched_after(self, launch: Launch) -> Launch | None:
        """Begin the step after one that is under way; None: it has to be waited for."""
        if not self._runner.computes_ahead or self.scheduler.waiting or self.speculation.drafts:
            return None
        after, drawing = chunks_after(launch, self.scheduler.running), launch.drawing
        reserved = [self.cache.prepare(chunk.sequence, chunk.end) for chunk in after.values()]
        if drawing is None or not reserved or not all(reserved):
            return None
        steps = [
            SequenceStep(
                token_ids=np.zeros(1, np.uint32),
                start=chunk.start,
                blocks=chunk.sequence.table.blocks,
                num_stored=chunk.sequence.table.num_tokens,
                logits="last",
            )
            for chunk in after.values()
        ]
        places = [launch.picks[index].at for index in after]
        requests = [launch.picks[index].request for index in after]
        try:
            began, step = self._clock(), self._runner.launch_after(steps, drawing, places)
        except BaseException as error:
            # Border: as in `_run`, where the same rows are computed next, in turn.
            if is_meant_for_thread(error):
                raise
            logger.warning("a step could not be launched ahead", exc_info=error)
            return None
        picks = self._replies.draw(step, range(len(after)), requests, num_unknown=1)
        rows = [range(row, row + 1) for row in range(len(after))]
        return Launch(list(after.values()), step, rows, dict(enumerate(picks)), began)

    def _end(self, request: Request, keep: bool) -> Ended:
        """Release the blocks of a request that ends; return what is stored of it."""
        self._end_ahead()
        return self.cache.end(request.sequence, is_remembered=keep)

    def _end_ahead(self) -> None:
        """Wait for the step ahead, before blocks are released that it writes to.

        What it fails with is raised again when it is its turn, or concerns nobody.
        """
        try:
            if self._ahead is not None:
                self._ahead.step.wait()
        except BaseException as error:
            if is_meant_for_thread(error):
                raise

    def settle(self) -> None:
        """Drop the step that was launched ahead, once it has ended: its rows are computed again."""
        self._end_ahead()
        self._ahead = None

    def _advance(self, launch: Launch, bad: frozenset[int]) -> None:
        """Publish what the pass computed, add what was drawn where a sequence is complete, report progress.

        A chunk that failed with a draft runs again without one.
        """
        chunks = launch.chunks
        for index, chunk in enumerate(chunks):
            request = chunk.request
            if has_ended(chunk):
                continue
            if index not in bad:
                is_scored = chunk.num_scored > 0
                chunk.sequence.num_computed = chunk.start + chunk.num_rows
                self.cache.publish(chunk.sequence)
                if is_scored:
                    rows = launch.rows[index]
                    self._score(chunk, launch.step.logits[rows.start : rows.stop])
                if request is not None:
                    self._report_progress(request)
                    if chunk.finishes and not chunk.samples:
                        self._replies.finish(request, "stop")
            elif not chunk.draft:
                self._fail(chunk, RequestFailed("the model produced KV that is not finite; nothing of it was kept"))
        self._sample(launch, [at for at in launch.picks if at not in bad and not has_ended(chunks[at])])
        for index in bad:
            if chunks[index].draft:
                self._run([without_draft(chunks[index])])

    def _score(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Add the scores that the rows of a chunk give, from its `logits` [rows, vocab]."""
        scores, num_scored = chunk.sequence.scores, chunk.num_scored
        assert scores is not None, "a chunk without scores to compute"
        known = scores.num_known
        skipped = known - 1 - chunk.start
        assert skipped >= 0, f"a chunk from {chunk.start} with {known} scores known"
        tokens = scores.ids_from(known, num_scored)
        scores.put(known, score_rows(logits[skipped : skipped + num_scored], tokens, scores.num_top))
        self.cache.scores.keep(chunk.sequence, known)

    def _sample(self, launch: Launch, sampling: Sequence[int]) -> None:
        """Add the next token of these chunks, then draw the next of those whose draft was right, as single steps would.

        Nothing of a draft is stored before the token was sampled: rows after a wrong one are written again later.
        """
        left, turn, picks = sampling, 0, [launch.picks[index] for index in sampling]
        while left:
            self._replies.continue_with(picks)
            turn += 1
            left = [index for index in left if self._accept(launch.chunks[index], turn)]
            requests = [launch.picks[index].request for index in left]
            picks = self._replies.draw(launch.step, [launch.rows[index][turn] for index in left], requests)
        for index in sampling:
            self.speculation.judge(launch.chunks[index])

    def _accept(self, chunk: Chunk, count: int) -> bool:
        """Publish the row of the last sampled token if it was the draft's `count`-th; False ends the step for it."""
        request, sequence = chunk.request, chunk.sequence
        if count > len(chunk.draft) or request is None or request.state is not State.RUNNING:
            return False
        if int(sequence.ids[-1]) != chunk.draft[count - 1]:
            return False
        sequence.num_computed += 1
        self.cache.publish(sequence)
        return True

    def _fail(self, chunk: Chunk, error: RekindleError) -> None:
        """Fail the request of a chunk, or end the idle work."""
        if chunk.request is None:
            self.background.fail()
        else:
            self._replies.fail(chunk.request, error)

    def forget(self, namespace: str, agent: str) -> set[BlockHash]:
        """As `Core.forget`; nor does the id of a token wait to be checked."""
        self.checks.clear()
        return super().forget(namespace, agent)

    def rest(self) -> None:
        """Let what computes give back its threads until the next step."""
        self._runner.rest()

    def check(self) -> None:
        """Assert the invariants between steps, and that only running requests hold blocks."""
        super().check()
        for request in [*self.scheduler.waiting, *self.scheduler.loading]:
            assert not request.sequence.table.blocks, f"request {request.id} waits and holds blocks"


def without_draft(chunk: Chunk) -> Chunk:
    """Return the chunk without its draft."""
    return replace(chunk, draft=())
