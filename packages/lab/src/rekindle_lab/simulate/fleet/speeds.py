"""How long replicas compute and load: constant rates, stated with their units. Knows no trace.

The defaults describe a model of 8 billion parameters on one H200 with 4-bit KV, and a tier that is reached through 75 %
of 100 Gb/s. A long prompt computes at 24,000 tokens a second there, a short one faster; an object store over one stream
per replica is nearer to 1.2 GB/s and 0.06 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rekindle.errors import ConfigError

STEP_S = 0.005  # a request costs one step, however much of it is found


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one replica: prefill in tokens/s; KV in bytes a token; from the tier GB/s, and s to the first byte."""

    prefill: float = 20_000.0
    token_bytes: float = 35_840.0
    tier_bandwidth: float = 9.3
    tier_latency: float = 0.03

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0.0
            if not (math.isfinite(value) and (value > least or (field.name == "tier_latency" and value == least))):
                flag = field.name.replace("_", "-")
                wanted = "0 or more" if field.name == "tier_latency" else "above 0"
                raise ConfigError(f"--{flag} must be a number {wanted}, not {value:g}")

    def compute_s(self, num_tokens: int) -> float:
        """Return the seconds to compute so many tokens."""
        return num_tokens / self.prefill

    def load_s(self, num_tokens: int) -> float:
        """Return the seconds to load the KV of so many tokens from the tier; 0 for none."""
        return self.tier_latency + num_tokens * self.token_bytes / (self.tier_bandwidth * 1e9) if num_tokens else 0.0

    def is_load_faster(self, num_tokens: int) -> bool:
        """Return whether so many tokens are loaded sooner than computed; both grow evenly, so all or none are."""
        return self.load_s(num_tokens) < self.compute_s(num_tokens)
