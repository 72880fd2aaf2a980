"""One line per request for the person who watches the server, whether it ended well or not.

Owns the running price of a prompt token, from which the time saved is estimated. Nothing parses these lines.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rekindle.engine.types import Delta, FinishReason, Normalised, Report
from rekindle.errors import RekindleError
from rekindle.server.caller import Caller
from rekindle.server.errors import problem_of
from rekindle.text.messages import Message

logger = logging.getLogger("rekindle.server")
_PRICED_TOKENS = 16  # shorter prefills measure the step, not the tokens
_ERROR_LENGTH = 300  # a message may quote what the client sent


class RequestLog:
    """Writes the line; `price_ms` is the measured cost of one computed prompt token, None until one was."""

    def __init__(self) -> None:
        self._computed_tokens = 0
        self._prefill_ms = 0.0

    @property
    def price_ms(self) -> float | None:
        """Milliseconds per computed prompt token so far."""
        return self._prefill_ms / self._computed_tokens if self._computed_tokens else None

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> LogWatch:
        """Follow one request."""
        return LogWatch(self, caller.agent)

    def finished(self, number: int, agent: str | None, report: Report, reason: FinishReason) -> None:
        """Log one finished request and learn its price."""
        if report.computed_tokens >= _PRICED_TOKENS:
            self._computed_tokens += report.computed_tokens
            self._prefill_ms += report.timings.prefill_ms
        logger.info("#%d %s", number, self.line(agent, report, reason))

    def failed(self, number: int | None, agent: str | None, error: Exception) -> None:
        """Log one request that has no result; `number` None: it never got as far as the engine."""
        status = problem_of(error).status
        level = logging.INFO if status < 500 else logging.WARNING
        logger.log(level, "#%s %s", "-" if number is None else number, self.failure(agent, status, error))

    @staticmethod
    def failure(agent: str | None, status: int, error: Exception) -> str:
        """Agent, status, and what was wrong, on one line."""
        named = str(error) if isinstance(error, RekindleError) else repr(error)
        text = " ".join(named.split())
        return f"{agent or 'unnamed'}: failed with {status}, {text[:_ERROR_LENGTH]}"

    def line(self, agent: str | None, report: Report, reason: FinishReason) -> str:
        """Agent, outcome, reused of prompt, tier, first token, time saved, and why not more."""
        parts = [
            f"{agent or 'unnamed'}: {report.outcome}" if report.reuse != "off" else f"{agent or 'unnamed'}: reuse off",
            f"reused {report.reused_tokens:,} of {report.prompt_tokens:,}{self._tiers(report)}",
            f"first token {report.timings.first_token_ms:,.0f} ms",
        ]
        if report.reused_tokens and report.computed_tokens:
            price_ms = self.price_ms
            if price_ms is None:  # nothing else was computed yet: this prefill is the only measure there is
                price_ms = report.timings.prefill_ms / report.computed_tokens
            parts.append(f"saved about {report.reused_tokens * price_ms:,.0f} ms")
        parts.append("cancelled" if reason == "cancelled" else f"{report.completion_tokens:,} tokens out")
        dearest = {item.kind: item for item in sorted(report.normalised, key=lambda item: item.tokens)}
        parts += map(_taken_out, dearest.values())
        if report.explanation is not None:
            parts.append(f"because: {report.explanation.cause.replace('_', ' ')}")
        return ", ".join(parts)

    @staticmethod
    def _tiers(report: Report) -> str:
        if report.hot_tokens and report.warm_tokens:
            return f" ({report.hot_tokens:,} hot, {report.warm_tokens:,} warm)"
        return " hot" if report.hot_tokens else " warm" if report.warm_tokens else ""


def _taken_out(item: Normalised) -> str:
    done = "tools put in order" if item.kind == "tools" else f"{item.kind} taken out"
    return f"{done} (would have cost {item.tokens:,} tokens)" if item.tokens else done


class LogWatch:
    """Writes the line of one agent's request when it ends."""

    def __init__(self, log: RequestLog, agent: str | None) -> None:
        self._log = log
        self._agent = agent

    def delta(self, choice: int, delta: Delta) -> None:
        """Deltas have no line."""

    def finished(self, number: int, report: Report, reason: FinishReason, *, said: Message) -> None:
        """One line per choice."""
        self._log.finished(number, self._agent, report, reason)

    def failed(self, number: int | None, error: Exception) -> None:
        """One line."""
        self._log.failed(number, self._agent, error)
