"""From logits to deltas: sample a token, append it, decode and emit its text; remember the turn when a request ends.

Owns only the time spent sampling; called by the core, on its thread. End-of-sequence tokens and stop tokens end a reply
without being part of it; the token that completes a stop string is part of it, the string is not.

What one request asks of a library (its grammar, its sampler, its scores) may fail in any way: that ends this request
and no other.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.core.background import OrphanBlocks
from rekindle.engine.core.reporting import chain_of, report_of
from rekindle.engine.core.scheduler import Scheduler
from rekindle.engine.request import FinishedTurn, Request, State
from rekindle.engine.sequence import Ended
from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.errors import RekindleError, RequestFailed, Timeout
from rekindle.model.drawing import Drawing, Drawn
from rekindle.model.loaded import Step
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.sampler import NOTHING_TO_DRAW, Draw
from rekindle.worker import concealed, is_meant_for_thread

logger = logging.getLogger(__name__)
MOST_UNFINISHED = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """The next token of a request, which is drawn number `at` of a drawing; or what kept it from being drawn."""

    request: Request
    drawing: Drawing | BaseException
    at: int = 0

    def drawn(self) -> Drawn:
        """Wait for the token; raises what kept it from being drawn."""
        if isinstance(self.drawing, BaseException):
            raise self.drawing
        drawn = self.drawing.results()[self.at]
        if drawn is None:
            raise RequestFailed(NOTHING_TO_DRAW)
        return drawn


class Replies:
    """The replies of one core. `on_turn` is called with every ended sequence worth remembering.

    `end` is called with each request that ends, and whether it is remembered: it releases its blocks, and returns what
    is stored. The first delta has a report unless what was reused is not known by then (`reports_early` False).
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        orphans: OrphanBlocks,
        min_reuse_tokens: int,
        on_turn: Callable[[FinishedTurn], None],
        clock: Callable[[], float],
        end: Callable[[Request, bool], Ended],
        reports_early: bool = True,
    ) -> None:
        self.sample_s = 0.0
        self._scheduler = scheduler
        self._orphans = orphans
        self.min_reuse_tokens = min_reuse_tokens
        self._on_turn = on_turn
        self._clock = clock
        self._end_sequence = end
        self._reports_early = reports_early
        self._unfinished: OrderedDict[tuple[str, str], BlockHash] = OrderedDict()  # by agent: the last block

    def draw(self, step: Step, rows: Sequence[int], requests: Sequence[Request], *, num_unknown: int = 0) -> list[Pick]:
        """Begin to draw a token of each request from its row of a step's logits: the next, or that after some which are
        not known yet."""
        began = self._clock()
        draws = [partial(_draw, row, request, num_unknown) for row, request in zip(rows, requests, strict=True)]
        picks = self._begun(step, draws, requests) if requests else []
        self.sample_s += self._clock() - began
        return picks

    def _begun(self, step: Step, draws: Sequence[Callable[[], Draw]], requests: Sequence[Request]) -> list[Pick]:
        """As `draw`; an error only for the request of which no draw can begin."""
        try:
            drawing = step.draw([draw() for draw in draws])
        except BaseException as error:
            # Border: as for `_alone`.
            if len(requests) == 1:
                return [Pick(requests[0], error)]
            return [self._begun(step, [draw], [request])[0] for draw, request in zip(draws, requests, strict=True)]
        return [Pick(request, drawing, at) for at, request in enumerate(requests)]

    def continue_with(self, picks: Sequence[Pick]) -> None:
        """Add and emit what was drawn."""
        for pick in picks:
            began = self._clock()
            try:
                drawn: Drawn | BaseException = pick.drawn()
            except BaseException as error:
                # Border: as for `_alone`.
                drawn = error
            self.sample_s += self._clock() - began
            if isinstance(drawn, BaseException):
                self._fail_alone(pick.request, drawn)
            else:
                self._alone(pick.request, partial(self._take_drawn, pick.request, drawn))

    def _take_drawn(self, request: Request, drawn: Drawn) -> None:
        self._take(request, drawn.token, _scores(request, drawn))

    def take(self, request: Request, token: int, scores: tuple[TokenLogprob, ...]) -> None:
        """Add and emit the next token of a request; `scores` has its log probability, if that was requested."""
        self._alone(request, lambda: self._take(request, token, scores))

    def _alone(self, request: Request, work: Callable[[], None]) -> None:
        """Do something for one request; whatever it raises ends that request."""
        try:
            work()
        except BaseException as error:
            # Border: libraries fail on inputs of one tenant, also in panics, while others' replies run.
            self._fail_alone(request, error)

    def _fail_alone(self, request: Request, error: BaseException) -> None:
        if not isinstance(error, RekindleError):
            if is_meant_for_thread(error):
                raise error
            logger.error("the reply of request %s failed", request.id, exc_info=error)
            error = concealed("the reply failed", error)
        if request.state is State.FINISHED:
            request.reply.generation.put(error)
        else:
            self.fail(request, error)

    def _take(self, request: Request, token: int, scores: tuple[TokenLogprob, ...]) -> None:
        """As `take`, for a request that may fail on it."""
        first = request.times.first_token is None
        if first:
            request.times.first_token = self._clock()
            _hand_over_scores(request)
        sequence, reply, params = request.sequence, request.reply, request.reply.sampler.params
        if token in reply.sampler.ends:
            self.finish(request, "stop")
            return
        if reply.matcher is not None:
            reply.matcher.take(token)
        sequence.append(token)
        if sequence.num_generated == params.min_tokens:
            reply.stream.watch_for(params.stop)
        text = reply.stream.push(token)
        if reply.stream.stopped or (reply.matcher is not None and reply.matcher.is_over):
            self.finish(request, "stop", Delta(text, (token,), logprobs=scores))
        elif sequence.num_generated >= sequence.max_new_tokens:
            self.finish(request, "length", Delta(text, (token,), logprobs=scores))
        else:
            report = self._report(request) if first and self._reports_early else None
            reply.texts.append(text)
            reply.generation.put(Delta(text, (token,), report=report, logprobs=scores))

    def drop_unwanted(self, now: float) -> None:
        """End requests that were cancelled or took too long; their computed blocks stay cached."""
        for request in self._scheduler.everybody():
            if request.cancelled.is_set():
                self.finish(request, "cancelled")
            elif now >= request.deadline:
                seconds = request.deadline - request.times.submitted
                self.stop(request, Timeout(f"not finished within {seconds:g} s (request_timeout_s)"))

    def finish(self, request: Request, reason: FinishReason, last: Delta | None = None) -> None:
        """End a request: remember its sequence, then emit the `last` delta, so that the next turn finds it."""
        last, reply = last or Delta(""), request.reply
        text = last.text + reply.stream.finish()
        reply.texts.append(text)
        is_whole = reason != "cancelled"
        _hand_over_scores(request)
        self._end(request, keep=is_whole or request.sequence.num_generated > 0, is_whole=is_whole)
        report = self._report(request)
        delta = Delta(text, last.token_ids, reason, report, last.logprobs, stop_text=reply.stream.stop_text)
        reply.generation.put(delta)

    def stop(self, request: Request, error: RekindleError) -> None:
        """End a valid request with an error; its reply so far is remembered as after a cancel."""
        self._end(request, keep=request.sequence.num_generated > 0)
        request.reply.generation.put(error)

    def fail(self, request: Request, error: RekindleError) -> None:
        """End a request with an error; its published blocks stay cached, its sequence is not remembered."""
        self._end(request, keep=False)
        request.reply.generation.put(error)

    def _end(self, request: Request, *, keep: bool, is_whole: bool = False) -> None:
        """Detach a request and remember it; `is_whole`: the reply is whole, so its caller will send it back."""
        sequence = request.sequence
        _spend(request, is_whole)
        is_turn = sequence.reuse != "off" and sequence.is_turn and sequence.task != "load"
        ended = self._end_sequence(request, is_turn and keep)
        ids, hashes, head = ended.ids, ended.hashes, ended.head
        request.chain = chain_of(sequence, ended)
        self._scheduler.move(request, State.FINISHED)
        if sequence.task == "absorb":
            computed = hashes[sequence.reused_tokens // sequence.block_tokens :]
            self._orphans.note((request.namespace, request.agent), {*computed, head.hash})
        if not is_turn:
            return
        if not keep or not len(ids):
            self._note_unfinished(request, hashes)
            return
        self._on_turn(
            FinishedTurn(
                namespace=request.namespace,
                agent=request.agent,
                root=sequence.root,
                ids=ids,
                hashes=hashes,
                head=head.hash,
                head_tokens=head.num_tokens,
                num_replies=request.num_replies,
                canonical_prompt=request.canonical_tokens,
                request=request.original if is_whole and sequence.task == "generate" else None,
                compacts=request.compacts,
                text="".join(request.reply.texts),
                opening=request.reply.generation.opening,
                breakpoints=request.breakpoints,
                resume_points=tuple(sorted(at for at in sequence.resume_points if at < len(ids))),
                seen_blocks=None if sequence.seen_blocks is None else min(sequence.seen_blocks, len(hashes)),
            )
        )

    def _note_unfinished(self, request: Request, hashes: tuple[BlockHash, ...]) -> None:
        """Remember how far an unfinished request got, so that the next one can report that it resumes it."""
        if hashes:
            self._unfinished.pop((request.namespace, request.agent), None)
            self._unfinished[request.namespace, request.agent] = hashes[-1]
            while len(self._unfinished) > MOST_UNFINISHED:
                self._unfinished.popitem(last=False)

    def resumes(self, request: Request) -> bool:
        """Whether an attached request resumes an unfinished one of its agent."""
        left, sequence = self._unfinished.get((request.namespace, request.agent)), request.sequence
        return left is not None and left in sequence.hashes[: sequence.reused_tokens // sequence.block_tokens]

    def _report(self, request: Request) -> Report:
        return report_of(request, now=self._clock(), min_reuse_tokens=self.min_reuse_tokens)


def _spend(request: Request, is_whole: bool) -> None:
    """Say what a request that ends has cost: of its prompt what was computed, all of it if a token came after it."""
    sequence = request.sequence
    if sequence.task != "load":
        is_computed = is_whole or sequence.num_generated > 0
        done = sequence.num_prompt if is_computed else min(sequence.num_computed, sequence.num_prompt)
        request.reply.generation.spend(max(0, done - sequence.reused_tokens), sequence.num_generated)


def _draw(row: int, request: Request, num_unknown: int) -> Draw:
    """Return how a token of a request is drawn from a row of logits, the next one or that after some unknown ones."""
    reply = request.reply
    mask = None if reply.matcher is None else reply.matcher.allowed()
    return Draw(row, reply.sampler, request.sequence.history(num_unknown), mask)


def _scores(request: Request, drawn: Drawn) -> tuple[TokenLogprob, ...]:
    """Return the log probability of what was drawn, if it was requested and is part of the reply."""
    reply, num_top = request.reply, request.reply.sampler.params.logprobs
    if drawn.scores is None or num_top is None or drawn.token in reply.sampler.ends:
        return ()
    return (drawn.scores.token(0, drawn.token, reply.stream.token_bytes, num_top=num_top),)


def _hand_over_scores(request: Request) -> None:
    """Give the caller the scores of the prompt, once they are known."""
    scores, reply = request.sequence.scores, request.reply
    if scores is not None and scores.is_complete and reply.generation.prompt_logprobs is None:
        reply.generation.prompt_logprobs = scores.tokens(reply.stream.token_bytes)
