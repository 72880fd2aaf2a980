"""The finding of a probe of `rekindle doctor`: one line, with advice if something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` is empty if there is nothing to do."""

    topic: str
    verdict: Verdict
    said: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == "ok") == (not self.advice), f"{self.topic}: {self.verdict} with advice {self.advice!r}"
