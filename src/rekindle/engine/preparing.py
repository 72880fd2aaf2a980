"""From a caller's request to one the engine can run: render, match, encode what is new, check that it fits.

Runs on the intake thread. Decides the ids of the prompt (stored ids of the matched branch, then a fresh encoding of the
rest), the agent an unnamed conversation belongs to, and how much of the reply fits.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rekindle.cache.explain import Explanation, KnownCause, explain
from rekindle.cache.hashing import BlockHash
from rekindle.cache.matcher import Relation, TextMatch
from rekindle.cache.table import BlockTable
from rekindle.engine.branches import HIDDEN_PREFIX, common_prefix
from rekindle.engine.generation import Generation
from rekindle.engine.memory import AgentMemory
from rekindle.engine.request import NO_MATCH, Marks, MatchFacts, Request
from rekindle.engine.types import GenerationRequest, Reuse
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.model.sampler import SamplerState
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle.text.stream import TextStream


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a request may be: tokens of context, ids below `vocab_size`, seconds it may take. `eos_ids` end a reply."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int]
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The ids to run, what they were matched to, and whose memory they belong to."""

    ids: np.ndarray
    agent: str
    reuse: Reuse
    facts: MatchFacts
    canonical_tokens: int  # how many of the ids are known to be a fresh encoding


class Preparer:
    """Turns `GenerationRequest`s into `Request`s and passes them to `submit`."""

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        memory: AgentMemory,
        limits: PromptLimits,
        block_tokens: int,
        reuse: str,
        root: Callable[[str], BlockHash],
        new_table: Callable[[], BlockTable],
        submit: Callable[[Request], None],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._encoder = encoder
        self._memory = memory
        self._limits = limits
        self._block_tokens = block_tokens
        self._reuse = reuse
        self._root = root
        self._new_table = new_table
        self._submit = submit
        self._wake = wake
        self._clock = clock

    def prepare(self, asked: GenerationRequest, generations: Sequence[Generation], submitted: float) -> None:
        """Match, encode and hand over a request for each generation, of one prompt; raises BadRequest.

        Choice i is seeded with the request's seed + i, or with a random one + i.
        """
        began, params = self._clock(), asked.params
        self._check_ids([token for token, _ in params.logit_bias], "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        prompt = self._prompt(asked)
        most = self._room(prompt)
        sampler = SamplerState.create(params, lambda: secrets.randbits(63), eos_ids=self._limits.eos_ids)
        prompt_ids, match_s = tuple(int(token) for token in prompt.ids), self._clock() - began
        for index, generation in enumerate(generations):
            request = Request(
                namespace=asked.namespace,
                agent=prompt.agent,
                prompt_ids=prompt.ids,
                root=self._root(asked.namespace),
                block_tokens=self._block_tokens,
                max_new_tokens=min(most, params.max_tokens) if params.max_tokens is not None else most,
                reuse=prompt.reuse,
                facts=prompt.facts,
                generation=generation,
                canonical_tokens=prompt.canonical_tokens,
                num_replies=_num_replies(asked),
                stream=TextStream(self._encoder, () if params.min_tokens else params.stop, after=prompt_ids[-1]),
                sampler=replace(sampler, seed=sampler.seed + index),
                marks=Marks(submitted=submitted, match_s=match_s),
                table=self._new_table(),
                deadline=submitted + (self._limits.timeout_s or math.inf),
            )
            generation.prompt_ids = prompt_ids
            generation.on_cancel(partial(self._cancel, request))
            self._submit(request)

    def _cancel(self, request: Request) -> None:
        request.cancelled.set()
        self._wake()

    def _room(self, prompt: _Prompt) -> int:
        """How many tokens of reply fit behind the prompt; PromptTooLong when not even one does."""
        if not len(prompt.ids):
            raise BadRequest("the prompt is empty: it has no tokens", param="messages")
        most = self._limits.max_context - len(prompt.ids)
        if most < 1:
            raise PromptTooLong(
                f"the prompt has {len(prompt.ids)} tokens and the context holds {self._limits.max_context}: "
                "shorten the prompt or serve with a larger --max-context",
                param="messages",
            )
        return most

    def _prompt(self, asked: GenerationRequest) -> _Prompt:
        agent = asked.agent or HIDDEN_PREFIX + secrets.token_hex(8)
        off = self._reuse == "off" or asked.reuse == "off"
        if asked.token_ids is not None:
            ids = self._checked(asked.token_ids)
            return _Prompt(ids, agent, "off", NO_MATCH, 0) if off else self._given_ids(asked, ids, agent)
        rendered = self._render(asked)
        if off:
            ids = self._encoder.encode(rendered)
            return _Prompt(ids, agent, "off", NO_MATCH, len(ids))
        return self._matched(asked, rendered, agent)

    def _matched(self, asked: GenerationRequest, rendered: RenderedPrompt, agent: str) -> _Prompt:
        """Stored ids as far as the text agrees with them, a fresh encoding of the rest."""
        if asked.agent is not None:
            self._memory.know_agent(asked.namespace, asked.agent)
        mode = asked.reuse if asked.reuse != "off" else None
        match = self._memory.matcher.match(asked.namespace, asked.agent, rendered, mode)
        branch = match.branch
        if branch is None or match.num_tokens == 0:
            ids = self._encoder.encode(rendered)
            canonical = len(ids)
        else:
            rest = self._encoder.encode_rest(rendered, match.resume_byte)
            ids = np.concatenate([branch.ids[: match.num_tokens], rest])
            canonical = len(ids) if match.num_tokens <= branch.canonical_tokens else branch.canonical_tokens
        if asked.agent is None and _goes_on(match):
            assert branch is not None and branch.agent is not None
            agent = branch.agent
        facts = MatchFacts(
            relation=match.relation,
            source=match.source,
            has_own=asked.agent is not None and bool(self._memory.book.of(asked.namespace, asked.agent)),
            matched_bytes=match.matched_bytes,
            num_tokens=match.num_tokens,
            explanation=self._explain(asked, match, rendered),
        )
        return _Prompt(ids, agent, match.mode, facts, canonical)

    def _given_ids(self, asked: GenerationRequest, ids: np.ndarray, agent: str) -> _Prompt:
        """Ids are run as they are: what they share with the agent's branches is found by ids, not by text."""
        mine = self._memory.know_agent(asked.namespace, agent)
        shared = {branch.number: common_prefix(branch.ids, ids) for branch in mine if branch.ids is not None}
        nearest = max(mine, key=lambda branch: shared[branch.number], default=None)
        if nearest is None:
            return _Prompt(ids, agent, "continuation", NO_MATCH, 0)
        num_tokens = shared[nearest.number]
        relation: Relation = "exact" if num_tokens == len(ids) else "diverge"
        if relation == "diverge" and num_tokens == nearest.num_tokens:
            relation = "extend"
        matched = int(self._encoder.byte_ends(ids[:num_tokens])[-1]) if num_tokens else 0
        facts = MatchFacts(relation, "own", True, matched, num_tokens, None)
        return _Prompt(ids, agent, "continuation", facts, min(num_tokens, nearest.canonical_tokens))

    def _render(self, asked: GenerationRequest) -> RenderedPrompt:
        if asked.messages is not None:
            return self._encoder.render_chat(asked.messages, asked.tools)
        assert asked.text is not None
        return self._encoder.render_text(asked.text)

    def _explain(self, asked: GenerationRequest, match: TextMatch, rendered: RenderedPrompt) -> Explanation | None:
        elsewhere = asked.agent is not None and self._memory.is_elsewhere(asked.namespace, asked.agent)
        known: KnownCause | None = "other_fingerprint" if elsewhere else None
        return explain(match, rendered, asked.messages, encoder=self._encoder, known=known)

    def _checked(self, token_ids: tuple[int, ...]) -> np.ndarray:
        self._check_ids(token_ids, "token_ids")
        return np.asarray(token_ids, dtype=np.uint32)

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        if not all(0 <= token < self._limits.vocab_size for token in token_ids):
            raise BadRequest(f"{param}: token ids must lie in 0 to {self._limits.vocab_size - 1}", param=param)


def _num_replies(asked: GenerationRequest) -> int | None:
    return None if asked.messages is None else sum(message.role == "assistant" for message in asked.messages)


def _goes_on(match: TextMatch) -> bool:
    """Whether an unnamed prompt continues an unnamed conversation."""
    branch = match.branch
    hidden = branch is not None and branch.agent is not None and branch.agent.startswith(HIDDEN_PREFIX)
    return hidden and match.relation in ("exact", "extend")
