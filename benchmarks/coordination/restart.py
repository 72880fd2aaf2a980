"""`python -m benchmarks coordination-restart`: what a session retains when its server is killed in mid-round.

    python -m benchmarks coordination-restart --agents 6 --rounds 3 --history 1000 --tokens 16 --out restarts.jsonl

A real server plays rounds of a session over HTTP. In the next round it gets SIGKILL while the agent in the middle seat
is speaking and some of its words have been emitted, without waiting for saves. Another server on the same store
resumes the round as its first request and plays more rounds; this repeats `--restarts` times in one session. Then
every message the client received is looked up by number and words; one that is lost, changed or doubled makes the exit
code 1. The arm `reuse off` is the same with servers that reuse no KV.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.coordination.bench import OURS, check_agents, chosen, participants_of, setting_of
from benchmarks.coordination.restart_report import Endured, Restart, measurements, restarts_table, turns_table
from benchmarks.coordination.talk import Talk
from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.harness.client import ServerProcess, flags_of, variables
from rekindle.model.checkpoint import Source
from rekindle.text.prompt import PromptEncoder
from rekindle_lab.record import Origin, deliver

LEAST_TOKENS = 4  # of a reply, so that the server can be killed in the middle of it
Report = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Arm:
    """When listeners prefill new messages, and which server settings differ."""

    listen: str = "now"
    settings: Mapping[str, str] = field(default_factory=dict)


ARMS: Mapping[str, Arm] = {OURS: Arm(), "reuse off": Arm("later", {"reuse": "off"})}


@dataclass(frozen=True, slots=True)
class CoordinationRestartBench:
    """What to play: `history` tokens shared by all agents beforehand, replies of `tokens` tokens.

    `rounds` complete rounds come before each kill and after the last.
    """

    agents: int = 6
    rounds: int = 3
    restarts: int = 3
    history: int = 0
    tokens: int = 40
    arms: tuple[str, ...] = ()
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        check_agents(self.agents)
        if self.rounds < 1 or self.restarts < 1 or self.history < 0:
            raise ConfigError("--rounds and --restarts must be at least 1, --history at least 0")
        if self.tokens < LEAST_TOKENS:
            raise ConfigError(
                f"--tokens must be at least {LEAST_TOKENS}, so that an agent can be killed in the middle of its words, "
                f"not {self.tokens}"
            )
        self.chosen_arms()

    def chosen_arms(self) -> list[str]:
        """Return the arms to play, in order."""
        return chosen(self.arms, ARMS)


def run_coordination_restart(settings: Settings, options: CoordinationRestartBench, console: Console) -> int:
    """Play every arm, print tables and checks, write the lines; return 0 if nothing is lost or doubled, else 1."""
    report = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    encoder = PromptEncoder.from_dir(Source.find(settings.model.model, settings.model.revision).fetch())
    done = [play_arm(arm, settings, options, encoder, report) for arm in options.chosen_arms()]
    for each in done:
        console.print(turns_table(each), restarts_table(each))
    code = verdict(done, report)
    origin = Origin.here("coordination-restart", {**flags_of(settings), **asdict(options), "out": None})
    deliver([line for each in done for line in measurements(each)], origin, options.out, console)
    return code


def verdict(done: Sequence[Endured], report: Report) -> int:
    """Report each check; return 0 if all hold, else 1."""
    checks = [check for each in done for check in each.checks()]
    for check in checks:
        report(f"{'holds' if check.holds else 'FAILS'}  {check.text}")
    return 0 if all(check.holds for check in checks) else 1


def play_arm(
    arm: str, settings: Settings, options: CoordinationRestartBench, encoder: PromptEncoder, report: Report
) -> Endured:
    """Play one session from an empty store through all its restarts; call `report` with a line for each."""
    restarts: list[Restart] = []
    with tempfile.TemporaryDirectory(prefix="rekindle-coordination-restart-") as directory:
        store = Path(directory)
        given = {**variables(settings, store), **ARMS[arm].settings}
        names = [each.name for each in participants_of(options.agents)]
        talk = Talk(names, rounds=options.rounds, tokens=options.tokens)
        with ServerProcess(log=store / "server.log", variables=given) as server:
            client = server.wait_ready()
            talk.begin(client, body_of(options, encoder, listen=ARMS[arm].listen))
            before = talk.rounds(client)
            kill = talk.round_until_killed(client, server)
        for number in range(1, options.restarts + 1):
            with ServerProcess(log=store / "server.log", variables=given) as server:
                client = server.wait_ready()
                ready_s = time.perf_counter() - kill.at
                restarts.append(talk.resume(client, kill, ready_s))
                report(f"{arm}: restart {number} of {options.restarts}, {_summary(restarts[-1])}")
                if number < options.restarts:
                    kill = talk.round_until_killed(client, server)
                    continue
                compared, heard = talk.compared(client), talk.misheard(client)
                server.stop()
    return Endured(arm, tuple(before), tuple(restarts), compared, tuple(heard))


def _summary(restart: Restart) -> str:
    first = restart.resumed[0]
    reused = first.reused_tokens / first.prompt_tokens
    return (
        f"killed while {restart.speaker} spoke, ready after {restart.ready_s:.2f} s, first token of {first.speaker} "
        f"{restart.first_token_s * 1e3:,.1f} ms after the request, {reused:.1%} of its prompt reused"
    )


def body_of(options: CoordinationRestartBench, encoder: PromptEncoder, *, listen: str) -> dict[str, Any]:
    """Return the body that creates the session; all replies have the same length."""
    return {
        "agents": [{"name": each.name, "persona": each.persona} for each in participants_of(options.agents)],
        "setting": setting_of(encoder, history=options.history, seed=options.seed),
        "sampling": {
            "temperature": 0.8,
            "seed": options.seed,
            "min_tokens": options.tokens,
            "max_tokens": options.tokens,
            "ignore_eos": True,
        },
        "listen": listen,
    }
