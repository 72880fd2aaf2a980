"""The values that cross the engine's border: what a caller asks, what it is told.

All frozen. Identities that always hold in a `Report`: reused = hot + warm, computed = prompt - reused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rekindle.cache.explain import Explanation
from rekindle.errors import BadRequest
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.params import SamplingParams
from rekindle.text.messages import Message

Reuse = Literal["continuation", "canonical", "off"]
Outcome = Literal["exact", "extend", "diverge", "miss"]
Source = Literal["own", "shared"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One thing to generate: exactly one of `messages`, `text`, `token_ids` is the prompt.

    `agent` names the memory to continue (None: an unnamed conversation, found by its text alone). `reuse` None
    means continuation inside the agent's own memory and canonical between agents; "off" neither reads nor
    writes any stored KV.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    agent: str | None = None
    namespace: str = "default"
    tools: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    reuse: Reuse | None = None

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.messages, self.text, self.token_ids))
        if given != 1:
            raise BadRequest("give exactly one of messages, text and token_ids")


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds: waiting, matching and tokenising, loading from disk, prefilling; and submit to first token."""

    queue_ms: float
    match_ms: float
    load_ms: float
    prefill_ms: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """What was reused for one request, from where, and why not more."""

    outcome: Outcome
    source: Source | None
    matched_bytes: int
    prompt_tokens: int
    reused_tokens: int
    hot_tokens: int
    warm_tokens: int
    computed_tokens: int
    completion_tokens: int
    reuse: Reuse
    timings: Timings
    explanation: Explanation | None

    def __post_init__(self) -> None:
        assert self.reused_tokens == self.hot_tokens + self.warm_tokens, self
        assert self.computed_tokens == self.prompt_tokens - self.reused_tokens, self

    def as_dict(self) -> dict[str, Any]:
        """The `rekindle` object of a response; milliseconds rounded to a hundredth."""
        report = asdict(self)
        report["timings"] = {name: round(value, 2) for name, value in report["timings"].items() if math.isfinite(value)}
        return report


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply: text that is final, the tokens it came from; the last one carries `finish_reason`.

    `report` stands in the first delta (so that headers can be sent) and, complete, in the last. `logprobs` has an
    entry for each of the tokens where they were asked for, and none elsewhere.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    report: Report | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatResult:
    """A whole reply. `prompt_ids` are the ids the model really saw; `logprobs` one for each token, where asked for."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: Report
    prompt_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent's memory: tokens of its longest branch, how many of them are durable, and where they lie."""

    namespace: str
    agent: str
    branches: int
    num_tokens: int
    saved_tokens: int
    hot_tokens: int
    warm_tokens: int
    last_use: float
    pinned_until: float | None = None  # wall clock, infinity for ever; None: not pinned


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges of a running engine. Blocks: free + cached + held = all."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    hot_bytes: int
    block_bytes: int
    num_steps: int
    num_stall_misses: int
    num_preemptions: int
    prompt_tokens: int
    reused_tokens: int
    step_overhead_ms: float
    num_evictions: int  # blocks that left memory to make room
    num_agents: int  # with those of unnamed conversations
    num_pinned_agents: int
    started: Mapping[str, float]  # wall clock at which the weights were loaded, the store opened, its agents known
    store: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge overwrote: slots and bytes on disk, read back as zeros, and blocks in memory.

    `blocks_shared` blocks on disk stay: others stand on them.
    """

    agent: str
    slots_freed: int
    bytes_zeroed: int
    blocks_shared: int
    hot_blocks_zeroed: int


@dataclass(frozen=True, slots=True)
class Health:
    """Whether everything works that was promised; if not, what does not and what to do, a sentence each."""

    ok: bool
    problems: tuple[str, ...] = ()
