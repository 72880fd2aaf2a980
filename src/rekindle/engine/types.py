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
from rekindle.model.sampler import SamplingParams
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

    `report` stands in the first delta (so that headers can be sent) and, complete, in the last.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """A whole reply. `prompt_ids` are the ids the model really saw."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: Report
    prompt_ids: tuple[int, ...]


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
    store: Mapping[str, Any] | None
