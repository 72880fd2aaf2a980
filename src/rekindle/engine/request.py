"""Requests: a sequence whose `num_computed` catches up with its ids, the one object that passes through the engine.

Owns token ids, `num_computed` and the timestamps. Cold prompt, warm prompt, chunk, decode, preemption and resume are
all the distance between two integers:

    0 ........ num_computed ............ num_tokens          positions [0, num_stored) have their KV in `table`;
    |--reused--|--- still to compute ---|                    rows below num_stored are run without being written
"""

from __future__ import annotations

import enum
import math
import threading
from dataclasses import dataclass, field

import numpy as np

from rekindle.cache.blocks.hashing import BlockHash, block_hash
from rekindle.cache.blocks.table import BlockTable
from rekindle.engine.generation import Generation
from rekindle.engine.types import GenerationRequest, Normalised, Reuse, Source, Task
from rekindle.matching.explain import Explanation
from rekindle.matching.matcher import Relation
from rekindle.model.adjustments import History
from rekindle.model.sampler import SamplerState
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
class Request:
    """One generation in flight. Mutable, owned by the engine thread once submitted; `cancelled` may be set anywhere.

    `background`: it runs only while no other request needs the engine, and is never remembered as a turn; `followed_by`
    runs after it. `asked`: the caller's request, if the next one may be anticipated from it.
    """

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
    times: RequestTimes
    table: BlockTable
    deadline: float = math.inf  # of the engine's clock
    task: Task = "generate"
    background: bool = False
    followed_by: Request | None = None
    asked: GenerationRequest | None = None
    breakpoints: tuple[CachedBreakpoint, ...] = ()  # one for each breakpoint
    taken_out: tuple[TakenOut, ...] = ()
    resumes: bool = False  # it continues an unfinished request of the agent
    cancelled: threading.Event = field(default_factory=threading.Event)
    state: State = State.WAITING
    num_computed: int = 0
    num_generated: int = 0
    hot_tokens: int = 0
    warm_tokens: int = 0
    num_preemptions: int = 0
    num_before: int = 0  # most tokens ever computed when it started or was preempted
    tried_loads: set[BlockHash] = field(default_factory=set)
    loaded: set[BlockHash] = field(default_factory=set)
    token_ids: np.ndarray = field(init=False)  # uint32, sized for the whole reply
    hashes: list[BlockHash] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # pieces of the reply, as emitted

    def __post_init__(self) -> None:
        self.token_ids = np.zeros(len(self.prompt_ids) + self.max_new_tokens, dtype=np.uint32)
        self.token_ids[: len(self.prompt_ids)] = self.prompt_ids

    @property
    def id(self) -> int:
        """Number of the generation, for log lines."""
        return self.generation.id

    @property
    def breakpoint_tokens(self) -> tuple[int, ...]:
        """Prompt tokens before each breakpoint."""
        return tuple(each.num_tokens for each in self.breakpoints)

    @property
    def is_turn(self) -> bool:
        """Whether its sequence is remembered when it ends; blocks of other requests wait in memory for one that is."""
        return not self.background and self.task != "absorb"

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_reusable(self) -> int:
        """Tokens of the prompt that need not run; with a reply the last one must, for its logits."""
        return self.num_prompt - (self.task == "generate")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and reply so far."""
        return self.num_prompt + self.num_generated

    @property
    def num_left(self) -> int:
        """Tokens still to compute before the next one can be sampled, or the task is done; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_gained(self) -> int:
        """Tokens computed since it started, beyond those ever computed before; negative while it recomputes."""
        return self.num_computed - self.num_before

    @property
    def ids(self) -> np.ndarray:
        """Token ids of prompt and reply so far (uint32, a view)."""
        return self.token_ids[: self.num_tokens]

    @property
    def num_blocks_ahead(self) -> int:
        """Blocks beyond its own that it needs to continue for one block of tokens, or to its end if that is nearer.

        A request admitted with fewer takes them from others, or is preempted and recomputed: 32 requests of 20 and 40
        tokens in 30 blocks ran 36 % more rows than needed without it, 10 % with it (tests/engine/test_crowded).
        """
        ahead = min(self.max_new_tokens - self.num_generated, self.block_tokens)
        return max(0, -(-(self.num_tokens + ahead) // self.block_tokens) - len(self.table.blocks))

    @property
    def history(self) -> History:
        """Prompt and reply tokens, as sampling of the next token sees them."""
        return History(self.prompt_ids, self.token_ids[self.num_prompt : self.num_tokens])

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that were reused."""
        return self.hot_tokens + self.warm_tokens

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.token_ids[self.num_tokens] = token
        self.num_generated += 1

    def hash_at(self, index: int) -> BlockHash:
        """Return the hash of full block `index`, extending the chain as far as needed; each block is hashed once."""
        size = self.block_tokens
        while len(self.hashes) <= index:
            start = len(self.hashes) * size
            assert start + size <= self.num_tokens, "only full blocks have hashes"
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(block_hash(parent, self.token_ids[start : start + size]))
        return self.hashes[index]

    def parent_of(self, index: int) -> BlockHash:
        """Return the hash of the block before `index`; the root for the first."""
        return self.hash_at(index - 1) if index else self.root


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
    asked: GenerationRequest | None = None  # if the next request can be anticipated
    text: str = ""  # of the reply, as its caller received it
    opening: str = ""  # beginning of the reply that was in the prompt
    breakpoints: tuple[CachedBreakpoint, ...] = ()  # prefixes of the prompt that stay stored
