"""The one thing that travels through the engine: a sequence whose `num_computed` catches up with its ids.

Owns token ids, `num_computed` and the timing marks. Cold prompt, warm prompt, chunk, decode, preemption and resume
are all the distance between two integers:

    0 ........ num_computed ............ num_tokens          positions [0, num_stored) have their KV in `table`;
    |--reused--|--- still to compute ---|                    rows below num_stored are run without being written
"""

from __future__ import annotations

import enum
import math
import threading
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.explain import Explanation, explain_known
from rekindle.cache.hashing import BlockHash, block_hash
from rekindle.cache.matcher import Relation
from rekindle.cache.table import BlockTable
from rekindle.engine.generation import Generation
from rekindle.engine.types import Outcome, Report, Reuse, Source, Timings
from rekindle.model.adjustments import History
from rekindle.model.sampler import SamplerState
from rekindle.text.stream import TextStream


class State(enum.Enum):
    """Where a request stands; only RUNNING ones hold uncommitted blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class MatchFacts:
    """What matching by text found, before any block was looked up."""

    relation: Relation
    source: Source | None
    has_own: bool  # whether the relation is to a branch of the agent itself
    matched_bytes: int
    num_tokens: int
    explanation: Explanation | None


NO_MATCH = MatchFacts("none", None, False, 0, 0, None)


@dataclass(slots=True)
class Marks:
    """Moments of a request's life in seconds of the engine's clock; durations where a phase may recur."""

    submitted: float
    match_s: float = 0.0
    load_s: float = 0.0
    load_started: float = 0.0
    admitted: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One generation in flight. Mutable, owned by the engine thread once submitted; `cancelled` may be set anywhere."""

    namespace: str
    agent: str
    prompt_ids: np.ndarray  # uint32
    root: BlockHash
    block_tokens: int
    max_new_tokens: int
    reuse: Reuse
    facts: MatchFacts
    canonical_tokens: int
    num_replies: int | None
    generation: Generation
    stream: TextStream
    sampler: SamplerState
    marks: Marks
    table: BlockTable
    deadline: float = math.inf  # of the engine's clock
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: State = State.WAITING
    num_computed: int = 0
    num_generated: int = 0
    hot_tokens: int = 0
    warm_tokens: int = 0
    num_preemptions: int = 0
    tried_loads: set[BlockHash] = field(default_factory=set)
    loaded: set[BlockHash] = field(default_factory=set)
    token_ids: np.ndarray = field(init=False)  # uint32, room for the whole answer
    names: list[BlockHash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = np.zeros(len(self.prompt_ids) + self.max_new_tokens, dtype=np.uint32)
        self.token_ids[: len(self.prompt_ids)] = self.prompt_ids

    @property
    def id(self) -> int:
        """Number of the generation, for log lines."""
        return self.generation.id

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.num_prompt + self.num_generated

    @property
    def num_left(self) -> int:
        """Tokens still to compute before the next one can be sampled; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def ids(self) -> np.ndarray:
        """Token ids of prompt and answer so far (uint32, a view)."""
        return self.token_ids[: self.num_tokens]

    @property
    def num_blocks_ahead(self) -> int:
        """Blocks beyond its own that it needs to go on for one block of tokens, or to its end if that is nearer.

        Who is let in on less takes these from the others, is preempted for them and computed again: 32 requests of 20
        and 40 tokens in 30 blocks ran 36 % more rows than needed without it, 10 % with it (tests/engine/test_crowded).
        """
        ahead = min(self.max_new_tokens - self.num_generated, self.block_tokens)
        return max(0, -(-(self.num_tokens + ahead) // self.block_tokens) - len(self.table.blocks))

    @property
    def history(self) -> History:
        """What the choice of the next token may look back on."""
        return History(self.prompt_ids, self.token_ids[self.num_prompt : self.num_tokens])

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.token_ids[self.num_tokens] = token
        self.num_generated += 1

    def name(self, index: int) -> BlockHash:
        """Hash of full block `index`, extending the chain as far as needed; each block is hashed once."""
        size = self.block_tokens
        while len(self.names) <= index:
            start = len(self.names) * size
            assert start + size <= self.num_tokens, "only full blocks have names"
            parent = self.names[-1] if self.names else self.root
            self.names.append(block_hash(parent, self.token_ids[start : start + size]))
        return self.names[index]

    def parent_of(self, index: int) -> BlockHash:
        """Hash of the block before `index`; the root for the first."""
        return self.name(index - 1) if index else self.root

    def outcome(self, min_reuse_tokens: int) -> Outcome:
        """EXACT, EXTEND, DIVERGE or MISS: how the texts relate, and MISS where their KV was gone.

        Said of the agent's own branches when it has any, also where more was reused from another's. Without any text
        to compare (blocks that others computed meanwhile), what was reused speaks.
        """
        reused = self.hot_tokens + self.warm_tokens
        if reused < min(min_reuse_tokens, self.num_prompt - 1) or reused == 0:
            return "miss"
        if self.facts.relation == "none":
            return "miss" if self.facts.has_own else "diverge"
        return self.facts.relation

    def report(self, *, now: float, min_reuse_tokens: int) -> Report:
        """What is known so far; final once the first token is out."""
        marks = self.marks
        first = marks.first_token if marks.first_token is not None else now
        admitted = marks.admitted if marks.admitted is not None else first
        reused = self.hot_tokens + self.warm_tokens
        outcome = self.outcome(min_reuse_tokens)
        queue_s = max(0.0, admitted - marks.submitted - marks.match_s - marks.load_s)
        return Report(
            outcome=outcome,
            source=(self.facts.source or "shared") if reused else None,
            matched_bytes=self.facts.matched_bytes,
            prompt_tokens=self.num_prompt,
            reused_tokens=reused,
            hot_tokens=self.hot_tokens,
            warm_tokens=self.warm_tokens,
            computed_tokens=self.num_prompt - reused,
            completion_tokens=self.num_generated,
            reuse=self.reuse,
            timings=Timings(
                queue_ms=queue_s * 1e3,
                match_ms=marks.match_s * 1e3,
                load_ms=marks.load_s * 1e3,
                prefill_ms=(first - admitted) * 1e3,
                first_token_ms=(first - marks.submitted) * 1e3,
            ),
            explanation=self._explanation(outcome, reused),
        )

    def _explanation(self, outcome: Outcome, reused: int) -> Explanation | None:
        """Why not more: KV that was no longer there although the text agreed; else where the texts differ."""
        if self.reuse == "off":
            return None
        missing = min(self.facts.num_tokens, self.num_prompt - 1) - reused
        if missing >= self.block_tokens:
            return explain_known("evicted", f"{missing} of {self.facts.num_tokens} matched tokens")
        return self.facts.explanation if outcome in ("diverge", "miss") else None


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """What the intake is told when a request ends: the sequence whose KV is stored, and its block names."""

    namespace: str
    agent: str
    root: BlockHash
    ids: np.ndarray  # uint32, as far as KV was computed
    names: tuple[BlockHash, ...]
    head: BlockHash
    head_tokens: int  # how many of the ids lie in `head` and before it
    num_replies: int | None  # earlier replies in the prompt, where it came as messages
    canonical_prompt: int  # leading ids known to be a fresh encoding of their text
