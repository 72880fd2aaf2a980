"""The `rekindle` object of requests and answers, the same in every dialect."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rekindle.server.answers.validation import OpenModel, StrictModel


class RekindleOptions(StrictModel):
    """Which stored KV may be reused, and whether the answer includes the token ids of prompt and reply."""

    reuse: Literal["continuation", "canonical", "off"] | None = None
    return_ids: bool = False


class RekindleReport(OpenModel):
    """What was reused, from where, and why no more."""

    outcome: Literal["exact", "extend", "diverge", "miss"]
    source: Literal["own", "parent", "shared"] | None
    matched_bytes: int
    prompt_tokens: int
    reused_tokens: int
    hot_tokens: int
    warm_tokens: int
    computed_tokens: int
    completion_tokens: int
    reuse: Literal["continuation", "canonical", "off"]
    timings: dict[str, float]
    explanation: dict[str, Any] | None
    normalised: list[dict[str, Any]] = Field(default=[], description="what was removed from the prompt")
    left_out: list[dict[str, Any]] = Field(default=[], description="what a text model cannot see of the prompt")
    ignored: list[str] = Field(default=[], description="parameters that are not known here, or not to the template")
    broken_calls: list[str] = Field(default=[], description="tools whose calls are not whole: their JSON is not valid")
    generic_tools: bool = Field(default=False, description="the template has no tools: they are in the prompt's text")
    prompt_ids: list[int] | None = None
    completion_ids: list[int] | None = None
