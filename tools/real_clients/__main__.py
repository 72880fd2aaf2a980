"""Run real client programs through a scripted day against `rekindle serve`, and print docs/clients.md's table.

    python -m tools.real_clients                              # all of them: installs some 11 GB, takes an hour
    python -m tools.real_clients "Claude Code" opencode       # some of them
    python -m tools.real_clients --list
    python -m tools.real_clients --backend llama.cpp --model FILE.gguf    # docs/llama-cpp.md's table of forty turns

Engine, template, matching, store, server and clients are the real ones. The model is random; its sampler prefers what a
script says (`script`, `scripted_serve`), so that the tools of a client are called and its files changed. Each client
has a server of its own, an empty home and a small git repository. npm and PyPI must be reachable, and Node installed.

With `--backend llama.cpp` a llama-server computes and draws the words, with the weights of a GGUF file, under a grammar
that admits what the script says; coding agents have one long conversation, in which it and Rekindle are killed. The
same requests are then sent to a llama-server without Rekindle. It takes an hour or more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_dir

from tools.real_clients.coding_agents import CODING_AGENTS
from tools.real_clients.comparison import ARMS, REKINDLE, Comparison
from tools.real_clients.comparison import table as comparison_table
from tools.real_clients.day import Outcome, run_day
from tools.real_clients.libraries import LIBRARIES, UNTESTED
from tools.real_clients.llama_model import write_gguf
from tools.real_clients.model import write_model
from tools.real_clients.replay import replay
from tools.real_clients.session import run_session
from tools.real_clients.table import listing, table
from tools.real_clients.work import WORKS

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
    parser.add_argument("--backend", choices=["llama.cpp"], help="who computes [Rekindle]")
    parser.add_argument("--model", type=Path, metavar="FILE", help="the GGUF file with whose weights llama-server does")
    parser.add_argument("--backend-flags", default="-t 1", help="more flags of llama-server [%(default)s]")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=[*ARMS], help="what is run, the others kept [all]")
    parser.add_argument("--most", type=int, metavar="N", help="replies of each replay [all]")
    given = parser.parse_args()
    unknown = [name for name in given.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"no such client: {', '.join(unknown)}; --list prints all")
    if given.list:
        print("\n".join(CLIENTS))
        return 0
    if (given.backend is None) != (given.model is None):
        parser.error("--backend llama.cpp and --model FILE go together")
    scratch = given.scratch.resolve()
    if given.backend is not None:
        return compare(given.clients or list(WORKS), scratch, given)
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


def compare(names: Sequence[str], scratch: Path, given: argparse.Namespace) -> int:
    """Run sessions and their replays, and print the table; return 1 if a client did not work."""
    unknown = [name for name in names if name not in WORKS]
    if unknown:
        raise SystemExit(f"no long conversation is known of {', '.join(unknown)}: {', '.join(WORKS)}")
    model = write_gguf(given.model, scratch / "gguf")
    problems, made = [], []
    for name in names:
        client = CLIENTS[name]
        installed, directory = scratch / "installed" / client.slug, scratch / "sessions" / client.slug
        title = f"{name} {client.packages.install(installed)}"
        for arm in given.arms:
            print(f"{title}: {arm}", file=sys.stderr, flush=True)
            if arm == REKINDLE:
                commands = client.packages.bin(installed)
                found = run_session(client, WORKS[name], directory, commands, model, given.backend_flags)
                problems += [f"{title}: {each}" for each in found]
            else:
                replay(arm, directory, model, given.backend_flags, most=given.most)
        made.append(Comparison.read(title, directory))
    print(comparison_table(made))
    print("\n".join(problems), file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
