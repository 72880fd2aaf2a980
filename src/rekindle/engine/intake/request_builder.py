"""From a caller's request to one the engine can run: render, match, encode what is new, check that it fits.

Decides how much of the reply fits, and what is reported of the prompt: its caller's breakpoints, and what was removed
from it. Any thread may prepare: the lookup in memory and the submission run through the given `on_memory`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.generation import Generation
from rekindle.engine.intake.candidates import COMPACTION
from rekindle.engine.intake.object_tier import TierImports
from rekindle.engine.intake.prompt_lookup import Prompt, PromptLookup
from rekindle.engine.intake.rendering import Renderer, Rendering
from rekindle.engine.intake.rewrites import Rewrites
from rekindle.engine.memory.memory import OnMemory
from rekindle.engine.prompt_scores import PromptScores
from rekindle.engine.request import CachedBreakpoint, Reply, Request, RequestTimes, TakenOut
from rekindle.engine.sequence import Saves, Sequence
from rekindle.engine.types import GenerationRequest, Task
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.model.sampler import SamplerState
from rekindle.text.constraints.matcher import Constraints, ReplyMatcher
from rekindle.text.constraints.types import CalledTool, Calls, Constraint
from rekindle.text.messages import leading_system
from rekindle.text.pictures import Picture, PromptPictures
from rekindle.text.prompt import PromptEncoder
from rekindle.text.replies import AnswerStream, ReplyStream
from rekindle.text.stream import TextStream

Aside = Callable[[Callable[[OnMemory], None]], None]
QUOTED_CHARS = 120  # of text removed from a prompt
COUNTED = 4  # contexts; tokens are counted that far, so that a caller learns how much too long a prompt is
MOST_AGENTS = 4096  # whose last request is remembered, to find what changes from one to the next


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a request: tokens of context, ids below `vocab_size`, seconds it may take. `eos_ids` end a reply."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class _Ready:
    """What all requests of one prompt share: `ids` as the model knows them, `sampler` is that of the first."""

    request: GenerationRequest
    prompt: Prompt
    rendering: Rendering
    ids: tuple[int, ...]
    sampler: SamplerState
    max_new_tokens: int
    times: RequestTimes
    pictures: PromptPictures | None


class RequestBuilder:
    """Turns `GenerationRequest`s into `Request`s and passes them to `submit`.

    `visible` tokens are written out in the deltas of structured requests. `constraints` makes the matchers of replies.
    With `only_at_points`, sequences can be resumed at some places only, chosen here by the text of the prompt. `see`
    computes what the model makes of a picture and keeps it for the steps that need it; None: it does not see.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        renderer: Renderer,
        lookup: PromptLookup,
        limits: PromptLimits,
        visible: frozenset[int],
        constraints: Constraints,
        root: Callable[[str], BlockHash],
        new_table: Callable[[], BlockTable],
        submit: Callable[[Request], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
        only_at_points: bool = False,
        tier: TierImports | None = None,
        see: Callable[[Picture], object] | None = None,
        save_unnamed: Literal["reused", "always"] = "always",
    ) -> None:
        self._save_unnamed = save_unnamed
        self._only_at_points = only_at_points
        self._tier = tier
        self._see = see
        self._encoder = encoder
        self._renderer = renderer
        self._lookup = lookup
        self._rewrites = Rewrites(encoder, renderer, lookup, max_context=limits.max_context)
        self._limits = limits
        self._visible = visible
        self._constraints = constraints
        self._root = root
        self._new_table = new_table
        self._submit = submit
        self._wake = wake
        self._clock = clock
        self._last_sent: OrderedDict[tuple[str, str], frozenset[str]] = OrderedDict()

    def prepare(
        self,
        request: GenerationRequest,
        generations: Collection[Generation],
        submitted: float,
        *,
        on_memory: OnMemory = lambda work: work(),
        aside: Aside | None = None,
    ) -> None:
        """Match, encode and submit a request for each generation, of one prompt; raises BadRequest.

        Choice i is seeded with the request's seed + i, or with a random one + i. Without `on_memory` the caller is on
        the intake thread. `aside` takes the rest of the work where a constraint must be compiled first, and runs it
        with an `on_memory` on a thread for long work; without it, this is one. So it does where a picture is new.
        """
        began, params = self._clock(), request.params
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        prompt, rendering = self._imported(request, on_memory)
        times = RequestTimes(submitted=submitted, match_s=self._clock() - began)
        ready = self._ready(request, prompt, rendering, times)
        constrained, opening = self._constrained(request), rendering.opening
        # What is stored is loaded in nearly every case; else the engine's thread computes such a picture.
        pictures = ready.pictures
        unseen = () if pictures is None or self._see is None else pictures.after(prompt.match.num_tokens)

        def is_wanted() -> bool:
            return not all(each.cancel_asked for each in generations)

        def finish(on_memory: OnMemory) -> None:
            for picture in unseen:
                if self._see is not None and is_wanted():
                    self._see(picture)
            matcher = None
            if constrained is not None:
                constraint, calls = constrained
                matcher = self._constraints.matcher(constraint, opening=opening, calls=calls, is_wanted=is_wanted)
            on_memory(lambda: self._hand_over(ready, generations, matcher))

        is_ready = constrained is None or self._constraints.is_ready(
            constrained[0], opening=opening, calls=constrained[1]
        )
        if aside is None or (is_ready and not unseen):
            finish(on_memory)
        else:
            aside(finish)

    def _ready(self, request: GenerationRequest, prompt: Prompt, rendering: Rendering, times: RequestTimes) -> _Ready:
        """Return what the requests of a prompt share; PromptTooLong if no reply fits after it."""
        params, most = request.params, self._room(prompt, request.task)
        most = most if request.task == "generate" else 0
        pictures = None if request.task == "load" else self._encoder.placed(prompt.ids, request.pictures)
        return _Ready(
            request,
            prompt,
            rendering,
            ids=tuple((prompt.ids if pictures is None else pictures.ids).tolist()),
            sampler=SamplerState.create(params, lambda: secrets.randbits(63), eos_ids=self._limits.eos_ids),
            max_new_tokens=min(most, params.max_tokens) if params.max_tokens is not None else most,
            times=times,
            pictures=pictures,
        )

    def close(self) -> None:
        """End what constraints need beyond this process."""
        self._constraints.close()

    def _hand_over(self, ready: _Ready, generations: Collection[Generation], matcher: ReplyMatcher | None) -> None:
        """Submit a request for each generation; on the intake thread, like all that depends on their order."""
        request, prompt, rendering = ready.request, ready.prompt, ready.rendering
        is_put_back = any(each.kind == COMPACTION for each, _ in rendering.removed)
        self._lookup.note_preamble(request, system="put back" if is_put_back else "sent")
        breakpoints, taken_out = self._marked_and_removed(prompt, rendering)
        texts = self._lookup.other_texts(request.namespace, prompt)
        resume_points = (
            self._resume_points(prompt, rendering, breakpoints) if self._only_at_points else frozenset[int]()
        )
        scores = self._scores(ready)
        for index, generation in enumerate(generations):
            built = Request(
                namespace=request.namespace,
                agent=prompt.agent,
                sequence=Sequence(
                    root=self._root(request.namespace),
                    prompt_ids=prompt.ids,
                    table=self._new_table(),
                    reuse=prompt.reuse,
                    task=request.task,
                    max_new_tokens=ready.max_new_tokens,
                    texts=texts,
                    pictures=ready.pictures,
                    scores=scores,
                    is_measured=scores is not None and request.agent is None and request.messages is None,
                    resume_points=set(resume_points),
                    saves=self._saves(request, prompt, index),
                ),
                match=prompt.match,
                reply=self._reply(ready, generation, index, matcher),
                canonical_tokens=prompt.canonical_tokens,
                num_replies=request.num_replies,
                times=replace(ready.times),
                original=rendering.request if len(generations) == 1 and prompt.reuse != "off" else None,
                compacts=is_put_back and not request.tools,
                breakpoints=breakpoints,
                taken_out=taken_out,
                omitted=rendering.request.omitted,
                priority=request.priority,
                generic_tools=bool(request.tools) and self._encoder.tools_in_text is not None,
                deadline=ready.times.submitted + (self._limits.timeout_s or math.inf),
            )
            generation.prompt_ids, generation.opening = ready.ids, rendering.opening
            generation.on_cancel(partial(self._cancel, built))
            self._submit(built)

    def _saves(self, request: GenerationRequest, prompt: Prompt, index: int) -> Saves:
        """Return which blocks of a reply's sequence go to disk: of a conversation that has no name and begins here
        only what was computed before, unless its caller has marked what is to be kept."""
        is_asked = request.task != "generate" or bool(request.breakpoints)
        if prompt.is_continued or is_asked or self._save_unnamed == "always":
            return "all"
        return "seen" if index == 0 else "none"  # further replies to the prompt do not see it anew

    def _scores(self, ready: _Ready) -> PromptScores | None:
        """Return what will hold the scores of the prompt's tokens, for all its replies."""
        num_top = ready.request.params.prompt_logprobs
        if num_top is None:
            return None
        return PromptScores(np.array(ready.ids, dtype=np.uint32), min(num_top, self._limits.vocab_size))

    def _cancel(self, request: Request) -> None:
        request.cancelled.set()
        self._wake()

    def _reply(self, ready: _Ready, generation: Generation, index: int, matcher: ReplyMatcher | None) -> Reply:
        request, sampler = ready.request, ready.sampler
        stream = self._stream(ready)
        matcher = None if matcher is None else matcher.copy()
        sampler = replace(sampler, seed=sampler.seed + index)
        return Reply(generation, sampler, stream, matcher, request.constraint, request.calls)

    def _stream(self, ready: _Ready) -> TextStream | AnswerStream:
        """Return the text of a reply. A constrained one ends by itself, others at stop strings in their answer."""
        request, after = ready.request, ready.ids[-1]
        stop = () if request.params.min_tokens or request.constraint is not None else request.params.stop
        if not request.structured:
            return TextStream(self._encoder, stop, after=after)
        stream = TextStream(self._encoder, after=after, visible=self._visible)
        if not request.params.stop or request.constraint is not None:
            return stream
        form = replace(self._renderer.form, one_call=False)
        reader = ReplyStream(form, tools=request.tools or (), opening=ready.rendering.opening)
        return AnswerStream(stream, reader, stop)

    def _constrained(self, request: GenerationRequest) -> tuple[Constraint | None, Calls | None] | None:
        """Return what the reply is constrained to; None for a free one, BadRequest if that does not go together."""
        constraint, calls = request.constraint, request.calls
        has_calls = calls is not None and self._constraints.enforces(calls)
        if request.task != "generate" or (constraint is None and not has_calls):
            return None
        if request.params.min_tokens:
            name = "a choice of tools" if constraint is None else constraint.param
            raise BadRequest(f"min_tokens: a reply that {name} constrains ends by itself", param="min_tokens")
        if constraint is not None and request.reply_prefix:
            raise BadRequest(f"{constraint.param}: the reply has a given beginning already", param=constraint.param)
        return constraint, _with_tools(calls, request) if constraint is not None else calls

    def _imported(self, request: GenerationRequest, on_memory: OnMemory) -> tuple[Prompt, Rendering]:
        """Return a prompt after other replicas' memory of it was taken in, where that is faster than computing it."""
        prompt, rendering = self._prompt(request, on_memory)
        if self._tier is not None:
            has_more, waited_s = self._tier.agent(request, prompt, on_memory)
            if has_more:
                prompt, rendering = self._prompt(request, on_memory)
            self._tier.blocks(request, prompt, self._root(request.namespace), waited_s=waited_s)
        return prompt, rendering

    def _prompt(self, request: GenerationRequest, on_memory: OnMemory) -> tuple[Prompt, Rendering]:
        if request.token_ids is not None:
            if self._encoder.bound is not None and request.task != "load":
                self._encoder.bound.check_ids(len(request.token_ids))
            ids = self._checked(request)
            return on_memory(lambda: self._lookup.of_ids(request, ids)), Rendering(request)
        request, rendering = self._rewrites.rendered(request, on_memory)
        most = COUNTED * self._limits.max_context
        return self._lookup.of_text(request, rendering, on_memory=on_memory, most=most), rendering

    def _room(self, prompt: Prompt, task: Task) -> int:
        """Return how many tokens of reply fit after the prompt; PromptTooLong if none does."""
        if not len(prompt.ids):
            raise BadRequest("the prompt is empty: it has no tokens", param="messages")
        most = self._limits.max_context - len(prompt.ids)
        if most < 1 and task != "load":
            raise PromptTooLong.of(len(prompt.ids), self._limits.max_context)
        return most

    def _marked_and_removed(
        self, prompt: Prompt, rendering: Rendering
    ) -> tuple[tuple[CachedBreakpoint, ...], tuple[TakenOut, ...]]:
        """Return the breakpoints of a prompt and what was removed from it, in tokens."""
        if not rendering.breakpoints and not rendering.removed:
            return (), ()
        ends = self._encoder.byte_ends(prompt.ids)
        at = [*rendering.breakpoints, *(byte for _, byte in rendering.removed)]
        num_before = [int(num) for num in np.searchsorted(ends, at, side="right")]
        marked = zip(rendering.request.breakpoints, num_before, strict=False)
        # Without reuse nothing is stored, so no breakpoint can be cached.
        breakpoints = tuple(CachedBreakpoint(num, each.ttl_s) for each, num in marked) if prompt.reuse != "off" else ()
        before = self._sent_before(prompt, rendering)
        taken_out = tuple(
            TakenOut(
                kind=each.kind,
                message_index=each.message_index,
                text=each.text[:QUOTED_CHARS],
                num_before=num,
                is_new=each.kind == COMPACTION or (before is not None and each.digest not in before),
            )
            for (each, _), num in zip(rendering.removed, num_before[len(rendering.breakpoints) :], strict=True)
        )
        return breakpoints, taken_out

    def _resume_points(
        self, prompt: Prompt, rendering: Rendering, breakpoints: tuple[CachedBreakpoint, ...]
    ) -> frozenset[int]:
        """Return after how many tokens other prompts are likely to part from this one: the caller's breakpoints, and
        the end of the system text."""
        points = {each.num_tokens for each in breakpoints}
        leading = leading_system(rendering.request.messages or ())
        if leading and prompt.reuse != "off":
            end = self._encoder.message_ends(rendering.prompt, leading)[-1]
            points.add(int(np.searchsorted(self._encoder.byte_ends(prompt.ids), end, side="right")))
        return frozenset(points - {0})

    def _sent_before(self, prompt: Prompt, rendering: Rendering) -> frozenset[str] | None:
        """Return the digests of what was removed from the agent's previous request (None: unknown), and remember this
        request's."""
        key = rendering.request.namespace, prompt.agent
        before = self._last_sent.pop(key, None)
        self._last_sent[key] = frozenset(each.digest for each, _ in rendering.removed)
        while len(self._last_sent) > MOST_AGENTS:
            self._last_sent.popitem(last=False)
        return before

    def _checked(self, request: GenerationRequest) -> np.ndarray:
        token_ids = request.token_ids or ()
        if request.task != "load":  # of what an agent has stored, pictures too
            self._check_ids(token_ids, "token_ids")
        return np.asarray(token_ids, dtype=np.uint32)

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        if not all(0 <= token < self._limits.vocab_size for token in token_ids):
            raise BadRequest(f"{param}: token ids must lie in 0 to {self._limits.vocab_size - 1}", param=param)


def _with_tools(calls: Calls | None, request: GenerationRequest) -> Calls | None:
    """Return free calls as calls of the request's tools with any object: next to a constraint, a reply is a whole call
    or what the constraint says, so calls cannot be left to the model."""
    if calls is None or calls.tools:
        return calls
    functions = [tool.get("function") or tool for tool in request.tools or ()]
    names = dict.fromkeys(str(function["name"]) for function in functions if "name" in function)
    return replace(calls, tools=tuple(CalledTool(name, None, is_strict=False, param="tools") for name in names))
