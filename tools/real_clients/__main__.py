"""Run real client programs through a scripted day against `rekindle serve`, and print docs/clients.md's table.

    python -m tools.real_clients                              # all of them: installs some 11 GB, takes an hour
    python -m tools.real_clients "Claude Code" opencode       # some of them
    python -m tools.real_clients --list

Engine, template, matching, store, server and clients are the real ones. The model is random; its sampler prefers what a
script says (`script`, `scripted_serve`), so that the tools of a client are called and its files changed. Each client
has a server of its own, an empty home and a small git repository. npm and PyPI must be reachable, and Node installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from platformdirs import user_cache_dir

from tools.real_clients.coding_agents import CODING_AGENTS
from tools.real_clients.day import Outcome, run_day
from tools.real_clients.libraries import LIBRARIES, UNTESTED
from tools.real_clients.model import write_model
from tools.real_clients.table import listing, table

CLIENTS = {each.name: each for each in (*CODING_AGENTS, *LIBRARIES)}


def main() -> int:
    """Run the clients; return 1 if one of them did not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="names of clients [all]")
    parser.add_argument("--list", action="store_true", help="print the names of all clients")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(user_cache_dir("rekindle"), "real-clients"),
        help="where clients are installed and run, kept for the next time [%(default)s]",
    )
    given = parser.parse_args()
    unknown = [name for name in given.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}; --list prints all")
    if given.list:
        print("\n".join(CLIENTS))
        return 0
    scratch = given.scratch.resolve()
    model = write_model(scratch / "model")
    outcomes = []
    for name in given.clients or CLIENTS:
        outcome = run_day(CLIENTS[name], scratch, model, say=lambda words: print(words, file=sys.stderr, flush=True))
        outcomes.append(outcome)
        for phase, requests in outcome.requests.items():
            print(listing(phase, requests), file=sys.stderr, flush=True)
    if not given.clients:
        outcomes += [Outcome(name, "", untested=reason) for name, reason in UNTESTED.items()]
    print(table(outcomes))
    return int(any(each.problems for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
