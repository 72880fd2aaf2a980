"""Configurations whose KV cannot be stored, detected at startup, with the setting to change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import ConfigError

DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
ROLE = "kv_both"
KEPT = ("full", "window", "state")


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The settings of an engine that decide whether its KV can be stored.

    `groups`: the kinds of its KV cache groups, those in `KEPT` or others. `keeps_states`: recurrent states are kept
    where blocks end, so that others may resume there. `drafts`: how it speculates, if it does.
    """

    groups: Sequence[str]
    kv_role: str
    load_failure_policy: str
    cache_dtype: str = "auto"
    pipeline_parallel: int = 1
    context_parallel: int = 1
    data_parallel: int = 1
    has_own_directory: bool = True
    drafts: str | None = None
    load_format: str = "auto"
    tensor_parallel: int = 1
    keeps_states: bool = True


def check_engine(facts: EngineFacts) -> None:
    """ConfigError with every reason why this engine's KV cannot be stored, and what to set."""
    reasons = [*_kinds(facts), *_workers(facts), *_settings(facts)]
    if reasons:
        raise ConfigError("Rekindle cannot keep the KV of this engine: " + "; ".join(reasons))


def _kinds(facts: EngineFacts) -> list[str]:
    others = sorted({kind for kind in facts.groups if kind not in KEPT})
    instead = "serve such a model with Rekindle's own engine, or without this connector"
    if others:
        kept = "full attention, windows and recurrent states are kept"
        return [f"it has KV cache groups of the kinds {', '.join(others)}, and {kept}: {instead}"]
    if "full" not in facts.groups:
        return [f"it has no layer with full attention, by which conversations are found: {instead}"]
    return _states(facts) if "state" in facts.groups else []


def _states(facts: EngineFacts) -> list[str]:
    reasons = []
    if not facts.keeps_states:
        reasons.append(
            "recurrent states are not kept where blocks end: set --enable-prefix-caching and --mamba-cache-mode align"
        )
    if facts.tensor_parallel > 1:
        reasons.append(
            "recurrent states are divided among workers in the model's own way: set --tensor-parallel-size 1"
        )
    if facts.drafts is not None:
        reasons.append("speculation moves the ends after which recurrent states are kept: do not speculate")
    return reasons


def _workers(facts: EngineFacts) -> list[str]:
    reasons = []
    if facts.pipeline_parallel > 1:
        reasons.append("layers are on several workers: set --pipeline-parallel-size 1 (tensor parallel is supported)")
    if facts.context_parallel > 1:
        reasons.append("tokens are on several workers: set the context parallel sizes to 1")
    if facts.data_parallel > 1 and not facts.has_own_directory:
        reasons.append("each data-parallel engine has a store of its own: write {dp_rank} in dir")
    return reasons


def _settings(facts: EngineFacts) -> list[str]:
    reasons = []
    if facts.load_failure_policy != "recompute":
        reasons.append(
            "a damaged record would end a request with an error: set kv_load_failure_policy to recompute in "
            f"--kv-transfer-config (it is {facts.load_failure_policy})"
        )
    if facts.kv_role != ROLE:
        reasons.append(
            f"it both saves and loads: set kv_role to {ROLE} in --kv-transfer-config (it is {facts.kv_role})"
        )
    if facts.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        reasons.append(
            f"KV in {facts.cache_dtype} has scales of its own: set --kv-cache-dtype auto (q4h is smaller on disk)"
        )
    if facts.drafts is not None and facts.drafts not in DRAFTS_WITHOUT_KV:
        reasons.append(f"drafts by {facts.drafts} have KV of another model: speculate by ngram, or not at all")
    if facts.load_format == "dummy":
        reasons.append("its weights are random (--load-format dummy), so that KV of them has no name")
    return reasons
