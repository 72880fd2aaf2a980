"""What a probe of `rekindle doctor` says: one line each, with what to do where something is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `advice` is empty where nothing is to be done."""

    topic: str
    verdict: Verdict
    said: str
    advice: str = ""

    def __post_init__(self) -> None:
        assert (self.verdict == "ok") == (not self.advice), f"{self.topic}: {self.verdict} with advice {self.advice!r}"
