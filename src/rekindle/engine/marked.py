"""What is known of a prompt in tokens: up to where its caller wants it kept, and what was taken out of it."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.engine.types import Normalised


@dataclass(frozen=True, slots=True)
class Kept:
    """The beginning of a prompt, up to one of its breakpoints, and for how many seconds it is to stay stored."""

    num_tokens: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class TakenOut:
    """What was taken out of a prompt where `num_before` of its tokens end; `is_new`: the agent sent another before."""

    kind: str
    message_index: int | None
    text: str
    num_before: int
    is_new: bool

    def priced(self, reused_tokens: int) -> Normalised:
        """With the tokens that would not have been reused, had it stayed."""
        cost = max(0, reused_tokens - self.num_before) if self.is_new else 0
        return Normalised(self.kind, self.message_index, self.text, cost)
