"""Agents that talk round after round, and how long it is silent between two of them.

    python -m benchmarks coordination --agents 6 --rounds 10 --history 1000 --arm all --out coordination.jsonl

Every arm is a session of its own, on an engine and a store of its own: ours; nobody listening while others speak; a
layout whose cue stands at the end of the history; no reuse at all. Replies have a length that is given, so that all
arms say as much, and end by themselves. The silence between two speakers is held to two decode steps of the same model
and 10 ms; a step is measured in the same engine, alone, before the session and after it.
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
from rekindle.agents.log.records import SessionRecords
from rekindle.agents.machine.types import MOST_AGENTS, Participant, Plan
from rekindle.agents.sessions.coordinator import Coordinator
from rekindle.bench.workload import Workload
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.record import Origin, deliver
from rekindle.text.prompt import PromptEncoder

NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Jun")
SPACE, SESSION = "default", "bench"
OURS = "ours"
Tell = Callable[[str], object]
# What each arm changes of the plan.
ARMS: Mapping[str, Mapping[str, Any]] = {
    OURS: {},
    "not listening": {"listen": "later"},
    "trailing cue": {"listen": "later", "layout": "trailing_cue"},
    "reuse off": {"listen": "later", "reuse": "off"},
}
STEP_TOKENS = 32  # decoded alone to know what a step takes
WARM_UP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class CoordinationBench:
    """What to play: `history` tokens that all have in common before anybody speaks, replies of `tokens` tokens.

    `baseline_rounds` bounds the rounds of all arms but ours (None: as many).
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
        """The arms to play, in order."""
        return chosen(self.arms, ARMS)

    def rounds_of(self, arm: str) -> int:
        """How many rounds an arm plays."""
        return self.rounds if arm == OURS else min(self.rounds, self.baseline_rounds or self.rounds)


def check_agents(agents: int) -> None:
    """Raise ConfigError where no session has so many agents."""
    if not 2 <= agents <= MOST_AGENTS:
        raise ConfigError(f"--agents must be from 2 to {MOST_AGENTS}, not {agents}")


def chosen(wanted: Collection[str], known: Iterable[str]) -> list[str]:
    """Those of the known arms that are wanted, in their order; none named, or `all`: every one. ConfigError names
    what is no arm.
    """
    arms = list(known)
    unknown = [name for name in wanted if name not in (*arms, "all")]
    if unknown:
        raise ConfigError(f"--arm must be all or some of {', '.join(arms)}, not {', '.join(unknown)}")
    return [name for name in arms if not wanted or "all" in wanted or name in wanted]


def run_coordination_bench(settings: Settings, options: CoordinationBench, console: Console) -> int:
    """Play every arm, telling each round as it ends, print tables, write the lines; 0 when all were played."""
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


def play_arm(arm: str, settings: Settings, options: CoordinationBench, tell: Tell) -> Played:
    """One session from an empty store; `tell` is told a line as each round ends: an arm may take many minutes."""
    with tempfile.TemporaryDirectory(prefix="rekindle-coordination-") as name:
        directory = Path(name)
        changed = replace(settings, store=replace(settings.store, dir=directory / "store"))
        records = SessionRecords.open(directory / "sessions.db")
        try:
            with Engine(changed) as engine:
                played = asyncio.run(_play(arm, engine, records, options, tell))
                engine.check()
        finally:
            records.close()
    return played


async def _play(arm: str, engine: Engine, records: SessionRecords, options: CoordinationBench, tell: Tell) -> Played:
    began = time.perf_counter()
    coordinator = Coordinator(engine, records)
    await coordinator.start()
    plan = plan_of(engine, options, **ARMS[arm])
    await coordinator.create(SPACE, plan, id=SESSION)
    await coordinator.settle(SPACE, SESSION)
    spoken: list[Spoken] = []
    walls: list[float] = []
    steps = await asyncio.to_thread(steps_alone, engine, plan)
    tell(f"{arm}: what all know is computed, {time.perf_counter() - began:.1f} s")
    try:
        for number in range(options.rounds_of(arm)):
            began = time.perf_counter()
            turns = await _round(coordinator, number)
            walls.append(time.perf_counter() - began)
            spoken += turns
            tell(round_line(arm, turns, options.rounds_of(arm), walls[-1]))
        await coordinator.settle(SPACE, SESSION)
        steps += await asyncio.to_thread(steps_alone, engine, plan)
        coordinator.check()
    finally:
        await coordinator.close()
    return Played(arm, tuple(spoken), tuple(walls), tuple(steps))


def plan_of(engine: Engine, options: CoordinationBench, **changes: Any) -> Plan:
    """A round of agents who know the same long text; replies have so many tokens and then end by themselves."""
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
    """So many who talk, in the order of their seats."""
    names = [NAMES[i] if i < len(NAMES) else f"Guest{i + 1}" for i in range(agents)]
    return tuple(Participant(name, f"You are {name}, and you like short words.") for name in names)


def setting_of(encoder: PromptEncoder, *, history: int, seed: int) -> str:
    """What all know before anybody speaks: a text of about `history` tokens, and that they talk about it."""
    if not history:
        return "Friends meet and talk."
    text = Workload(encoder, context=max(history, 8), seed=seed).base(0)
    return f"{text}\n\nFriends who have read this talk about it."


def steps_alone(engine: Engine, plan: Plan) -> list[float]:
    """Milliseconds of decode steps of one stream behind the common history, with nobody beside it."""
    messages = [{"role": "system", "content": plan.setting}, {"role": "user", "content": "Host: Go on."}]
    times: list[float] = []
    num_tokens = STEP_TOKENS + WARM_UP_TOKENS
    for _ in engine.stream("step", messages, temperature=0.0, max_tokens=num_tokens, ignore_eos=True):
        times.append(time.perf_counter())
    return [(after - before) * 1e3 for before, after in pairwise(times[WARM_UP_TOKENS:])]


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
    """A turn from the data of its `turn_complete` and the seconds at which its tokens came.

    The first tokens are told when what came before is durable, so steps are counted behind them.
    """
    report = data["rekindle"]
    steps = [(after - before) * 1e3 for before, after in pairwise(times[WARM_UP_TOKENS:])]
    return Spoken(
        round=number,
        speaker=data["speaker"],
        begins=begins,
        gap_ms=data["gap_ms"],
        prompt_tokens=report["prompt_tokens"],
        reused_tokens=report["reused_tokens"],
        taken_in_tokens=data["taken_in_tokens"],
        num_tokens=data["num_tokens"],
        step_ms=statistics.median(steps) if steps else None,
        timings=report["timings"],
        first_token_ms=data["first_token_ms"],
        warm_tokens=report["warm_tokens"],
    )
