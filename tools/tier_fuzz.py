"""Damage an object tier in every way, in random combinations: replies must stay those of an engine without reuse.

    python -m tools.tier_fuzz --runs 300
    python -m tools.tier_fuzz --runs 1 --seed 17       # one run again, by the seed that a failure names

In each run a few agents talk with one replica, about what they share and what they do not; then some of the objects
that came to the tier are damaged, and another replica, which has never seen these agents, goes on with them, talks
further, and writes. Now and then an agent is purged there, or goes on at the first replica. Checked after each run: the
ids of every reply are those of the same prompt with `reuse: off`; nothing was raised; both replicas hold their own
invariants; and once what was put where objects belong, and is none, is gone, everything is exported. Both replicas are
started anew, with empty slots, every `FRESH` runs. A request that takes longer than `HANG_S` ends the program with the
stacks of all threads. Prints a JSON report; exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.tier.replicas import SECRET, export, replica
from rekindle.engine.api import Engine
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.errors import StoreError
from rekindle.model.params import SamplingParams
from rekindle.store.files.keys import derived_secret
from rekindle.text.messages import normalise_messages
from rekindle_pocket import conversations
from rekindle_tier.sealing import HEADS, Sealer

FRESH = 25
HANG_S = 120.0
FLAGS = {"threads": 1, "hot_bytes": 16 << 20, "block_tokens": 16, "tier_wait_s": 5.0}
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Victim:
    """An object to damage: its file, the files of the others, and what it was at earlier times, oldest first."""

    path: Path
    others: list[Path]
    earlier: list[bytes]
    chance: random.Random

    @property
    def name(self) -> str:
        """What its encryption is bound to: fingerprint, folder and name."""
        return "/".join(self.path.parts[-3:])

    def opened(self) -> bytes:
        """Return what is encrypted in it."""
        return Sealer(derived_secret(SECRET)).open(self.name, self.path.read_bytes())

    def seal(self, data: bytes, *, name: str = "", secret: str = SECRET) -> None:
        """Write other data into it, encrypted as a replica with this secret does, under this name."""
        self.path.write_bytes(Sealer(derived_secret(secret)).seal(name or self.name, data))


def flipped(data: bytes, chance: random.Random) -> bytes:
    """Return the data with a bit changed, at any place."""
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def put_directory(victim: Victim) -> None:
    """Replace an object by a directory."""
    victim.path.unlink()
    victim.path.mkdir()


def put_link(victim: Victim, to: Path) -> None:
    """Replace an object by a link."""
    victim.path.unlink()
    victim.path.symlink_to(to)


def put_earlier(victim: Victim) -> None:
    """Write what the object was at some time before; a block, which never changes, is removed."""
    if victim.earlier:
        victim.path.write_bytes(victim.chance.choice(victim.earlier))
    else:
        victim.path.unlink()


KINDS: dict[str, Callable[[Victim], object]] = {
    "truncated": lambda v: v.path.write_bytes(v.path.read_bytes()[: v.chance.randrange(v.path.stat().st_size)]),
    "bit flipped": lambda v: v.path.write_bytes(flipped(v.path.read_bytes(), v.chance)),
    "swapped": lambda v: v.path.write_bytes(v.chance.choice(v.others).read_bytes()),
    "missing": lambda v: v.path.unlink(),
    "zero length": lambda v: v.path.write_bytes(b""),
    "random bytes": lambda v: v.path.write_bytes(v.chance.randbytes(v.path.stat().st_size)),
    "a directory": put_directory,
    "a link to another": lambda v: put_link(v, v.chance.choice(v.others)),
    "a link outside": lambda v: put_link(v, Path("/etc/passwd")),
    "sparse gigabytes": lambda v: os.truncate(v.path, 8 << 30),
    "stale": put_earlier,
    "foreign secret": lambda v: v.seal(v.opened(), secret="a secret of somebody else"),
    "foreign model": lambda v: v.seal(v.opened(), name=f"{'0' * 64}/{'/'.join(v.path.parts[-2:])}"),
    "bit flipped before encryption": lambda v: v.seal(flipped(v.opened(), v.chance)),
    "another's content": lambda v: v.seal(Victim(v.chance.choice(v.others), [], [], v.chance).opened()),
    "garbage, encrypted": lambda v: v.seal(v.chance.choice([b"", b"{}", b"[1]", b"null", b'{"v": 1}', b"\xff"])),
}
NEED_OTHERS = ("swapped", "another's content", "a link to another")
BLOCKS_ONLY = ("bit flipped before encryption",)  # a record has its own checksum, of a head the seal is the only one


@dataclass
class Campaign:
    """Two replicas on one tier, and what was seen."""

    directory: Path
    writer: Engine
    reader: Engine
    counts: Counter[str] = field(default_factory=Counter)
    damaged: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def run(self, seed: int) -> None:
        """Damage what some new agents have in the tier, and go on with them."""
        chance = random.Random(seed)
        before = set(self._objects())
        agents = self._talked(seed, chance)
        new = [path for path in self._objects() if path not in before]
        self._damage(new, chance)
        for agent in chance.sample(sorted(agents), len(agents)):
            self._go_on(seed, agent, agents[agent], chance)
        for path in new:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.is_symlink():
                path.unlink()
        for engine in (self.writer, self.reader):
            answering(engine)
            export(engine)
            engine.check()

    def _objects(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("tier/*/[bh]*/*") if path.is_file())

    def _talked(self, seed: int, chance: random.Random) -> dict[str, Messages]:
        """Let agents talk with the first replica; return their conversations, with their next messages."""
        memory = conversations.Memory("Nadia", "archivist")
        shared = f"Desk {seed}. {conversations.system_prompt(chance, memory, chance.randrange(1, 12))}"
        talks: dict[str, Messages] = {}
        self._earlier: dict[str, list[bytes]] = {}
        for number in range(chance.randint(2, 4)):
            agent = f"agent-{seed}-{number}"
            own = conversations.system_prompt(chance, memory, chance.randrange(1, 12))
            content = shared if chance.random() < 0.7 else f"Desk {seed}-{number}. {own}"
            messages: Messages = [{"role": "system", "content": content}]
            for _ in range(chance.randint(1, 3)):
                messages.append({"role": "user", "content": f"Remember that {conversations.fact(chance, memory)[1]}."})
                reply = ask(self.writer, messages, agent)
                messages.append({"role": "assistant", "content": reply.text})
                export(self.writer)
                for path in self.directory.glob(f"tier/*/{HEADS}/*"):
                    self._earlier.setdefault(path.name, []).append(path.read_bytes())
            messages.append({"role": "user", "content": "What did I tell you?"})
            talks[agent] = messages
        return talks

    def _damage(self, paths: list[Path], chance: random.Random) -> None:
        share = chance.choice((0.05, 0.2, 0.5, 1.0))
        kinds = chance.sample(sorted(KINDS), chance.randint(1, len(KINDS)))
        chosen = [path for path in paths if chance.random() < share] or [chance.choice(paths)]
        for path in chosen:
            kind = chance.choice(kinds)
            others = [other for other in paths if other != path and other.is_file() and other not in chosen]
            is_head = path.parent.name == HEADS
            if (not others and kind in NEED_OTHERS) or (is_head and kind in BLOCKS_ONLY):
                kind = "missing"
            KINDS[kind](Victim(path, others, self._earlier.get(path.name, [])[:-1], chance))
            self.damaged[f"{kind}, {path.parent.name}"] += 1

    def _go_on(self, seed: int, agent: str, messages: Messages, chance: random.Random) -> None:
        """Let an agent go on elsewhere: compare its replies, then purge it now and then, or return where it was."""
        for _ in range(chance.randint(1, 2)):
            answering(self.reader)
            with self._nothing_raised(seed, agent):
                reply = ask(self.reader, messages, agent)
                self.counts[reply.report.outcome] += 1
                self.counts["reused tokens"] += reply.report.reused_tokens
                plain = ask(self.reader, reply.prompt_ids, None, reuse="off")
                if plain.token_ids != reply.token_ids:
                    self.failures.append(
                        f"seed {seed}: {agent} says {reply.token_ids}, without reuse {plain.token_ids}"
                    )
                messages.append({"role": "assistant", "content": reply.text})
                messages.append({"role": "user", "content": "And what else?"})
        if chance.random() < 0.2:
            with self._nothing_raised(seed, agent):
                ask(self.writer, messages, agent)
                self.counts["went back"] += 1
        if chance.random() < 0.1:
            with self._nothing_raised(seed, agent):
                self._purge(agent)

    def _purge(self, agent: str) -> None:
        try:
            self.reader.agent(agent).purge()
            self.counts["purged"] += 1
        except StoreError as error:
            # a promise: nobody is said to be forgotten while the tier cannot note it
            if "try again" not in str(error):
                raise
            self.counts["purge refused"] += 1

    @contextlib.contextmanager
    def _nothing_raised(self, seed: int, agent: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, it is a finding, and the campaign continues
            self.failures.append(f"seed {seed}: {agent}: {type(error).__name__}: {error}")


def ask(engine: Engine, prompt: Messages | tuple[int, ...], agent: str | None, **options: Any) -> ChatResult:
    """Return a short greedy reply."""
    given: dict[str, Any] = (
        {"token_ids": prompt} if isinstance(prompt, tuple) else {"messages": normalise_messages(prompt)}
    )
    params = SamplingParams(temperature=0.0, max_tokens=8)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    try:
        return engine.submit(GenerationRequest(**given, agent=agent, params=params, **options)).result()
    finally:
        faulthandler.cancel_dump_traceback_later()


def answering(engine: Engine) -> None:
    """Have the tier asked again at once, though it has failed: what failed before is no reason to compute."""
    tier = engine.components.tier
    assert tier is not None, "a replica has a tier"
    tier.breaker.succeeded()


def campaign(runs: int, seed: int) -> dict[str, Any]:
    """Run; return the report."""
    counts, damaged, failures, figures = Counter[str](), Counter[str](), list[str](), Counter[str]()
    for first in range(0, runs, FRESH):
        with tempfile.TemporaryDirectory(prefix="rekindle-fuzz-") as name:
            directory = Path(name)
            with (
                replica(FLAGS, directory, 0, directory / "tier") as writer,
                replica(FLAGS, directory, 1, directory / "tier") as reader,
            ):
                one = Campaign(directory, writer, reader, counts, damaged, failures)
                for number in range(first, min(runs, first + FRESH)):
                    one.run(seed + number)
                figures.update({key: n for key, n in (reader.stats().tier or {}).items() if isinstance(n, int)})
        print(f"{min(runs, first + FRESH)} of {runs} runs, {len(failures)} failures", file=sys.stderr, flush=True)
    names = ("imported_objects", "missing_objects", "bad_objects", "exported_objects", "failures")
    seen = {name: figures[name] for name in names}
    return {"runs": runs, "seed": seed, "damaged": dict(sorted(damaged.items())), **counts, **seen, "failed": failures}


def main() -> int:
    """Read the command line, run, print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; each has the next one")
    given = parser.parse_args()
    report = campaign(given.runs, given.seed)
    print(json.dumps(report, indent=1))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
