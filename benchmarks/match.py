"""`python -m benchmarks match [MODEL]`: finding the stored text that a long prompt continues, among ten thousand.

    python -m benchmarks match --repeats 200

Rendering and splitting are excluded: the prompt is already a key, and only `Matcher.match` is timed. Stored are 9,990
sequences of 2,000 tokens and 10 of 100,000; each begins with one of ten common system prompts. Only the model's
tokenizer is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from rekindle.config import Settings
from rekindle.errors import ConfigError
from rekindle.matching.matcher import Matcher, StoredBranch
from rekindle.model.checkpoint import Source
from rekindle.text.prompt import PromptEncoder, RenderedPrompt
from rekindle_lab.bench.memory import resident_bytes
from rekindle_lab.bench.workload import WORDS
from rekindle_lab.record import Measurement, Origin, deliver

ARM = "rekindle"
NAMESPACE = "default"
NUM_SYSTEM_PROMPTS = 10
SYSTEM_TOKENS = 500
EXTENSION_TOKENS = 64
INDEX_BYTES = 4 << 30  # everything stays in the index, whatever the setting
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class MatchBench:
    """How many sequences of how many tokens; `out` None prints the JSON lines after the table."""

    num_short: int = 9_990
    short_tokens: int = 2_000
    num_long: int = 10
    long_tokens: int = 100_000
    repeats: int = 200
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.num_long < 1 or self.num_short < 0 or self.repeats < 1:
            raise ConfigError("give at least one long sequence and one repeat")
        if min(self.short_tokens, self.long_tokens) <= SYSTEM_TOKENS:
            raise ConfigError(f"sequences need more than the {SYSTEM_TOKENS} tokens of their system prompt")


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, its agent, and the expected relation to what is stored."""

    name: str
    agent: str | None
    prompt: RenderedPrompt
    relation: str


class Library:
    """Stored sequences of random words under one agent each: `long-0`... and `short-0`..."""

    def __init__(self, encoder: PromptEncoder, options: MatchBench) -> None:
        self._encoder = encoder
        self._options = options
        self._chooser = np.random.default_rng(options.seed)
        self._words = word_ids(encoder)
        self._systems = [self.random_ids(SYSTEM_TOKENS) for _ in range(NUM_SYSTEM_PROMPTS)]
        self.longest: list[np.ndarray] = []
        self.matcher = Matcher(encoder, max_index_bytes=INDEX_BYTES)

    def random_ids(self, count: int) -> np.ndarray:
        """Return `count` random one-token words (uint32)."""
        return self._chooser.choice(self._words, count)

    def fill(self) -> None:
        """Store everything, the long sequences first."""
        options = self._options
        for number in range(options.num_long):
            ids = self._sequence(number, options.long_tokens)
            self.longest.append(ids)
            self._add(f"long-{number}", ids)
        for number in range(options.num_short):
            self._add(f"short-{number}", self._sequence(number, options.short_tokens))

    def _sequence(self, number: int, num_tokens: int) -> np.ndarray:
        system = self._systems[number % NUM_SYSTEM_PROMPTS]
        return np.concatenate([system, self.random_ids(num_tokens - len(system))])

    def _add(self, agent: str, ids: np.ndarray) -> None:
        self.matcher.add(StoredBranch(NAMESPACE, agent, 0, ids, len(ids)))

    def cases(self) -> Iterator[Case]:
        """Yield the prompts to match, all about as long as the longest sequence."""
        stored = self.longest[0]
        half = len(stored) // 2
        longer = self._prompt(stored, self.random_ids(EXTENSION_TOKENS))
        yield Case("own, EXTEND", "long-0", longer, "extend")
        yield Case("shared, EXTEND", "somebody", longer, "extend")
        changed = self._prompt(stored[:half], self.random_ids(len(stored) - half))
        yield Case("own, DIVERGE at 50%", "long-0", changed, "diverge")
        yield Case("shared, DIVERGE at 50%", "somebody", changed, "diverge")
        yield Case("own, EXACT", "long-0", self._prompt(stored), "exact")
        yield Case("shared, system prompt only", "somebody", self._prompt(self._sequence(0, len(stored))), "diverge")
        yield Case("nothing in common", "somebody", self._prompt(self.random_ids(len(stored))), "none")

    def _prompt(self, *pieces: np.ndarray) -> RenderedPrompt:
        return RenderedPrompt(self._encoder.key_of(np.concatenate(pieces)))

    def check(self) -> None:
        """Assert that the matcher's index agrees with what was stored."""
        self.matcher.check()


def word_ids(encoder: PromptEncoder) -> np.ndarray:
    """Return ids of words that are one token each after a blank, so that any sequence of them is canonical."""
    found = set()
    for word in sorted(set(WORDS)):
        ids = encoder.encode(encoder.render_text(f"a {word} {word}"))
        if len(ids) >= 3 and ids[-1] == ids[-2]:
            found.add(int(ids[-1]))
    if len(found) < 2:
        raise ConfigError("this tokenizer has no word of the benchmark as one token")
    return np.array(sorted(found), dtype=np.uint32)


def measure(library: Library, case: Case, repeats: int) -> Measurement:
    """Measure microseconds of `repeats` matches of one prompt."""
    matcher, times = library.matcher, []
    for turn in range(WARM_UP + repeats):
        began = time.perf_counter()
        match = matcher.match(NAMESPACE, case.agent, case.prompt)
        took = time.perf_counter() - began
        assert match.relation == case.relation, f"{case.name}: {match.relation}"
        if turn >= WARM_UP:
            times.append(took * 1e6)
    detail = {"prompt_bytes": len(case.prompt.key), "matched_bytes": match.matched_bytes, "tokens": match.num_tokens}
    return Measurement(f"match: {case.name}", ARM, "µs", tuple(times), detail)


def run_match_bench(settings: Settings, options: MatchBench, console: Console) -> int:
    """Store sequences, match every case, print table and lines; return 0. Wrong matches fail an assertion."""
    encoder = PromptEncoder.from_dir(Source.find(settings.model.model, settings.model.revision).fetch())
    with console.status("storing the sequences"):
        library = Library(encoder, options)
        began, before = time.perf_counter(), resident_bytes()
        library.fill()
        filled_s, grown_bytes = time.perf_counter() - began, resident_bytes() - before
    measured = [measure(library, case, options.repeats) for case in library.cases()]
    number = options.num_short + options.num_long
    console.print(table(measured))
    console.print(f"{number:,} sequences stored in {filled_s:.1f} s, in {grown_bytes / 2**20:,.0f} MiB with their ids")
    origin = Origin.here("match", {**asdict(options), "out": None, "grown_bytes": grown_bytes})
    deliver(measured, origin, options.out, console)
    return 0


def table(measured: list[Measurement]) -> Table:
    """Build a table with a row per case: median and maximum in microseconds."""
    shown = Table(title="Matching, in µs", title_justify="left")
    for name in ("case", "median", "max", "tokens found", "prompt bytes"):
        shown.add_column(name, justify="left" if name == "case" else "right")
    for item in measured:
        found, size = item.detail["tokens"], item.detail["prompt_bytes"]
        shown.add_row(item.measure, f"{item.median:,.0f}", f"{max(item.values):,.0f}", f"{found:,}", f"{size:,}")
    return shown
