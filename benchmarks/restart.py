"""kill -9 a server with many agents, restart it, and wait for the first of them.

    python -m benchmarks restart --agents 1000 --agents 10000 --tokens 256 --repeats 5 --keep /var/tmp/filled

The engine itself fills the store, with real KV of distinct conversations; with `--keep` the next run with the same
sizes and model uses it again. In every repeat a server that has just answered is killed with SIGKILL. Measured in wall
time from the start of the new process: weights loaded, store opened, agents known, serving (the first answer to a
health check), first token of a random agent through HTTP; once with the store's pages in the kernel's file cache, once
with them dropped (the model's files stay cached). Medians with range.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.fleet import Budgets, allocated_bytes, spec_of
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.errors import ConfigError, RekindleError, RequestFailed
from rekindle.harness.client import Client, ServerProcess, flags_of, variables
from rekindle_lab.bench.distinct import MIN_TOKENS, Distinct, Messages
from rekindle_lab.bench.memory import drop_file_cache, resident_bytes
from rekindle_lab.record import Measurement, Origin, deliver

ARM = "rekindle"
MARK = "filled.json"
AT_ONCE = 32
SPARE = 100  # agents' worth of disk space for the restarts' own requests
POLL_S = 0.002
START_S = 600.0
STATES = ("cached", "dropped")


@dataclass(frozen=True, slots=True)
class RestartBench:
    """Agents per store, tokens per agent, and restarts per store."""

    agents: tuple[int, ...] = (1_000, 10_000)
    tokens: int = 256
    repeats: int = 5
    seed: int = 0
    keep: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.agents or min(self.agents) < 1 or self.repeats < 1:
            raise ConfigError("give at least one agent and one repeat")
        if self.tokens < MIN_TOKENS:
            raise ConfigError(f"--tokens must be at least {MIN_TOKENS}, not {self.tokens}")


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart: seconds from process start to each phase, and the server's index and memory size then."""

    seconds: Mapping[str, float]
    index_bytes: int
    rss_bytes: int


class Filler:
    """Fills a store with one turn of every agent, as fast as the engine computes."""

    def __init__(self, engine: Engine, *, tokens: int, seed: int) -> None:
        self._engine = engine
        self._texts = Distinct(engine.encoder, tokens=tokens, seed=seed)

    def fill(self, agents: int, progress: Progress) -> None:
        """Request one token from every agent; return once all turns are durable."""
        task = progress.add_task(f"filling a store with {agents:,} agents", total=agents)
        under_way: deque[Generation] = deque()
        for number in range(agents):
            messages = self._texts.messages(number)
            under_way.append(self._engine.stream(agent_name(number), messages, temperature=0.0, max_tokens=1))
            if len(under_way) >= AT_ONCE:
                under_way.popleft().result()
            progress.advance(task)
        for generation in under_way:
            generation.result()
        if not self._engine.flush(600.0):
            raise RekindleError("the store could not save the agents in time")

    def messages(self, number: int) -> Messages:
        """Return the conversation of agent `number`."""
        return self._texts.messages(number)


def agent_name(number: int) -> str:
    """Return the id of agent `number`."""
    return f"agent-{number}"


def run_restart(settings: Settings, options: RestartBench, console: Console) -> int:
    """Fill, restart, measure, print the table and JSON lines; return 0. RekindleError if an agent was not warm."""
    flags, measured = flags_of(settings), list[Measurement]()
    spec = spec_of(flags)
    with Progress(console=console, transient=True) as progress:
        for agents in options.agents:
            with _directory(options, agents) as store:
                room = Budgets.of(spec, tokens=options.tokens, hot_agents=1, disk_agents=agents + SPARE).disk_bytes
                own = replace(settings, store=replace(settings.store, disk_bytes=room))
                talks = _filled(flags_of(own), options, agents, store, progress)
                for state in STATES:
                    task = progress.add_task(f"{agents:,} agents, store {state}", total=options.repeats)
                    runs = [_restart(own, talk, store, state) for talk in progress.track(talks, task_id=task)]
                    measured += _measurements(runs, agents, state)
    console.print(table(measured))
    origin = Origin.here("restart", {**flags, **asdict(options), "keep": None, "out": None})
    deliver(measured, origin, options.out, console)
    return 0


@contextmanager
def _directory(options: RestartBench, agents: int) -> Iterator[Path]:
    if options.keep is None:
        with tempfile.TemporaryDirectory(prefix="rekindle-restart-") as name:
            yield Path(name)
        return
    directory = options.keep / f"{agents}x{options.tokens}"
    directory.mkdir(parents=True, exist_ok=True)
    yield directory


Talk = tuple[str, Messages]  # an agent and its conversation


def _filled(
    flags: Mapping[str, Any], options: RestartBench, agents: int, store: Path, progress: Progress
) -> list[Talk]:
    """Fill the store unless it is already filled this way; return random agents to query, one per repeat."""
    with Engine(Settings.load({**flags, "store": str(store)})) as engine:
        filler = Filler(engine, tokens=options.tokens, seed=options.seed)
        wanted = {
            "agents": agents,
            "tokens": options.tokens,
            "seed": options.seed,
            "fingerprint": engine.spec.fingerprint.hex(),
        }
        mark = store / MARK
        if not mark.exists() or json.loads(mark.read_text()) != wanted:
            mark.unlink(missing_ok=True)
            filler.fill(agents, progress)
            mark.write_text(json.dumps(wanted))
        numbers = random.Random(options.seed).choices(range(agents), k=options.repeats)
        return [(agent_name(number), filler.messages(number)) for number in numbers]


def _restart(settings: Settings, talk: Talk, store: Path, state: str) -> Restart:
    """Kill a server that has answered, start another, and query an agent that it has only on disk."""
    agent, messages = talk
    log, given = store / "server.log", variables(settings, store)
    with ServerProcess(log=log, variables=given) as server:
        server.wait_ready().chat([{"role": "user", "content": "Hello!"}], max_tokens=4)
        server.kill()
    if state == "dropped":
        drop_file_cache(store)
    began = time.time()
    with ServerProcess(log=log, variables=given) as server:
        client = wait_serving(server)
        serving = time.time() - began
        reply = client.chat(messages, agent=agent, max_tokens=4)
        stats = client.json("GET", "/v1/stats")
        rss_bytes = resident_bytes(server.pid)
    if not reply.report["warm_tokens"]:
        raise RekindleError(f"agent {agent} was not warm after the restart: {reply.report}")
    marks = stats["started"]
    seconds = {
        "weights loaded": marks["weights"] - began,
        "store opened": marks["store"] - began,
        "agents known": marks["agents"] - began,
        "serving": serving,
        "first warm token": serving + reply.first_token_s,
        "warm token alone": reply.first_token_s,
    }
    return Restart(seconds, allocated_bytes(store, "index.db*"), rss_bytes)


def wait_serving(server: ServerProcess) -> Client:
    """Return a client as soon as the server answers a health check."""
    client = Client(server.port)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            client.json("GET", "/health/ready")
            return client
        except RequestFailed:
            time.sleep(POLL_S)
    raise RekindleError(f"the server did not start:\n{server.log_tail()}")


def _measurements(runs: list[Restart], agents: int, state: str) -> Iterator[Measurement]:
    detail = {"agents": agents, "store": state}
    for phase in runs[0].seconds:
        values = tuple(run.seconds[phase] for run in runs)
        yield Measurement(f"restart: {phase}, {agents} agents, {state}", ARM, "s", values, detail)
    for name in ("index_bytes", "rss_bytes"):
        values = tuple(float(getattr(run, name)) for run in runs)
        yield Measurement(f"restart: {name}, {agents} agents, {state}", ARM, "bytes", values, detail)


def table(
    measured: list[Measurement],
    *,
    title: str = "Restart after kill -9, since the start of the process",
    prefix: str = "restart: ",
) -> Table:
    """Build a table with a row per measure, without the prefix of its name: median and range."""
    shown = Table(title=title, title_justify="left")
    for name in ("measure", "median", "least", "most"):
        shown.add_column(name, justify="left" if name == "measure" else "right")
    for item in measured:
        unit, scale = ("MiB", 2**-20) if item.unit == "bytes" else ("ms", 1e3)
        cells = (f"{value * scale:,.0f} {unit}" for value in (item.median, min(item.values), max(item.values)))
        shown.add_row(item.measure.removeprefix(prefix), *cells)
    return shown
