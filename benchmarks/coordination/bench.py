"""Agents that talk round after round, and the silence between two speakers.

    python -m benchmarks coordination --agents 6 --rounds 10 --history 1000 --arm all --out coordination.jsonl

Every arm is a separate session, on its own engine and store: ours; no agent listening while others speak; a layout
with the cue at the end of the history; no reuse at all. Replies have a fixed length, so that all arms generate equally
much, and end by themselves. The bound on the silence between two speakers is two decode steps of the same model plus
10 ms; a step is measured in the same engine, alone, before and after the session.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.coordination.report import (
    Played,
    Spoken,
    measurements,
    plot_rounds,
    round_line,
    rounds_table,
    totals_table,
)
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError, RekindleError
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.bench.workload import Workload
from rekindle_lab.record import Origin, deliver
from rekindle_sessions.log.records import SessionRecords
from rekindle_sessions.machine.types import MOST_AGENTS, Participant, Plan
from rekindle_sessions.service.coordinator import Coordinator

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jun")
SPACE, SESSION = "default", "bench"
OURS = "ours"
Report = Callable[[str], object]
# What each arm changes in the plan.
ARMS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    "not listening": {"listen": "later"},
    "trailing cue": {"listen": "later", "layout": "trailing_cue"},
    "reuse off": {"listen": "later", "reuse": "off"},
}
STEP_TOKENS, STEP_REPLIES = 48, 3  # decoded alone to measure a step
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CoordinationBench:
    """What to play: `history` tokens shared by all agents beforehand, replies of `tokens` tokens.

    `baseline_rounds` limits the rounds of all arms but ours (None: no limit).
    """

    agents: int = 6
    rounds: int = 10
    history: int = 0
    tokens: int = 40
    arms: tuple[str, ...] = ()
    baseline_rounds: int | None = None
    seed: int = 0
    out: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        check_agents(self.agents)
        if self.rounds < 1 or self.tokens < 1 or self.history < 0 or (self.baseline_rounds or 1) < 1:
            raise ConfigError("--rounds, --tokens and --baseline-rounds must be at least 1, --history at least 0")
        self.chosen_arms()

    def chosen_arms(self) -> list[str]:
        """Return the arms to play, in order."""
        return chosen(self.arms, ARMS)

    def rounds_of(self, arm: str) -> int:
        """Return the number of rounds an arm plays."""
        return self.rounds if arm == OURS else min(self.rounds, self.baseline_rounds or self.rounds)


def check_agents(agents: int) -> None:
    """Raise ConfigError if a session cannot have this number of agents."""
    if not 2 <= agents <= MOST_AGENTS:
        raise ConfigError(f"--agents must be from 2 to {MOST_AGENTS}, not {agents}")


def chosen(wanted: Collection[str], known: Iterable[str]) -> list[str]:
    """Return the wanted arms in defined order; none named, or `all`: every one. ConfigError names unknown ones."""
    arms = list(known)
    unknown = [name for name in wanted if name not in (*arms, "all")]
    if unknown:
        raise ConfigError(f"--arm must be all or some of {', '.join(arms)}, not {', '.join(unknown)}")
    return [name for name in arms if not wanted or "all" in wanted or name in wanted]


def run_coordination_bench(settings: Settings, options: CoordinationBench, console: Console) -> int:
    """Play every arm, report each round as it ends, print tables, write the lines; return 0 if all were played."""
    done: list[Played] = []
    for arm in options.chosen_arms():
        played = play_arm(arm, settings, options, partial(console.print, highlight=False, soft_wrap=True))
        done.append(played)
        console.print(rounds_table(played))
    console.print(totals_table(done))
    if options.plot is not None:
        plot_rounds(options.plot, done)
        console.print(f"plot written to {options.plot}", soft_wrap=True)
    given = {
        "agents": options.agents,
        "rounds": options.rounds,
        "history": options.history,
        "tokens": options.tokens,
        "seed": options.seed,
        "model": settings.model.model,
        "kv": settings.model.kv,
        "threads": settings.model.threads,
    }
    found = [each for played in done for each in measurements(played)]
    deliver(found, Origin.here("coordination", given), options.out, console)
    return 0


def play_arm(arm: str, settings: Settings, options: CoordinationBench, report: Report) -> Played:
    """Play one session from an empty store; `report` gets a line after each round: an arm may take many minutes."""
    with tempfile.TemporaryDirectory(prefix="rekindle-coordination-") as name:
        directory = Path(name)
        changed = replace(settings, store=replace(settings.store, dir=directory / "store"))
        records = SessionRecords.open(directory / "sessions.db")
        try:
            with Engine(changed) as engine:
                played = asyncio.run(_play(arm, engine, records, options, report))
                engine.check()
        finally:
            records.close()
    return played


async def _play(
    arm: str, engine: Engine, records: SessionRecords, options: CoordinationBench, report: Report
) -> Played:
    began = time.perf_counter()
    coordinator = Coordinator(engine, records)
    await coordinator.start()
    plan = plan_of(engine, options, **ARMS[arm])
    await coordinator.create(SPACE, plan, id=SESSION)
    await coordinator.settle(SPACE, SESSION)
    spoken: list[Spoken] = []
    walls: list[float] = []
    steps = await asyncio.to_thread(steps_alone, engine, plan)
    report(f"{arm}: shared history computed, {time.perf_counter() - began:.1f} s")
    try:
        for number in range(options.rounds_of(arm)):
            began = time.perf_counter()
            turns = await _round(coordinator, number)
            walls.append(time.perf_counter() - began)
            spoken += turns
            report(round_line(arm, turns, options.rounds_of(arm), walls[-1]))
        await coordinator.settle(SPACE, SESSION)
        steps += await asyncio.to_thread(steps_alone, engine, plan)
        coordinator.check()
    finally:
        await coordinator.close()
    return Played(arm, tuple(spoken), tuple(walls), tuple(steps))


def plan_of(engine: Engine, options: CoordinationBench, **changes: Any) -> Plan:
    """Plan a round of agents that share a long text; replies have a fixed number of tokens and end by themselves."""
    ends = tuple((token, 100.0) for token in sorted(engine.spec.eos_ids))
    sampling = (
        ("temperature", 0.8),
        ("seed", options.seed),
        ("min_tokens", options.tokens),
        ("max_tokens", options.tokens + 1),
        ("logit_bias", ends),
    )
    setting = setting_of(engine.encoder, history=options.history, seed=options.seed)
    return Plan(participants_of(options.agents), setting=setting, sampling=sampling, **changes)


def participants_of(agents: int) -> tuple[Participant, ...]:
    """Return `agents` participants, in seat order."""
    names = [NAMES[i] if i < len(NAMES) else f"Guest{i + 1}" for i in range(agents)]
    return tuple(Participant(name, f"You are {name}, and you like short words.") for name in names)


def setting_of(encoder: PromptEncoder, *, history: int, seed: int) -> str:
    """Return the shared setting: a text of about `history` tokens, and a line that says they talk about it."""
    if not history:
        return "Friends meet and talk."
    text = Workload(encoder, context=max(history, 8), seed=seed).base(0)
    return f"{text}\n\nFriends who have read this talk about it."


def steps_alone(engine: Engine, plan: Plan) -> list[float]:
    """Measure milliseconds of decode steps of one stream after the shared history: the mean of each of a few replies.

    Tokens whose drafts were right took no step of their own.
    """
    messages = [{"role": "system", "content": plan.setting}, {"role": "user", "content": "Host: Go on."}]
    found: list[float] = []
    for _ in range(STEP_REPLIES):
        before = engine.stats().num_accepted_tokens
        stream = engine.stream("step", messages, temperature=0.0, max_tokens=STEP_TOKENS, ignore_eos=True)
        times = [time.perf_counter() for _ in stream]
        num_steps = STEP_TOKENS - 1 - (engine.stats().num_accepted_tokens - before)
        found.append((times[-1] - times[0]) * 1e3 / num_steps)
    return found


async def _round(coordinator: Coordinator, number: int) -> list[Spoken]:
    times: dict[int, list[float]] = {}
    found: list[Spoken] = []
    async with aclosing(coordinator.round(SPACE, SESSION)) as events:
        async for event in events:
            if event.kind == "token":
                times.setdefault(event.data["turn"], []).append(time.perf_counter())
            elif event.kind == "turn_complete":
                found.append(spoken_of(event.data, number, times.get(event.data["turn"], []), begins=not found))
            elif event.kind in ("turn_failed", "error"):
                raise RekindleError(f"round {number + 1} could not be played: {event.data}")
    return found


def spoken_of(data: Mapping[str, Any], number: int, times: Sequence[float], *, begins: bool) -> Spoken:
    """Build a turn from the data of its `turn_complete` and the seconds at which its tokens arrived.

    The first tokens are emitted once everything before them is durable, so only later ones are counted.
    """
    report = data["rekindle"]
    between = [(after - before) * 1e3 for before, after in pairwise(times[WARM_UP_TOKENS:])]
    return Spoken(
        round=number,
        speaker=data["speaker"],
        begins=begins,
        gap_ms=data["gap_ms"],
        prompt_tokens=report["prompt_tokens"],
        reused_tokens=report["reused_tokens"],
        taken_in_tokens=data["taken_in_tokens"],
        num_tokens=data["num_tokens"],
        token_ms=statistics.median(between) if between else None,
        timings=report["timings"],
        first_token_ms=data["first_token_ms"],
        warm_tokens=report["warm_tokens"],
    )
