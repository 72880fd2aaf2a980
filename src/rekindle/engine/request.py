"""Requests: a sequence, its caller, and what is known of both; the one object that passes through the engine."""

from __future__ import annotations

import enum
import math
import threading
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.engine.generation import Generation
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import Chain, GenerationRequest, Normalised, Source
from rekindle.matching.explain import Explanation
from rekindle.matching.matcher import Relation
from rekindle.model.sampler import SamplerState
from rekindle.text.constraints.matcher import ReplyMatcher
from rekindle.text.constraints.types import Calls, Constraint
from rekindle.text.omissions import NOTHING_OMITTED, Omitted
from rekindle.text.replies import AnswerStream
from rekindle.text.stream import TextStream


class State(enum.Enum):
    """State of a request; only RUNNING ones hold uncommitted blocks."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class MatchFacts:
    """Result of matching by text, before any block lookup."""

    relation: Relation
    source: Source | None
    has_own: bool  # whether the relation is to a branch of the agent itself
    matched_bytes: int
    num_tokens: int
    explanation: Explanation | None


NO_MATCH = MatchFacts("none", None, False, 0, 0, None)


@dataclass(frozen=True, slots=True)
class CachedBreakpoint:
    """The prefix of a prompt up to one of its breakpoints, and for how many seconds it stays stored."""

    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TakenOut:
    """Text removed from a prompt after `num_before` of its tokens; `is_new`: it differs from the previous request."""

    kind: str
    message_index: int | None
    text: str
    num_before: int
    is_new: bool

    def priced(self, reused_tokens: int) -> Normalised:
        """Return it with the number of tokens that could not have been reused, had it stayed."""
        cost = max(0, reused_tokens - self.num_before) if self.is_new else 0
        return Normalised(self.kind, self.message_index, self.text, cost)


@dataclass(slots=True)
class RequestTimes:
    """Timestamps of a request in seconds of the engine's clock; durations for phases that may recur."""

    submitted: float
    match_s: float = 0.0
    load_s: float = 0.0
    load_started: float = 0.0
    admitted: float | None = None
    first_token: float | None = None
    logged: float | None = None  # when progress was last logged
    preempted: float | None = None  # the last time

    @property
    def waiting_since(self) -> float:
        """When a waiting request began to wait."""
        return self.submitted if self.preempted is None else self.preempted


@dataclass(slots=True, eq=False)
class Reply:
    """What the caller of a request gets: how its tokens are drawn, their text, and where it goes."""

    generation: Generation
    sampler: SamplerState
    stream: TextStream | AnswerStream
    matcher: ReplyMatcher | None = None  # of a reply that is constrained here
    constraint: Constraint | None = None  # as requested, for another server that computes; the calls, too
    calls: Calls | None = None
    texts: list[str] = field(default_factory=list)  # as emitted


@dataclass(slots=True, eq=False)
class Request:
    """One generation in flight. Mutable, owned by the engine thread once submitted; `cancelled` may be set anywhere.

    `original`: the caller's request as it was rendered, if the next one may be anticipated from it. `compacts`: it asks
    for a summary of the agent's history. `priority` as in `GenerationRequest`.
    """

    namespace: str
    agent: str
    sequence: Sequence
    reply: Reply
    match: MatchFacts
    canonical_tokens: int
    num_replies: int | None
    times: RequestTimes
    deadline: float = math.inf  # of the engine's clock
    original: GenerationRequest | None = None
    compacts: bool = False
    breakpoints: tuple[CachedBreakpoint, ...] = ()  # one for each breakpoint
    taken_out: tuple[TakenOut, ...] = ()
    omitted: Omitted = NOTHING_OMITTED
    generic_tools: bool = False  # see Report
    is_reuse_known: bool = True  # another server that computes may not say what it reused
    priority: int = 0
    resumes: bool = False  # it continues an unfinished request of the agent
    chain: Chain | None = None  # once it has ended
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: State = State.WAITING

    @property
    def id(self) -> int:
        """Number of the generation, for log lines."""
        return self.reply.generation.id

    @property
    def counts_from(self) -> float:
        """When it counts as submitted among the requests of its namespace."""
        return self.times.submitted - self.priority

    @property
    def breakpoint_tokens(self) -> tuple[int, ...]:
        """Prompt tokens before each breakpoint."""
        return tuple(each.num_tokens for each in self.breakpoints)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """Passed to the intake when a request ends: the sequence whose KV is stored, and its block hashes."""

    namespace: str
    agent: str
    root: BlockHash
    ids: np.ndarray  # uint32, as far as KV was computed
    hashes: tuple[BlockHash, ...]
    head: BlockHash
    head_tokens: int  # how many of the ids are in `head` and its ancestors
    num_replies: int | None  # earlier replies in the prompt, if it came as messages
    canonical_prompt: int  # leading ids known to be a fresh encoding of their text
    request: GenerationRequest | None = None  # if the next one can be anticipated from it
    compacts: bool = False  # the reply is a summary, from which a history may begin anew
    text: str = ""  # of the reply, as its caller received it
    opening: str = ""  # beginning of the reply that was in the prompt
    breakpoints: tuple[CachedBreakpoint, ...] = ()  # prefixes of the prompt that stay stored
    resume_points: tuple[int, ...] = ()  # tokens after which others, or the next turn, may go on
    seen_blocks: int | None = None  # only so many of its blocks are saved, as only these were computed before
