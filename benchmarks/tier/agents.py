"""Many agents through one tier while two replicas write, also to the same agents: nothing may be lost, or there twice.

    python -m benchmarks tier-agents --agents 1000

Two replicas are processes of their own in two slots of a store. Agents share system texts, ten agents each. Half of
them talk with both replicas at the same time, about different things: their heads are written by both. Each round ends
when all of it is exported. Then a third replica, which has nothing, gets the next message of every conversation, and
the tier is compared with the ids that the replicas say they have stored:

    heads lost       agents whose head lacks a text of a replica, or a text that continues it
    not continued    conversations of which the third replica computed more than a block and the new message
    objects          of blocks, in the tier; they must be the distinct blocks of all texts, one object each

RekindleError if something was lost, or is there twice or without need.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.tier.replicas import replica, tier_of
from benchmarks.tier.talker import NAMESPACE, Done, Plan
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import flags_of
from rekindle.store.branch_text import BranchText
from rekindle_lab.record import Measurement, Origin, deliver
from rekindle_pocket import conversations
from rekindle_tier.heads import AgentHead
from rekindle_tier.sealing import BLOCKS, block_name

ARM = "rekindle"
REPLICAS = 2
SHARING = 10  # agents with one system text
HANDBOOK = 12  # sentences of a system text
WAIT_S = 30.0  # heads and blocks are always imported: what is found is measured, not whether it is faster
NEXT = "What did we say?"


@dataclass(frozen=True, slots=True)
class AgentsBench:
    """Agents, their turns with each replica, tokens of a reply."""

    agents: int = 1000
    rounds: int = 2
    tokens: int = 12
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if min(self.agents, self.rounds, self.tokens) < 1:
            raise ConfigError("give at least one agent, one round and one token")


@dataclass(slots=True)
class Found:
    """What the third replica found; `branches` are those of all heads."""

    lost: list[str] = field(default_factory=list)
    not_continued: list[str] = field(default_factory=list)
    branches: int = 0
    blocks: set[str] = field(default_factory=set)


def run_agents(settings: Settings, options: AgentsBench, console: Console) -> int:
    """Let the replicas write, look at what is there, print the figures; return 0. RekindleError if they are wrong."""
    flags = {**flags_of(settings), "tier_wait_s": WAIT_S}
    with tempfile.TemporaryDirectory(prefix="rekindle-tier-") as name:
        directory = Path(name)
        with console.status("two replicas write"):
            done, write_s = _written(flags, directory, options)
        objects = {path.name: path.stat().st_size for path in directory.glob(f"tier/*/{BLOCKS}/*")}
        with console.status("a third one reads"), replica(flags, directory, REPLICAS, directory / "tier") as third:
            began = time.perf_counter()
            found = _found(third, done)
            read_s = time.perf_counter() - began
    named = {name.removeprefix(f"{BLOCKS}/") for name in found.blocks}
    figures: dict[str, float] = {
        "agents": len({agent for each in done for agent in each.texts}),
        "conversations": sum(len(each.texts) for each in done),
        "turns": sum(len(texts) for each in done for texts in each.texts.values()),
        **{name.replace("_", " "): sum(each.figures[name] for each in done) for name in done[0].figures},
        "branches in heads": found.branches,
        "heads lost": len(found.lost),
        "not continued": len(found.not_continued),
        "distinct blocks": len(named),
        "block objects": len(objects),
        "missing objects": len(named - set(objects)),
        "objects of no text": len(set(objects) - named),
        "bytes of objects": sum(objects.values()),
        "seconds writing": write_s,
        "seconds reading": read_s,
    }
    console.print(_table(figures))
    measured = [Measurement(f"tier-agents: {name}", ARM, "", (value,)) for name, value in figures.items()]
    deliver(measured, Origin.here("tier-agents", {**flags, **asdict(options), "out": None}), options.out, console)
    wrong = [name for name in ("heads lost", "not continued", "missing objects", "objects of no text") if figures[name]]
    if wrong:
        raise RekindleError(f"{', '.join(wrong)}, such as {[*found.lost, *found.not_continued][:3]}")
    return 0


def _plans(flags: Mapping[str, Any], directory: Path, options: AgentsBench) -> Iterator[Plan]:
    """Yield a plan for each replica: every second agent is in both, of the others each is in one."""
    chooser = random.Random(options.seed)
    memory = conversations.Memory("Nadia", "archivist")
    texts = [conversations.system_prompt(chooser, memory, HANDBOOK) for _ in range(-(-options.agents // SHARING))]
    names = [f"agent-{number}" for number in range(options.agents)]
    system = {name: texts[number // SHARING] for number, name in enumerate(names)}
    for slot in range(REPLICAS):
        mine = [name for number, name in enumerate(names) if not number % 2 or number // 2 % REPLICAS == slot]
        rounds = [
            {name: f"Remember that {conversations.fact(chooser, memory)[1]}." for name in mine}
            for _ in range(options.rounds)
        ]
        yield Plan(dict(flags), str(directory), slot, system, rounds, options.tokens)


def _written(flags: Mapping[str, Any], directory: Path, options: AgentsBench) -> tuple[list[Done], float]:
    """Let each replica carry out its plan, round by round; return what they did, and the seconds of all rounds."""
    command = [sys.executable, "-m", "benchmarks.tier.talker"]
    with ExitStack() as stack, (directory / "log").open("w") as log:
        processes: list[subprocess.Popen[str]] = []
        for plan in _plans(flags, directory, options):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=_root()
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
            _say(process, json.dumps(asdict(plan)))
        _heard(processes, directory)
        began = time.perf_counter()
        for _ in range(options.rounds):
            for process in processes:
                _say(process, "go")
            heard = _heard(processes, directory)
        return [Done(**json.loads(each)) for each in heard], time.perf_counter() - began


def _root() -> Path:
    return Path(__file__).parents[2]


def _say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _heard(processes: Sequence[subprocess.Popen[str]], directory: Path) -> list[str]:
    """Return the next line of each; RekindleError if one has ended without."""
    heard = [process.stdout.readline() for process in processes if process.stdout is not None]
    if not all(heard):
        raise RekindleError(f"a replica ended:\n{(directory / 'log').read_text()[-4000:]}")
    return heard


def _found(third: Engine, done: Sequence[Done]) -> Found:
    """Ask the third replica for every conversation, and read every head."""
    found, tier, size = Found(), tier_of(third), third.spec.layout.block_tokens
    for agent in sorted({agent for each in done for agent in each.texts}):
        head = tier.imports.head(NAMESPACE, agent, compute_s=WAIT_S) or AgentHead(NAMESPACE, agent)
        found.branches += len(head.branches)
        for each in done:
            texts = [np.asarray(ids, dtype=np.uint32) for ids in each.texts.get(agent, ())]
            if not texts:
                continue
            last = next((one for one in head.branches if _begins(texts[-1], one)), None)
            if last is None:
                found.lost.append(agent)
                continue
            for ids in texts:
                blocks = BranchText(last.root, ids, 0, 0.0).blocks(size)
                found.blocks.update(block_name(block.hash, 0) for block in blocks)
            messages = [*each.messages[agent], {"role": "user", "content": NEXT}]
            report = third.stream(agent, messages, temperature=0.0, max_tokens=1).result().report
            if report.outcome != "extend" or report.reused_tokens < len(texts[-1]) - size:
                found.not_continued.append(f"{agent}: {report.outcome}, {report.reused_tokens} of {len(texts[-1])}")
    return found


def _begins(ids: np.ndarray, branch: BranchText) -> bool:
    return len(ids) <= len(branch.ids) and bool(np.array_equal(ids, branch.ids[: len(ids)]))


def _table(figures: Mapping[str, float]) -> Table:
    shown = Table(title="Agents through one tier, written by two replicas at once", title_justify="left")
    shown.add_column("figure")
    shown.add_column("value", justify="right")
    for name, value in figures.items():
        shown.add_row(name, f"{value:,.1f}" if name.startswith("seconds") else f"{value:,.0f}")
    return shown
