"""One choice of an answer as it is generated: reasoning, text and tool calls, independent of dialect.

Owns the content of a choice so far and why it ended. Knows no dialect and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, FinishReason, Report
from rekindle.model.logprobs import TokenLogprob
from rekindle.text.replies import Blanks, Event, ParsedReply, ReasoningDelta, ReplyFormat, ReplyStream

Reason = Literal["stop", "length", "tool_calls", "cancelled"]
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


def finite(token: TokenLogprob) -> float:
    """Return the log probability, at least `MIN_LOGPROB`."""
    return max(token.logprob, MIN_LOGPROB)


def token_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return one token; `bytes` distinguish tokens that are not valid text alone."""
    return {"token": token.text.decode("utf-8", "replace"), "logprob": finite(token), "bytes": list(token.text)}


def position_entry(token: TokenLogprob) -> dict[str, Any]:
    """Return the token at a position with the likeliest ones there."""
    return {**token_entry(token), "top_logprobs": [token_entry(each) for each in token.top]}


@dataclass(slots=True)
class Choice:
    """The tokens, logprobs and end of one choice so far."""

    index: int
    generation: Generation
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_logprobs_sent: int = 0
    num_ids_sent: int = 0
    report: Report | None = None
    reason: FinishReason | None = None
    stop_text: str | None = None

    def add(self, delta: Delta) -> None:
        """Add ids, logprobs and the end, if it has come."""
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.report = delta.report or self.report
        self.reason = delta.finish_reason or self.reason
        self.stop_text = delta.stop_text or self.stop_text

    def new_logprobs(self) -> list[TokenLogprob]:
        """Return the logprobs that no chunk has contained yet."""
        new = self.logprobs[self.num_logprobs_sent :]
        self.num_logprobs_sent = len(self.logprobs)
        return new

    def new_ids(self) -> list[int]:
        """Return the ids that no chunk has contained yet."""
        new = self.token_ids[self.num_ids_sent :]
        self.num_ids_sent = len(self.token_ids)
        return new

    def described(self, *, return_ids: bool) -> dict[str, Any]:
        """Return the `rekindle` object of this choice."""
        assert self.report is not None, f"choice {self.index} has no report"
        described = self.report.as_dict()
        if return_ids:
            described |= {"prompt_ids": list(self.generation.prompt_ids), "completion_ids": list(self.token_ids)}
        return described


class ReplyParser:
    """Parses the structured text of one choice.

    `tools`: the definitions that were sent, or whether calls are parsed at all; `parallel` False: the choice ends after
    its first call.
    """

    def __init__(
        self, choice: Choice, form: ReplyFormat, *, tools: bool | Sequence[Any], parallel: bool = True
    ) -> None:
        self.choice = choice
        self.parsed = ParsedReply()
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._stream: ReplyStream | None = None
        self._tokens: list[tuple[int, int]] = []  # start of each delta in the text, and its number of tokens
        self._num_pushed = 0
        self._num_raw = 0
        self._reasoning: list[tuple[int, int]] = []  # (start, end) of each stretch of reasoning in the text
        self._mark: int | None = None  # start of the blanks that were read last

    def take(self, delta: Delta) -> list[Event]:
        """Return the events that a delta adds; text that may still turn out to be a marker is deferred."""
        self.choice.add(replace(delta, logprobs=()) if self.has_ended else delta)
        if self._stream is None:  # the prompt, and the part of the reply it opens, is known now
            opening = self.choice.generation.opening
            self._stream = ReplyStream(self._form, tools=self._tools, parallel=self._parallel, opening=opening)
        self._tokens.append((self._num_pushed, len(delta.token_ids)))
        self._num_pushed += len(delta.text)
        events = self._stream.push(delta.text)
        if delta.finish_reason is not None:
            events = events + self._stream.finish()
        for event in events:
            self._note(event)
        return events

    def _note(self, event: Event) -> None:
        self.parsed.take(event)
        end = self._num_raw + len(event.raw)
        is_blank = isinstance(event, Blanks)
        if isinstance(event, ReasoningDelta) or (
            is_blank and self._reasoning and self._reasoning[-1][1] == self._num_raw
        ):
            begin = self._num_raw if self._mark is None else self._mark
            self._reasoning.append((begin, end))
        self._mark = (self._num_raw if self._mark is None else self._mark) if is_blank else None
        self._num_raw = end

    @property
    def has_ended(self) -> bool:
        """Whether the only allowed call is complete: any further output is discarded."""
        return self._stream is not None and self._stream.ended

    @property
    def reason(self) -> Reason | None:
        """Why it ended; "tool_calls" for a reply that called a tool and was not cut off. None: still running."""
        reason: Reason | None = self.choice.reason
        if self.has_ended and reason is not None and (self.parsed.has_whole_call or reason != "length"):
            reason = "stop"
        return "tool_calls" if reason == "stop" and self.parsed.has_whole_call else reason

    def described(self, *, return_ids: bool) -> dict[str, Any]:
        """Return the `rekindle` object of this choice, with the calls whose arguments are no JSON by mistake."""
        described = self.choice.described(return_ids=return_ids)
        if self.choice.reason == "stop":
            broken = [call.name for call in self.parsed.calls if not call.whole]
            described |= {"broken_calls": broken} if broken else {}
        return described

    @property
    def stop_text(self) -> str | None:
        """The stop string that ended the choice."""
        return self.choice.stop_text

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens whose text begins inside reasoning or its markers. Costs a pass over the deltas."""
        num_tokens, at = 0, 0
        for begin, count in self._tokens:
            while at < len(self._reasoning) and self._reasoning[at][1] <= begin:
                at += 1
            if at < len(self._reasoning) and self._reasoning[at][0] <= begin:
                num_tokens += count
        return num_tokens
