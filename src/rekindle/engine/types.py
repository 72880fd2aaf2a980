"""The values that cross the engine's border: requests in, replies and reports out.

All frozen. Identities that always hold in a `Report`: reused = hot + warm, computed = prompt - reused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rekindle.cache.blocks.hashing import BlockHash
from rekindle.errors import BadRequest
from rekindle.matching.explain import Explanation
from rekindle.model.logprobs import TokenLogprob
from rekindle.model.params import SamplingParams
from rekindle.text.constraints.types import Calls, Constraint
from rekindle.text.messages import Message
from rekindle.text.omissions import NOTHING_OMITTED, LeftOut, Omitted
from rekindle.text.pictures import Picture

Reuse = Literal["continuation", "canonical", "off"]
Outcome = Literal["exact", "extend", "diverge", "miss"]
Source = Literal["own", "parent", "shared"]
Task = Literal["generate", "prefill", "absorb", "load"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A position in a prompt; everything before it stays stored for `ttl_s` seconds.

    It is after the first `num_chars` characters of a message's content (None: all of it); `message_index` None: after
    the tools.
    """

    message_index: int | None
    num_chars: int | None
    ttl_s: float


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One thing to generate: exactly one of `messages`, `text`, `token_ids` is the prompt.

    `agent` names the memory to continue (None: an unnamed conversation, found by its text alone). `reuse` None
    means continuation inside the agent's own memory and canonical between agents; "off" neither reads nor
    writes any stored KV.

    `parent` names the agent whose memory this one continues while it has none. `task`: "prefill" computes and remembers
    the prompt without a reply, "absorb" computes it and leaves its blocks in memory for later requests without making
    it a turn, "load" loads what is stored of it into memory and computes nothing. `open_end`: for a task without a
    reply, the last message may continue; what all prompts that continue it have in common is computed.
    `params` are used as they are: `Engine.sampling` has the defaults of the model. `template_kwargs` are passed to the
    chat template; `template_params` has the caller's parameter that each of them came from, which the report names as
    `ignored` if the template reads none of its own; `reply_prefix` is the beginning of the reply, part of the prompt.
    `constraint`: what the text of the reply must be, after reasoning; `calls`: it may be calls of tools instead, which
    are those of the value's tools if it has any.
    `structured`: deltas also hold the control tokens that the model's reply format needs, each preceded by U+FDD0.
    `echoes_thoughts`: whether the caller sends reasoning back with the history (None: unknown). `waits_aside`:
    it does not count towards the limit of waiting requests; the caller bounds how many of these there are. `omitted`:
    what the caller's body had that is not in this request, for its report. `pictures`: those in its messages, by key.
    `priority`: so many seconds older it counts among the requests of its namespace. `anticipates`: whether the next
    prompt may be computed ahead in idle time.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    agent: str | None = None
    namespace: str = "default"
    tools: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    reuse: Reuse | None = None
    parent: str | None = None
    task: Task = "generate"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    template_params: Mapping[str, str] = field(default_factory=dict)
    reply_prefix: str = ""
    constraint: Constraint | None = None
    calls: Calls | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    structured: bool = False
    echoes_thoughts: bool | None = None
    open_end: bool = False
    waits_aside: bool = False
    omitted: Omitted = NOTHING_OMITTED
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    priority: int = 0
    anticipates: bool = True

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.messages, self.text, self.token_ids))
        if given != 1:
            raise BadRequest("give exactly one of messages, text and token_ids")
        if self.task == "load" and self.params.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs: a load computes nothing", param="prompt_logprobs")

    @property
    def num_replies(self) -> int | None:
        """How many earlier replies the prompt has; None if it is not messages."""
        return None if self.messages is None else sum(message.role == "assistant" for message in self.messages)


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds: waiting, matching and tokenising, loading from disk, prefilling; and submit to first token."""

    queue_ms: float
    match_ms: float
    load_ms: float
    prefill_ms: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class Normalised:
    """Text removed from a prompt, or put into a fixed order, because clients change it on every call.

    `message_index` None: the tools. `text` is what was sent, shortened. `tokens`: how many reused tokens it would have
    cost; 0 if it is the same as in the agent's previous request.
    """

    kind: str
    message_index: int | None
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a started prompt is computed; reused = hot + warm, as in its report.

    `marked_tokens` and `breakpoint_tokens` as in `Report`; `elapsed_s` since it began.
    """

    outcome: Outcome
    source: Source | None
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    marked_tokens: int
    elapsed_s: float
    breakpoint_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The last of the blocks that hold the first `num_tokens` of a sequence, and the one before it, which outlives it
    if it is a tail: a longer block takes its place. A chained hash covers all blocks before, too."""

    hash: BlockHash
    parent: BlockHash
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The blocks that a reply read, and those that hold prompt and reply, each by the last one.

    `root` comes before the first block. `read` is None if there are none, or if the blocks are not known; without any
    that hold the reply, `head` is the root, of 0 tokens.
    """

    root: BlockHash
    read: Link | None
    head: Link


@dataclass(frozen=True, slots=True)
class Report:
    """What was reused for one request, from where, and why not more.

    `breakpoint_tokens` are the prompt tokens before each of the request's breakpoints, `marked_tokens` those before the
    last one in the prompt. `normalised`: what was removed from it; `left_out`: parts that a text model cannot see;
    `ignored`: parameters that are not known here, or not to the template; `generic_tools`: the template has no tools,
    so they are in the text. `chain` is known once the reply has ended, and is not in the dictionary.
    """

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
    marked_tokens: int = 0
    normalised: tuple[Normalised, ...] = ()
    breakpoint_tokens: tuple[int, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    ignored: tuple[str, ...] = ()
    generic_tools: bool = False
    chain: Chain | None = None

    def __post_init__(self) -> None:
        assert self.reused_tokens == self.hot_tokens + self.warm_tokens, self
        assert self.computed_tokens == self.prompt_tokens - self.reused_tokens, self

    def as_dict(self) -> dict[str, Any]:
        """Return the `rekindle` object of a response; milliseconds rounded to a hundredth."""
        report = asdict(self)
        del report["chain"]
        report |= {name: list(report[name]) for name in ("normalised", "left_out", "ignored")}
        report["timings"] = {name: round(value, 2) for name, value in report["timings"].items() if math.isfinite(value)}
        return report


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a reply: text that is final, the tokens it came from; the last one carries `finish_reason`.

    `report` is in the first delta (so that headers can be sent) and, complete, in the last. `logprobs` has an entry for
    each token if they were requested, else none. `stop_text` is the stop string that ended the reply.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    report: Report | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_text: str | None = None


@dataclass(frozen=True, slots=True)
class ChatResult:
    """A whole reply. `prompt_ids` are the ids the model saw; `logprobs` has one for each token, if requested.

    `prompt_logprobs`, if requested, has one for each of `prompt_ids`, None for the first, which follows nothing.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    report: Report
    prompt_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class BranchInfo:
    """One branch of an agent: its tokens, how many of them are durable, in memory, on disk only.

    `num_turns` ended in it. Its first `shared_tokens` are in blocks shared with the agents in `shared_with`; unnamed
    conversations are all called "unnamed". Its first `parent_tokens` are in blocks that it shares with an older branch
    of the agent, the `parent`.
    """

    number: int
    num_tokens: int
    saved_tokens: int
    hot_tokens: int
    warm_tokens: int
    shared_tokens: int
    shared_with: tuple[str, ...]
    last_use: float
    num_turns: int = 0
    parent: int | None = None  # its number
    parent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """One agent's memory: tokens of its longest branch, how many of them are durable, and on which tier they are.

    `branch_infos`, the latest first, are filled in for a single agent, not in a list of agents.
    """

    namespace: str
    agent: str
    branches: int
    num_tokens: int
    saved_tokens: int
    hot_tokens: int
    warm_tokens: int
    last_use: float
    pinned_until: float | None = None  # wall clock, infinity: forever; None: not pinned
    branch_infos: tuple[BranchInfo, ...] = ()


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
    used_hot_bytes: int  # of blocks that are not free, each with the parts that it has
    block_bytes: int
    num_steps: int
    num_stall_misses: int
    num_preemptions: int
    num_draft_tokens: int  # guessed and computed along with the next token of a reply
    num_accepted_tokens: int  # of these, those that became part of a reply
    prompt_tokens: int
    reused_tokens: int
    step_overhead_ms: float
    num_background: int  # pieces of idle work that wait or run
    num_anticipations: int  # next prompts computed in part or whole in idle time
    anticipated_tokens: int  # tokens computed for them
    num_evictions: int  # blocks evicted from memory to make room
    num_checked: int | None  # restored blocks that were computed again and compared; None: none are
    num_differed: int | None  # those of them that had other bits, and were dropped
    num_agents: int  # including unnamed conversations
    num_pinned_agents: int
    started: Mapping[str, float]  # wall clock: code imported, weights loaded, store opened, its agents known
    store: Mapping[str, Any] | None
    tier: Mapping[str, Any] | None = None  # of the object tier, if there is one


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of some restored blocks were computed again since the start: those that had equal bits, and those that
    had others or came after such a one, which are dropped."""

    num_equal: int
    num_differed: int


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge overwrote: slots and bytes on disk, read back as zeros, and blocks in memory.

    `blocks_shared` blocks on disk stay, and `hot_blocks_left` in memory: other agents use them, or a running request of
    the agent does. `tier_objects_deleted` is how many objects the object tier was asked to delete, which is as much as
    it guarantees; `tier_objects_shared` stay there. Other replicas purge the agent when they hear of it.
    """

    agent: str
    slots_freed: int
    bytes_zeroed: int
    blocks_shared: int
    hot_blocks_zeroed: int
    hot_blocks_left: int = 0
    tier_objects_deleted: int = 0
    tier_objects_shared: int = 0


@dataclass(frozen=True, slots=True)
class Imported:
    """What an agent has of the file that it was imported from: the tokens of its longest branch, and how many of them
    have their KV on disk. `without_kv` says why it has none; the next turn computes what is missing, on the same ids.
    """

    agent: str
    num_tokens: int
    kv_tokens: int
    without_kv: str | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether everything works; if not, what does not and what to do, a sentence each.

    `computes`: whether replies can be computed; of a front, whether its backend can be used.
    """

    ok: bool
    problems: tuple[str, ...] = ()
    computes: bool = True
