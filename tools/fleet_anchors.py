"""Compare fleets with one machine on Mooncake's synthetic trace (../shared/traces/README.md).

python tools/fleet_anchors.py mooncake_synthetic.jsonl

Eight replicas, routed by session, find at most 0.02 of the blocks less than one machine with all their memory. With a
tier they find what it does, also when one dies half-way; what is in the tier but is computed sooner counts as found.
Returns 1 if one of these does not hold.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rekindle_lab.simulate.fleet.fleet import Death, Plan, run_fleet
from rekindle_lab.simulate.fleet.speeds import Speeds
from rekindle_lab.simulate.fleet.summary import summarise
from rekindle_lab.simulate.reading import read_trace
from rekindle_lab.simulate.simulation import Memory, simulate
from rekindle_lab.simulate.trace import TraceOptions

REPLICAS, HOT_BLOCKS = 8, 10_000
MOST_BELOW = 0.02


def main() -> int:
    """Print a line per fleet; return 0 if all keep within their limit, else 1."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    trace = read_trace(Path(sys.argv[1]), TraceOptions())
    failed = 0
    for tier, death, most in (
        (0, None, MOST_BELOW),
        (len(trace.blocks), None, 0.0),
        (len(trace.blocks), Death(0.5), 0.0),
    ):
        summary = summarise(run_fleet(trace, Plan(REPLICAS, "session", HOT_BLOCKS, tier, death=death), Speeds()))
        one = sum(simulate(trace, Memory(HOT_BLOCKS, tier)).shares("blocks"))
        found = summary.found + summary.left
        failed += one - found > most + 1e-9
        name = f"{'with' if tier else 'without'} tier{', one dies' if death else ''}"
        print(f"{name:24} fleet {found:.4f}, one machine {one:.4f}, {found - one:+.4f} of {-most:.2f} allowed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
