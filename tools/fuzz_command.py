"""The command line of a tool that attacks with written cases and random ones, and its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

Campaign = Callable[[int, int, str], dict[str, Any]]


def run(campaign: Campaign, about: str, *, of: str) -> int:
    """Run a campaign of random cases (`of` what), print its report; return 1 if anything of it `failed`."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first random {of}; each has the next one")
    parser.add_argument("--only", default="", help="a part of the names of the written cases")
    given = parser.parse_args()
    report = campaign(given.runs, given.seed, given.only)
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0
