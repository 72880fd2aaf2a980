"""Cold prompts with an object tier that never answers, or that trickles: what waiting for it costs the first token.

    python -m benchmarks tier --tokens 3000 --repeats 9
    python -m benchmarks tier --model DIR --tokens 3000

Every prompt is in the tier, written by another replica, with its agent's head. Replicas get the same prompts in turn,
each one once, in another order each time:

    no tier             computes
    healthy             imports what the directory has
    silent, first       no object can be read: the request waits as long as it may, and gives up
    silent, later       the same at a replica that has learned it: it asks now and then, and computes
    trickling, first    a bucket gives heads at once, and blocks one after the other, byte by byte; each takes half
                        as long again as computing it
    trickling, later    the same at a replica that has learned it

Every replica has computed other prompts before, so that it knows how long computing takes. The first ones of a pair
forget after each prompt what they have learned of their tier. Seconds are from submit to the first token; ratios and
waits are of the same prompt without a tier.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.tier.replicas import export, replica, silent_copy, tier_of
from benchmarks.tier.talker import NAMESPACE
from benchmarks.tier.trickle import Trickle, trickling
from rekindle.config import Settings
from rekindle.engine.api import Engine
from rekindle.engine.types import Report
from rekindle.errors import ConfigError, RekindleError
from rekindle.harness.client import flags_of
from rekindle_lab.bench.distinct import MIN_TOKENS, Distinct, Messages
from rekindle_lab.record import Measurement, Origin, deliver
from rekindle_tier.sealing import block_name

ARMS = ("no tier", "healthy", "silent, first", "silent, later", "trickling, first", "trickling, later")
TRICKLE = 1.5  # of the time that computing a block takes
HEAD_S = 1000.0  # as if computing took so long: the head is waited for
WARM_UP = 3  # prompts that each replica computes before


@dataclass(frozen=True, slots=True)
class SilenceBench:
    """Tokens of each prompt, and how many prompts are measured."""

    tokens: int = 3000
    repeats: int = 9
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError("give at least one repeat")
        if self.tokens < MIN_TOKENS:
            raise ConfigError(f"--tokens must be at least {MIN_TOKENS}, not {self.tokens}")


def run_silence(settings: Settings, options: SilenceBench, console: Console) -> int:
    """Measure all arms, print the table and JSON lines; return 0. RekindleError if a healthy tier was not used."""
    flags = flags_of(settings)
    with tempfile.TemporaryDirectory(prefix="rekindle-tier-") as name, ExitStack() as stack:
        directory, tier = Path(name), Path(name) / "tier"
        with replica(flags, directory, len(ARMS), tier) as writer, console.status("filling the tier"):
            texts = Distinct(writer.encoder, tokens=options.tokens, seed=options.seed)
            for number in range(options.repeats + 1):
                _ask(writer, f"agent-{number}", texts.messages(number))
            export(writer)
            names = [_names(writer, f"agent-{number}") for number in range(options.repeats + 1)]
        silent = stack.enter_context(silent_copy(tier, directory / "silent"))
        # A copy, as the healthy replica writes the prompts to the tier that the others compute before.
        trickle = stack.enter_context(trickling(Path(shutil.copytree(tier, directory / "trickling"))))
        for each in names:
            trickle.add(each)
        tiers = dict(zip(ARMS, (None, tier, silent, silent, "s3://first", "s3://later"), strict=True))
        engines = {arm: stack.enter_context(replica(flags, directory, at, tiers[arm])) for at, arm in enumerate(ARMS)}
        gc.freeze()  # a pause of the collector, with so many engines in one process, is a quarter of a second
        stack.callback(gc.unfreeze)
        with console.status("asking"):
            reports = _measure(engines, texts, options, trickle)
    measured = list(_measurements(reports))
    console.print(_table(measured))
    deliver(measured, Origin.here("tier", {**flags, **asdict(options), "out": None}), options.out, console)
    return 0


def _measure(
    engines: dict[str, Engine], texts: Distinct, options: SilenceBench, trickle: Trickle
) -> dict[str, list[Report]]:
    for engine in engines.values():
        warm_up = [
            _ask(engine, f"other-{number}", texts.messages(options.repeats + 1 + number)) for number in range(WARM_UP)
        ]
        if not trickle.block_s:  # the one without a tier
            token_s = min(each.timings.first_token_ms / each.prompt_tokens for each in warm_up) / 1e3
            trickle.block_s = TRICKLE * engine.spec.layout.block_tokens * token_s
    paces = {arm: _pace(engine) for arm, engine in engines.items()}
    for arm in ("silent, later", "trickling, later"):
        _ask(engines[arm], f"agent-{options.repeats}", texts.messages(options.repeats))
    reports: dict[str, list[Report]] = {arm: [] for arm in engines}
    for number in range(options.repeats):
        messages = texts.messages(number)
        for at in range(len(ARMS)):
            arm = ARMS[(number + at) % len(ARMS)]
            if arm.endswith("first"):
                _forget(engines[arm], *paces[arm])
            reports[arm].append(_ask(engines[arm], f"agent-{number}", messages))
    for arm, each in reports.items():
        is_wrong = (bool(report.reused_tokens) != (arm == "healthy") for report in each)
        if not arm.startswith("trickling") and any(is_wrong):
            raise RekindleError(f"{arm}: reused {[report.reused_tokens for report in each]} tokens")
    return reports


def _names(engine: Engine, agent: str) -> list[str]:
    """Return the names of the objects that an agent's head names, in order."""
    head = tier_of(engine).imports.head(NAMESPACE, agent, compute_s=HEAD_S)
    if head is None:
        raise RekindleError(f"{agent} is not in the tier")
    blocks = head.branches[0].blocks(engine.spec.layout.block_tokens)
    return [block_name(block.hash, 0) for block in blocks]


def _pace(engine: Engine) -> tuple[float, float]:
    """Return the latency and the bandwidth that an engine expects of its tier."""
    if engine.components.tier is None:
        return 0.0, 0.0
    pace = tier_of(engine).pace
    return pace.latency_s, pace.bytes_per_s


def _forget(engine: Engine, latency_s: float, bytes_per_s: float) -> None:
    """Have an engine expect this of its tier, as if it had not been asked since."""
    tier = tier_of(engine)
    tier.breaker.succeeded()
    tier.pace.latency_s, tier.pace.bytes_per_s = latency_s, bytes_per_s


def _ask(engine: Engine, agent: str, messages: Messages) -> Report:
    return engine.stream(agent, messages, temperature=0.0, max_tokens=1).result().report


def _measurements(reports: dict[str, list[Report]]) -> Iterator[Measurement]:
    plain = reports[ARMS[0]]
    for arm, each in reports.items():
        detail = {"prompt_tokens": each[0].prompt_tokens, "reused_tokens": median(one.reused_tokens for one in each)}
        seconds = tuple(report.timings.first_token_ms / 1e3 for report in each)
        yield Measurement("first token", arm, "s", seconds, detail)
        pairs = list(zip(each, plain, strict=True))
        ratios = (one.timings.first_token_ms / other.timings.first_token_ms for one, other in pairs)
        yield Measurement("first token over no tier's", arm, "times", tuple(ratios), detail)
        waits = ((one.timings.match_ms - other.timings.match_ms) / other.timings.first_token_ms for one, other in pairs)
        yield Measurement("waiting over no tier's first token", arm, "times", tuple(waits), detail)


def _table(measured: Sequence[Measurement]) -> Table:
    shown = Table(title="First token of prompts that another replica has computed, ms", title_justify="left")
    for name in ("tier", "median", "least", "most", "times no tier", "waiting, of no tier's", "most", "reused tokens"):
        shown.add_column(name, justify="left" if name == "tier" else "right")
    for seconds, ratios, waits in zip(*(measured[at::3] for at in range(3)), strict=True):
        cells = (f"{value * 1e3:,.0f}" for value in (seconds.median, min(seconds.values), max(seconds.values)))
        shares = (f"{100 * share:.1f} %" for share in (waits.median, max(waits.values)))
        reused = f"{seconds.detail['reused_tokens']:,.0f} of {seconds.detail['prompt_tokens']:,}"
        shown.add_row(seconds.arm, *cells, f"{ratios.median:.3f}", *shares, reused)
    return shown
