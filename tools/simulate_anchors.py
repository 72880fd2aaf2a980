"""Compare the simulator with known figures for Mooncake's synthetic trace (../shared/traces/README.md).

python tools/simulate_anchors.py mooncake_synthetic.jsonl

Shares of blocks by capacity, to 0.005, and the paper's LRU curve in tokens (FAST 2025, Figure 9), to 0.012.
The known figures come from a simulator that evicts blocks in free order, the last blocks of a request first; the
engine's order, leaves first, is shown alongside. Returns 1 if free order, or LRU on the curve, deviates by more.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rekindle_lab.simulate.capacities import parse_capacity
from rekindle_lab.simulate.reading import read_trace
from rekindle_lab.simulate.simulation import LRU, OPTIMUM, Memory, Policy, simulate
from rekindle_lab.simulate.trace import Trace, TraceOptions

CAPACITIES = ("unlimited", "30000", "10000", "1000")
KNOWN: dict[Policy, tuple[float, ...]] = {
    LRU: (0.640, 0.624, 0.424, 0.084),
    OPTIMUM: (0.640, 0.640, 0.618, 0.277),
}
CURVE = {
    "100k": 0.012,
    "1M": 0.146,
    "2M": 0.235,
    "4M": 0.381,
    "5M": 0.435,
    "8M": 0.545,
    "10M": 0.589,
    "50M": 0.658,
}
MOST, MOST_ON_CURVE = 0.005, 0.012


def share(trace: Trace, policy: Policy, capacity: str, unit: str) -> float:
    """Return the share of requested units found hot."""
    found = simulate(trace, Memory(parse_capacity(capacity, trace), policy=policy))
    return found.shares("blocks" if unit == "blocks" else "tokens")[0]


def table(trace: Trace) -> float:
    """Print known and found shares of blocks; return the largest deviation of free order."""
    free, worst = trace.unlinked(), 0.0
    print(f"{'policy':16} {'capacity':>10} {'known':>7} {'free':>8} {'off':>8} {'leaves':>8} {'off':>8}")
    for policy, row in KNOWN.items():
        for capacity, known in zip(CAPACITIES, row, strict=True):
            by_policy, leaves = (share(each, policy, capacity, "blocks") for each in (free, trace))
            worst = max(worst, abs(by_policy - known))
            shown = f"{by_policy:8.4f} {by_policy - known:+8.4f} {leaves:8.4f} {leaves - known:+8.4f}"
            print(f"{policy:16} {capacity:>10} {known:7.3f} {shown}")
    return worst


def curve(trace: Trace) -> float:
    """Print the paper's LRU curve and ours, in tokens; return the largest deviation."""
    worst = 0.0
    print(f"\n{'tokens':>8} {'paper':>7} {'lru':>8} {'off':>8}")
    for capacity, known in CURVE.items():
        found = share(trace, LRU, capacity, "tokens")
        worst = max(worst, abs(found - known))
        print(f"{capacity:>8} {known:7.3f} {found:8.4f} {found - known:+8.4f}")
    return worst


def main() -> int:
    """Print both tables; return 0 if no deviation is too large, else 1."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trace = read_trace(Path(sys.argv[1]), TraceOptions())
    worst, on_curve = table(trace), curve(trace)
    print(f"\nlargest deviation: {worst:.4f} of {MOST}, on the curve {on_curve:.6f} of {MOST_ON_CURVE}")
    return int(worst > MOST or on_curve > MOST_ON_CURVE)


if __name__ == "__main__":
    sys.exit(main())
