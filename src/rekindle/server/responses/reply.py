"""Builds a response of OpenAI's responses API from deltas, whole and as events.

Owns the response object, the numbers of events, and how a response that could not be stored is reported. Knows no HTTP.
"""

from __future__ import annotations

from typing import Any, Literal

from rekindle.engine.generation import Generation
from rekindle.engine.types import Delta, Progress
from rekindle.server.answers.answer import Stamp, progress_text
from rekindle.server.answers.choice import Choice, ReplyParser
from rekindle.server.answers.comparison import Comparison
from rekindle.server.answers.sse import comment
from rekindle.server.border import Problem
from rekindle.server.responses.calls import ResponseCall
from rekindle.server.responses.diagnosis import diagnosed
from rekindle.server.responses.output import Events, Output
from rekindle.text.messages import Message
from rekindle.text.replies import ReplyFormat


class ResponseReply:
    """The answer to one call."""

    events: Literal["typed"] = "typed"

    def __init__(
        self,
        stamp: Stamp,
        call: ResponseCall,
        generation: Generation,
        *,
        form: ReplyFormat,
        comparison: Comparison | None = None,
        block_tokens: int = 0,
    ) -> None:
        self._comparison, self._block_tokens = comparison, block_tokens
        self._stamp = stamp
        self.id = stamp.id
        self._call = call
        self._parser = ReplyParser(Choice(0, generation), form, tools=call.read_tools, parallel=call.parallel)
        self._output = Output(call.tools.known, seals=call.seals)
        self._num_events = 0
        self._has_begun = False
        self._finished: dict[str, Any] | None = None

    def opened(self, progress: Progress) -> Events:
        """Report that the response is in progress; prompt progress has no event."""
        return self._numbered(self._begun())

    def beat(self, progress: Progress | None) -> bytes:
        """A comment, which clients ignore."""
        return comment(progress_text(progress) if progress is not None else "waiting")

    def take(self, index: int, delta: Delta) -> Events:
        """Add a delta and return its events; the last delta ends the output."""
        events = self._begun()
        for event in self._parser.take(delta):
            events += self._output.take(event)
        if self._parser.reason is not None:
            events += self._output.finish("incomplete" if self._is_cut else "completed")
        return self._numbered(events)

    def has_ended(self, index: int) -> bool:
        """Whether the one call that was wanted is complete."""
        return self._parser.has_ended

    def message(self, index: int) -> Message:
        """The reply's text, reasoning and calls."""
        return self._parser.parsed.message()

    def ending(self) -> Events:
        """The last event, with the whole response."""
        response = self.whole()
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def broken(self, problem: Problem) -> Events:
        """The error, then the failed response: some clients look for the one, some for the other."""
        error = problem.body()["error"]
        event = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
        response = self._described("failed") | {"error": {"code": _code(problem), "message": error["message"]}}
        return self._numbered([event | {"error": error}, {"type": "response.failed", "response": response}])

    def whole(self) -> dict[str, Any]:
        """The response."""
        if self._finished is None:
            described = self._described("incomplete" if self._is_cut else "completed")
            report = self._parser.described(return_ids=self._call.return_ids)
            if self._call.tools.left_out:
                report["left_out_tools"] = list(self._call.tools.left_out)
            self._finished = described | {"usage": self._usage(), **self._diagnosed(), "rekindle": report}
        return self._finished

    def not_stored(self, why: str) -> None:
        """Record in the answer why the response could not be stored."""
        whole = self.whole()
        self._finished = whole | {"store": False, "rekindle": whole["rekindle"] | {"not_stored": why}}

    @property
    def _is_cut(self) -> bool:
        return self._parser.reason == "length"

    def _begun(self) -> Events:
        if self._has_begun:
            return []
        self._has_begun = True
        response = self._described("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _described(self, status: str) -> dict[str, Any]:
        """The response object; its usage is added when it is complete."""
        return {
            "id": self._stamp.id,
            "object": "response",
            "created_at": self._stamp.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._stamp.model,
            "output": [] if status == "in_progress" else list(self._output.items),
            "usage": None,
            **self._call.echo,
        }

    def _diagnosed(self) -> dict[str, Any]:
        """What the request that was named for a comparison says about this one's reuse."""
        report = self._parser.choice.report
        if self._call.compared_with is None or report is None:
            return {}
        return {"prompt_cache_diagnostics": diagnosed(self._comparison, report, block_tokens=self._block_tokens)}

    def _usage(self) -> dict[str, Any]:
        """Exact token counts: reused tokens are part of the input, and computed ones are stored unless reuse is off."""
        report = self._parser.choice.report
        assert report is not None, self._stamp.id
        written = 0 if report.reuse == "off" else report.computed_tokens
        return {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.reused_tokens, "cache_write_tokens": written},
            "output_tokens": report.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.num_reasoning_tokens},
            "total_tokens": report.prompt_tokens + report.completion_tokens,
        }

    def _numbered(self, events: Events) -> Events:
        numbered = [event | {"sequence_number": self._num_events + at} for at, event in enumerate(events)]
        self._num_events += len(events)
        return numbered


def _code(problem: Problem) -> str:
    """OpenAI's code for a problem in a failed response."""
    if problem.code == "context_length_exceeded":
        return problem.code
    if problem.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if problem.status < 500 else "server_error"
