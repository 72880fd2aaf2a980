"""What requests of each namespace reused in the last hour, how long their first tokens took, what reuse saved today.

Counts by minute and outcome, first tokens on a logarithmic scale. Saved are the reused tokens of today (UTC), at the
pace at which long prompts were computed today, without the time in which KV was loaded. Requests that switched reuse
off count nowhere. In memory only, of the namespaces used last: a restart begins anew.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from rekindle.engine.types import FinishReason, Report
from rekindle.server.gate.caller import Caller
from rekindle.server.observers.observer import ReplyId, RequestWatch
from rekindle.text.messages import Message

MINUTE_S, DAY_S = 60, 86400
HOUR = 60  # minutes
STEP = math.log(1.05)  # of the scale of first tokens: a median is known to 2.5 %
LEAST_PACED = 256  # computed tokens; of fewer the time is that of a step, whatever their number
MOST_NAMESPACES = 1024


@dataclass(frozen=True, slots=True)
class OutcomeOfHour:
    """Requests of one outcome in the last hour, and the median of their first tokens in milliseconds."""

    requests: int
    prompt_tokens: int
    reused_tokens: int
    first_token_ms: float | None


@dataclass(frozen=True, slots=True)
class SavedToday:
    """Tokens reused since `since` (Unix seconds), and about how many seconds computing them would have taken longer;
    None while no long prompt was computed."""

    since: float
    reused_tokens: int
    seconds: float | None


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    first_tokens: Counter[int] = field(default_factory=Counter)  # by place on the scale

    def add(self, other: _Counts) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.reused_tokens += other.reused_tokens
        self.first_tokens.update(other.first_tokens)

    def median_ms(self) -> float | None:
        places = sorted(self.first_tokens.items())
        half = (self.first_tokens.total() + 1) // 2
        sums = zip(places, accumulate(number for _, number in places), strict=True)
        return next((round(math.exp(place * STEP), 2) for (place, _), before in sums if before >= half > 0), None)


@dataclass(slots=True)
class _Namespace:
    minutes: OrderedDict[int, dict[str, _Counts]] = field(default_factory=OrderedDict)
    day: int = -1
    reused_tokens: int = 0
    load_s: float = 0.0
    paced_tokens: int = 0
    paced_s: float = 0.0


class Today:
    """An observer; its figures may be read from any thread."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()

    def began(self, caller: Caller, endpoint: str, body: Mapping[str, Any], *, num_bytes: int = 0) -> TodayWatch:
        """Follow one request."""
        return TodayWatch(self, caller.namespace)

    def hour(self, namespace: str) -> dict[str, OutcomeOfHour]:
        """Return the last hour's requests by outcome."""
        sums: dict[str, _Counts] = {}
        with self._lock:
            first = self._minute() - HOUR
            minutes = self._namespaces[namespace].minutes if namespace in self._namespaces else {}
            for minute, outcomes in minutes.items():
                for outcome, counts in outcomes.items() if minute > first else ():
                    sums.setdefault(outcome, _Counts()).add(counts)
        return {
            outcome: OutcomeOfHour(each.requests, each.prompt_tokens, each.reused_tokens, each.median_ms())
            for outcome, each in sums.items()
        }

    def saved(self, namespace: str) -> SavedToday:
        """Return what reuse has saved today."""
        with self._lock:
            day = int(self._clock() // DAY_S)
            found = self._namespaces.get(namespace)
            known = found if found is not None and found.day == day else _Namespace()
            seconds = None
            if known.paced_tokens:
                seconds = max(0.0, known.reused_tokens * known.paced_s / known.paced_tokens - known.load_s)
            return SavedToday(max(self._started, day * DAY_S), known.reused_tokens, seconds)

    def add(self, namespace: str, report: Report) -> None:
        """Count a request that was replied to."""
        if report.reuse == "off":
            return
        with self._lock:
            known = self._namespaces.setdefault(namespace, _Namespace())
            self._namespaces.move_to_end(namespace)
            if len(self._namespaces) > MOST_NAMESPACES:
                self._namespaces.popitem(last=False)
            self._add_to_hour(known, report)
            self._add_to_day(known, report)

    def check(self) -> None:
        """Assert that no more is kept than the bounds allow."""
        with self._lock:
            assert len(self._namespaces) <= MOST_NAMESPACES, len(self._namespaces)
            assert all(len(known.minutes) <= HOUR for known in self._namespaces.values())

    def _minute(self) -> int:
        return int(self._clock() // MINUTE_S)

    def _add_to_hour(self, known: _Namespace, report: Report) -> None:
        minute = self._minute()
        counts = known.minutes.setdefault(minute, {}).setdefault(report.outcome, _Counts())
        while len(known.minutes) > HOUR:
            known.minutes.popitem(last=False)
        counts.requests += 1
        counts.prompt_tokens += report.prompt_tokens
        counts.reused_tokens += report.reused_tokens
        first_ms = report.timings.first_token_ms
        if math.isfinite(first_ms) and first_ms > 0:
            counts.first_tokens[round(math.log(first_ms) / STEP)] += 1

    def _add_to_day(self, known: _Namespace, report: Report) -> None:
        day = int(self._clock() // DAY_S)
        if known.day != day:
            known.day, known.reused_tokens, known.paced_tokens = day, 0, 0
            known.load_s = known.paced_s = 0.0
        timings = report.timings
        known.reused_tokens += report.reused_tokens
        known.load_s += timings.load_ms / 1000 if math.isfinite(timings.load_ms) else 0.0
        if report.computed_tokens >= LEAST_PACED and math.isfinite(timings.prefill_ms):
            known.paced_tokens += report.computed_tokens
            known.paced_s += timings.prefill_ms / 1000


class TodayWatch(RequestWatch):
    """Counts one request once, however many choices it has."""

    def __init__(self, today: Today, namespace: str) -> None:
        self._today = today
        self._namespace = namespace
        self._is_counted = False

    def finished(
        self, number: int, report: Report, reason: FinishReason, *, reply: Message, id: ReplyId | None = None
    ) -> None:
        """Count the request by the report of its first choice."""
        if not self._is_counted:
            self._is_counted = True
            self._today.add(self._namespace, report)
