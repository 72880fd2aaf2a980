"""`python -m benchmarks fleet [MODEL]`: many more agents than memory and disk hold, and none refused.

    python -m benchmarks fleet --agents 1000 --tokens 1000 --hot-agents 10 --disk-agents 500

Every agent has its own conversation of `tokens` tokens; memory has room for `hot-agents` of them, the disk budget for
`disk-agents`. A few early ones are used again now and then. Verdict, exit code 0 or 1: no request was refused, hot and
disk bytes stayed within their budgets, the agents used last and those used in between are warm, the first ones are
cold, and answers equal those with reuse off (if the model's paths are bitwise equal on this machine).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from rekindle.config import Settings
from rekindle.demo.report import Check
from rekindle.engine.api import Engine
from rekindle.engine.generation import Generation
from rekindle.engine.types import ChatResult, GenerationRequest
from rekindle.errors import ConfigError, Overloaded, RekindleError
from rekindle.harness.client import flags_of
from rekindle.model.params import SamplingParams
from rekindle.spec import ModelSpec
from rekindle.store.files.records import RecordFormat
from rekindle_lab.bench.distinct import MIN_TOKENS, Distinct
from rekindle_lab.bench.memory import forget_peak, peak_bytes, resident_bytes
from rekindle_lab.record import Measurement, Origin, deliver

ARM = "rekindle"
REPLY_TOKENS = 8
AT_ONCE = 4  # concurrent requests
NUM_TOUCHED = 4  # early agents that are used again, so often that they are never the oldest on disk
WARM_SHARE = 0.9  # of the prompt of an agent that is warm
COLD_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class FleetBench:
    """How many agents of how many tokens, and how many of them memory and disk hold; `sample` are used at the end."""

    agents: int = 1_000
    tokens: int = 1_000
    hot_agents: int = 10
    disk_agents: int = 500
    sample: int = 10
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.tokens < MIN_TOKENS or self.hot_agents < 1 or self.sample < 1:
            raise ConfigError(f"give at least {MIN_TOKENS} tokens, one agent in memory and a sample of one")
        if not 2 * NUM_TOUCHED < self.disk_agents < self.agents:
            raise ConfigError(f"the disk must hold more than {2 * NUM_TOUCHED} agents and less than all of them")


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes of hot memory and disk for a number of agents."""

    hot_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, *, tokens: int, hot_agents: int, disk_agents: int) -> Budgets:
        """Count an agent's blocks with its reply: whole records on disk, one more block in memory for a copied tail."""
        layout = spec.layout
        num_blocks = (tokens + REPLY_TOKENS) // layout.block_tokens + 1
        record_bytes = sum(RecordFormat.of(layout, part.index).record_bytes for part in layout.parts)
        return cls((hot_agents * num_blocks + 1) * layout.block_bytes, disk_agents * num_blocks * record_bytes)


class Fleet:
    """One run on a started engine: counts of requests, and the peak of every figure."""

    def __init__(self, engine: Engine, options: FleetBench, store: Path) -> None:
        self._engine = engine
        self._options = options
        self._store = store
        self._texts = Distinct(engine.encoder, tokens=options.tokens, seed=options.seed)
        self.counts: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.touched = range(NUM_TOUCHED)
        self.prompt_tokens = 0

    def fill(self, progress: Progress) -> None:
        """Run every agent's first turn, a few at once; the early ones again after every half a disk of agents."""
        options = self._options
        task = progress.add_task("filling", total=options.agents)
        under_way: deque[Generation] = deque()
        for number in range(options.agents):
            under_way.append(self._ask(number))
            if number and number % (options.disk_agents // 2) == 0:
                under_way.extend(self._ask(early) for early in self.touched)
            while len(under_way) >= AT_ONCE:
                self._end(under_way.popleft())
            if number % max(1, options.agents // 100) == 0:
                self.look()
            progress.advance(task)
        while under_way:
            self._end(under_way.popleft())
        self._engine.flush()
        self.look()

    def _ask(self, number: int) -> Generation:
        messages = self._texts.messages(number)
        return self._engine.stream(f"agent-{number}", messages, temperature=0.0, max_tokens=REPLY_TOKENS)

    def _end(self, generation: Generation) -> ChatResult | None:
        try:
            result = generation.result()
        except RekindleError as error:
            self.counts["refused" if isinstance(error, Overloaded) else "failed"] += 1
            return None
        self.prompt_tokens += result.report.prompt_tokens
        return result

    def look(self) -> None:
        """Update the peaks of blocks and bytes in use."""
        stats = self._engine.stats()
        assert stats.store is not None
        seen = {
            "hot_blocks": stats.num_cached_blocks + stats.num_held_blocks,
            "disk_bytes": stats.store["used_bytes"],
            "real_bytes": allocated_bytes(self._store, "*.safetensors"),
            "index_bytes": allocated_bytes(self._store, "index.db*"),
            "rss_bytes": peak_bytes(),
        }
        for name, value in seen.items():
            self.most[name] = max(self.most[name], value)

    def reused(self, number: int) -> float:
        """Use an agent again, compare its answer, and return the share of its prompt that was reused."""
        result = self._end(self._ask(number))
        if result is None:
            return 0.0
        params = SamplingParams(temperature=0.0, max_tokens=REPLY_TOKENS)
        asked = GenerationRequest(token_ids=result.prompt_ids, reuse="off", params=params)
        alone = self._end(self._engine.submit(asked))
        self.counts["compared"] += 1
        self.counts["equal"] += alone is not None and alone.token_ids == result.token_ids
        return result.report.reused_tokens / result.report.prompt_tokens

    def checks(self, budgets: Budgets) -> list[Check]:
        """Return the verdict, from the agents used last, those used in between, and the first ones, in this order."""
        options, step = self._options, max(1, self._options.disk_agents // 2 // self._options.sample)
        last = [self.reused(options.agents - 1 - at) for at in range(0, options.disk_agents // 2, step)]
        touched = [self.reused(number) for number in self.touched]
        first = [self.reused(number) for number in range(NUM_TOUCHED, NUM_TOUCHED + self._num_gone())]
        store = self._engine.stats().store
        assert store is not None
        refused = self.counts["refused"] + self.counts["failed"] + store["blocks_refused"] + store["failed_saves"]
        equal, compared, hot = self.counts["equal"], self.counts["compared"], self._engine.stats().num_blocks
        close = self._engine.promise != "bitwise"
        return [
            Check(f"{refused} requests or blocks were refused", refused == 0),
            Check(f"at most {self.most['hot_blocks']:,} of {hot:,} blocks hot", self.most["hot_blocks"] <= hot),
            Check(
                f"at most {self.most['disk_bytes']:,} of {budgets.disk_bytes:,} bytes on disk "
                f"({self.most['real_bytes']:,} allocated)",
                self.most["disk_bytes"] <= budgets.disk_bytes,
            ),
            _shares(f"of the last {options.disk_agents // 2:,} agents", last, is_warm=True),
            _shares("of the agents used in between", touched, is_warm=True),
            _shares("of the first agents", first, is_warm=False),
            Check(f"{equal} of {compared} answers equal those with reuse off", close or equal == compared),
        ]

    def _num_gone(self) -> int:
        """Return how many early agents must have been evicted from disk, at most the sample."""
        return min(self._options.sample, (self._options.agents - self._options.disk_agents) // 2)


def _shares(what: str, shares: list[float], *, is_warm: bool) -> Check:
    fit = sum(share >= WARM_SHARE if is_warm else share <= COLD_SHARE for share in shares)
    return Check(f"{fit} of {len(shares)} queried {what} are {'warm' if is_warm else 'cold'}", fit == len(shares))


def allocated_bytes(directory: Path, pattern: str) -> int:
    """Return bytes allocated by the file system to matching files below a directory; holes take none."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob(pattern))


def run_fleet(settings: Settings, options: FleetBench, console: Console) -> int:
    """Run it, print figures, verdict and JSON lines; return 0 if the verdict holds, else 1."""
    flags = flags_of(settings)
    with (
        tempfile.TemporaryDirectory(prefix="rekindle-fleet-") as name,
        Progress(console=console, transient=True) as bar,
    ):
        budgets = Budgets.of(
            spec_of(flags), tokens=options.tokens, hot_agents=options.hot_agents, disk_agents=options.disk_agents
        )
        given = {**flags, **asdict(budgets), "store": name}
        with Engine(Settings.load(given)) as engine:
            fleet = Fleet(engine, options, Path(name))
            engine.chat(None, [{"role": "user", "content": "Hello!"}], max_tokens=REPLY_TOKENS, reuse="off")
            forget_peak()
            resident, began = resident_bytes(), time.perf_counter()
            fleet.fill(bar)
            seconds, stats = time.perf_counter() - began, engine.stats()
            grown = fleet.most["rss_bytes"] - resident
            checks = fleet.checks(budgets)
    measured = [
        Measurement("fleet: filling", ARM, "s", (seconds,), {"prompt_tokens": fleet.prompt_tokens}),
        Measurement("fleet: peak memory grown", ARM, "bytes", (float(grown),), {"hot_bytes": stats.hot_bytes}),
        Measurement("fleet: preemptions", ARM, "requests", (float(stats.num_preemptions),)),
        *(Measurement(f"fleet: most {name}", ARM, "", (float(value),)) for name, value in fleet.most.items()),
        *(Measurement(f"fleet: {check.text}", ARM, "", (float(check.holds),)) for check in checks),
    ]
    console.print(
        f"{options.agents:,} agents in {seconds:,.0f} s ({fleet.prompt_tokens / seconds:,.0f} tokens a second), "
        f"{stats.num_preemptions} preemptions, peak memory grown by {grown / 2**20:,.0f} MiB "
        f"(hot KV {stats.hot_bytes / 2**20:,.0f} MiB), index {fleet.most['index_bytes'] / 2**20:,.1f} MiB"
    )
    for check in checks:
        console.print(f"{'holds' if check.holds else 'FAILS'}  {check.text}", soft_wrap=True, highlight=False)
    origin = Origin.here("fleet", {**flags, **asdict(budgets), **asdict(options), "out": None})
    deliver(measured, origin, options.out, console)
    return 0 if all(check.holds for check in checks) else 1


def spec_of(flags: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of these settings' model, from which budgets are computed."""
    with Engine(Settings.load({**flags, "store": "off"})) as engine:
        return engine.spec
