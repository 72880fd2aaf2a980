"""Forty turns of a coding agent on six chat templates, and with four habits of clients on one of them: how much of each
prompt was reused.

    python -m benchmarks coding-day --behaviour all --arm all --log requests.jsonl

A client that behaves like a coding agent talks to /v1/messages of a real server: tools, thinking, sub-agents, an
attribution line that changes in every request, a midnight. The model is scripted (`scripted`): its replies are
well formed, and their words and tools depend on the KV of the whole prompt. Afterwards some requests are repeated with
reuse off: the replies must be the same. The share counts all requests but the session's first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.coding_day.agent import Request, Session, SessionPlan
from benchmarks.coding_day.client import Heard, MessagesClient
from benchmarks.coding_day.report import Checked, Exchange, Replayed, measurements, totals_table, turns_table
from benchmarks.coding_day.script import script_of
from benchmarks.coding_day.scripted import write_scripted_model
from benchmarks.coding_day.server import SessionClock, serving
from benchmarks.coding_day.templates import BEHAVIOURS, Behaviour
from benchmarks.coding_day.texts import Texts
from rekindle.config import MiB, Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import Client
from rekindle_lab.record import Origin, deliver

HOT_BYTES = 256 * MiB
# What each arm changes in the defaults.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "as served": {},
    "attribution only": {"normalise": "attribution"},
    "normalise off": {"normalise": "off"},
    "anticipate off": {"anticipate": "off"},
    "both off": {"normalise": "off", "anticipate": "off"},
}


@dataclass(frozen=True, slots=True)
class CodingDayBench:
    """What to run: behaviours (empty: all) and arms (empty: the first) by name, number of replies to check, outputs.

    `log` receives the bodies sent in all sessions, one after another, for `rekindle analyze`.
    """

    plan: SessionPlan
    behaviours: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    checks: int = 8
    by_turn: bool = True
    log: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("behaviour", self.behaviours, [each.name for each in BEHAVIOURS]),
            ("arm", self.arms, list(ARMS)),
        ):
            unknown = [name for name in given if name not in (*known, "all")]
            if unknown:
                raise ConfigError(f"--{kind} must be all or some of {', '.join(known)}, not {', '.join(unknown)}")

    def chosen_behaviours(self) -> list[Behaviour]:
        """Return the behaviours to run."""
        wanted = self.behaviours or ("all",)
        return [each for each in BEHAVIOURS if "all" in wanted or each.name in wanted]

    def chosen_arms(self) -> list[str]:
        """Return the arms to run."""
        wanted = self.arms or ("as served",)
        return [name for name in ARMS if "all" in wanted or name in wanted]


def run_coding_day_bench(settings: Settings, options: CodingDayBench, console: Console) -> int:
    """Run every session, print its turns and all totals; return 0 if all checked replies are equal, else 1."""
    done: list[Replayed] = []
    if options.log is not None:
        options.log.write_text("", "utf-8")
    for behaviour in options.chosen_behaviours():
        for arm in options.chosen_arms():
            with console.status(f"{behaviour.name}, {arm}"):
                replayed = replay(behaviour, arm, settings, plan=options.plan, checks=options.checks)
            done.append(replayed)
            if options.by_turn:
                console.print(turns_table(replayed))
            if options.log is not None:
                _append(options.log, replayed)
    console.print(totals_table(done))
    given = {"turns": options.plan.turns, "seed": options.plan.seed, "checks": options.checks}
    if options.out is not None:
        found = [each for replayed in done for each in measurements(replayed)]
        deliver(found, Origin.here("coding-day", given), options.out, console)
    return 0 if all(replayed.num_equal == len(replayed.checked) for replayed in done) else 1


def _append(log: Path, replayed: Replayed) -> None:
    with log.open("a", encoding="utf-8") as file:
        for each in replayed.exchanges:
            file.write(json.dumps(each.request.line()) + "\n")


def replay(behaviour: Behaviour, arm: str, settings: Settings, *, plan: SessionPlan, checks: int) -> Replayed:
    """Run one session from an empty store; compare `checks` of its replies, evenly spread, with reuse off."""
    with tempfile.TemporaryDirectory(prefix="rekindle-coding-day-") as name:
        directory = Path(name)
        model = write_model(behaviour, directory / behaviour.name, seed=plan.seed)
        changed = replace(
            settings,
            model=replace(settings.model, model=str(model)),
            cache=replace(settings.cache, hot_bytes=settings.cache.hot_bytes or HOT_BYTES),
            prompt=replace(settings.prompt, **ARMS[arm]),
            store=replace(settings.store, dir=directory / "store"),
        )
        clock = SessionClock(plan.now(1))
        with serving(changed, clock) as (engine, port):
            client = MessagesClient(Client(port))
            exchanges = play(client, clock, plan, behaviour)
            anticipated = client.stats()["anticipated_tokens"]
            check = _checked_by_ids if behaviour.keeps_stored_text else _checked
            checked = [check(client, clock, each) for each in spread(exchanges, checks)]
            engine.check()
    return Replayed(behaviour.name, arm, tuple(exchanges), tuple(checked), anticipated)


def write_model(behaviour: Behaviour, directory: Path, *, seed: int) -> Path:
    """Write the scripted model of a behaviour as a model directory."""
    corpus = Texts(seed).corpus()
    return write_scripted_model(directory, script_of(behaviour), template=behaviour.template, corpus=corpus, seed=seed)


def play(client: MessagesClient, clock: SessionClock, plan: SessionPlan, behaviour: Behaviour) -> list[Exchange]:
    """Play a session; before each request the client waits until the server is idle."""
    options = {"rekindle": {"return_ids": True}} if behaviour.keeps_stored_text else {}
    done: list[Exchange] = []

    def ask(request: Request) -> Heard:
        waited_s = client.wait_until_idle() if done else 0.0
        clock.now = request.at
        done.append(Exchange(request, client.ask({**request.body, **options}, request.identity), waited_s))
        return done[-1].heard

    Session(plan, ask, behaviour.habit).run()
    return done


def spread(exchanges: Sequence[Exchange], count: int) -> list[Exchange]:
    """Select `count` of them: the last, and others at even distances before it."""
    count = min(count, len(exchanges))
    return [exchanges[len(exchanges) - 1 - step * len(exchanges) // count] for step in reversed(range(count))]


def _checked(client: MessagesClient, clock: SessionClock, known: Exchange) -> Checked:
    """Repeat a request without reuse, at the same time of day."""
    clock.now = known.request.at
    again = client.ask({**known.request.body, "rekindle": {"reuse": "off"}}, known.request.identity)
    return Checked(known, again)


def _checked_by_ids(client: MessagesClient, clock: SessionClock, known: Exchange) -> Checked:
    """Compute the ids of a prompt without reuse: as sent, parts of it would be other text than is stored."""
    clock.now = known.request.at
    return Checked(known, client.complete(known.heard.report["prompt_ids"], known.request.body["max_tokens"]))
