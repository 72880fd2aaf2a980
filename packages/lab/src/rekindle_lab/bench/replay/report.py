"""Report of a replay: measurements, a table with a column per arm, and notes on it.

Pure arithmetic. A figure that the server did not give is left out and reported as unknown, never as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from rekindle_lab.bench.replay.replay import Exchange, Replayed
from rekindle_lab.bench.replay.table import arms_table, nearest_rank
from rekindle_lab.record import Measurement

WINDOW_S = 600.0  # recorded seconds after a restart that are also reported separately
FIRST, SENT, COMPUTED = "first token", "prompt tokens sent", "prompt tokens computed"
TOTAL, ERRORS, UNLIKE = "first tokens, sum", "errors", "replies unlike cold"


@dataclass(frozen=True, slots=True)
class ColdCheck:
    """Comparison with replies without reuse: number compared, ids that differ, number excluded as not greedy."""

    num_compared: int
    differing: tuple[str, ...]
    num_not_greedy: int


def measurements(replayed: Replayed, arm: str, cold: ColdCheck | None = None) -> list[Measurement]:
    """Return everything that could be measured. Failed requests count as errors, not as waiting."""
    found = list(_waiting(replayed.exchanges, arm, ""))
    for kind in ("kill", "restart"):
        back = tuple(item.seconds for item in replayed.events if item.event.kind == kind and item.seconds is not None)
        if back:
            found.append(Measurement(f"answers again after a {kind}", arm, "s", back))
            window = [item for item in replayed.exchanges if item.after == kind and item.since_s <= WINDOW_S]
            found += _waiting(window, arm, f", 10 min after a {kind}")
    kinds = Counter(item.answer.error for item in replayed.exchanges if item.answer.error is not None)
    detail = {"requests": len(replayed.exchanges), "kinds": dict(kinds), "first": _first_problem(replayed.exchanges)}
    found.append(Measurement(ERRORS, arm, "requests", (float(kinds.total()),), detail))
    if cold is not None and cold.num_compared:
        detail = {"compared": cold.num_compared, "differing": list(cold.differing), "not greedy": cold.num_not_greedy}
        found.append(Measurement(UNLIKE, arm, "replies", (float(len(cold.differing)),), detail))
    replies = {"replaced": replayed.num_replaced, "kept as recorded": replayed.num_kept}
    return [*found, Measurement("whole replay", arm, "s", (replayed.wall_s,), {"replies in prompts": replies})]


def _first_problem(exchanges: Iterable[Exchange]) -> str:
    return next((item.answer.problem[:300] for item in exchanges if item.answer.error is not None), "")


def _waiting(exchanges: Sequence[Exchange], arm: str, when: str) -> Iterator[Measurement]:
    """Yield first tokens and prompt tokens of the answered requests; nothing if there are none."""
    answered = [item for item in exchanges if item.answer.error is None]
    if not answered:
        return
    seconds = tuple(item.answer.first_token_s for item in answered)
    detail = {"at_s": [item.request.at_s for item in answered], "p95": nearest_rank(seconds, 0.95)}
    yield Measurement(FIRST + when, arm, "s", seconds, detail)
    yield Measurement(TOTAL + when, arm, "s", (sum(seconds),), {"requests": len(answered)})
    prompts = [item.answer.prompt_tokens for item in answered]
    cached = [item.answer.cached_tokens for item in answered]
    sent = sum(count or 0 for count in prompts)
    if None not in prompts:
        yield Measurement(SENT + when, arm, "tokens", (float(sent),))
        if None not in cached:
            computed = sent - sum(count or 0 for count in cached)
            yield Measurement(COMPUTED + when, arm, "tokens", (float(computed),), {"share": computed / max(sent, 1)})


def table(measured: Iterable[Measurement]) -> Table:
    """Build a table with a row per measure and a column per arm; "unknown" if a server did not report a figure."""
    return arms_table("A replayed day", _rows(measured))


def _rows(measured: Iterable[Measurement]) -> Iterator[Measurement]:
    """Yield the rows of the table: a distribution becomes its median, 95th percentile and maximum."""
    for item in measured:
        if item.measure.startswith(FIRST) and "at_s" in item.detail:
            for name, value in (("median", item.median), ("p95", item.detail["p95"]), ("max", max(item.values))):
                yield replace(item, measure=item.measure.replace(FIRST, f"{FIRST}, {name}"), values=(value,), detail={})
        else:
            yield item


def notes(replayed: Replayed, cold: ColdCheck | None) -> list[str]:
    """Return notes on what the table alone does not show."""
    found = []
    skipped = [event.event.kind for event in replayed.events if event.seconds is None]
    if skipped:
        found.append(f"skipped, no command was given: {', '.join(skipped)}")
    if replayed.num_skipped:
        found.append(f"{replayed.num_skipped} requests of other endpoints were not sent")
    answered = [item.answer for item in replayed.exchanges if item.answer.error is None]
    for name, known in (
        ("prompt", [a.prompt_tokens for a in answered]),
        ("cached", [a.cached_tokens for a in answered]),
    ):
        if None in known:
            missing = known.count(None)
            found.append(f"{missing} of {len(answered)} answers do not say how many {name} tokens there were")
    found.append(f"replies in prompts: {replayed.num_replaced} this server's own, {replayed.num_kept} as recorded")
    if cold is None:
        found.append("whether replies equal cold ones is unknown: this server cannot turn reuse off (see --cold-check)")
    elif cold.num_not_greedy:
        found.append(f"{cold.num_not_greedy} requests are not greedy: their replies cannot be compared")
    return found


def earlier(lines: Iterable[Mapping[str, Any]], day_sha256: str) -> list[Measurement]:
    """Return measurements of other arms on the same day from JSON lines."""
    ours = [line for line in lines if line.get("bench") == "replay"]
    return [Measurement.from_dict(line) for line in ours if line["settings"].get("day_sha256") == day_sha256]
