"""Findings of the probes of `rekindle doctor`: one line each, with advice if something is wrong; speeds among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Verdict = Literal["ok", "warn", "fail"]
TIMES = 3
MOST_SPREAD = 1.5  # on a machine with nothing else to do runs of the same work differ by a tenth or two
ADVICE = "another program keeps this machine busy: run doctor again without it; if it stays, serve with fewer --threads"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` is empty if there is nothing to do."""

    topic: str
    verdict: Verdict
    said: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == "ok") == (not self.advice), f"{self.topic}: {self.verdict} with advice {self.advice!r}"


# Speeds that `rekindle doctor` measures: several times each, as another program may take the processors meanwhile.
#
# Owns how often, how far the times of the same work may differ, and what is said where they differ more.


def several(measure: Callable[[], T]) -> list[T]:
    """Measure as often as it takes to see a disturbance."""
    return [measure() for _ in range(TIMES)]


def spread(values: Iterable[float]) -> float:
    """How many times the largest of some positive times or rates is the smallest."""
    found = sorted(values)
    return found[-1] / found[0]


def judged(finding: Finding, widest: float) -> Finding:
    """Return the finding of a speed, as a warning if the `spread` of its measurements is too wide."""
    if widest <= MOST_SPREAD:
        return finding
    verdict = "warn" if finding.verdict == "ok" else finding.verdict
    said = f"{finding.said}; disturbed: of runs of the same work one took {widest:,.1f} times as long as another"
    return replace(finding, verdict=verdict, said=said, advice="; ".join(filter(None, (finding.advice, ADVICE))))
