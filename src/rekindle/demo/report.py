"""Results of the demo: one line per turn, the tables, and the checks of its verdict. Pure: prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from rekindle.demo.script import Line
from rekindle.harness.client import Reply

REUSE_WANTED = 0.9
EQUAL_WANTED = 0.5  # of the tokens, before the first that differs, where equal bits are not promised


@dataclass(frozen=True, slots=True)
class Turn:
    """One line of one agent: its reply, and the reply to the same token ids with reuse off (`baseline`)."""

    agent: str
    number: int
    phase: Literal["before", "after"]
    line: Line
    reply: Reply
    baseline: Reply

    @property
    def is_equal(self) -> bool:
        """Whether both replies have the same tokens (and ran on the same prompt)."""
        same_prompt = self.reply.prompt_ids == self.baseline.prompt_ids
        return same_prompt and self.reply.completion_ids == self.baseline.completion_ids

    @property
    def num_equal(self) -> int:
        """How many tokens both replies begin with."""
        ours, theirs = self.reply.completion_ids, self.baseline.completion_ids
        pairs = enumerate(zip(ours, theirs, strict=False))
        return next((index for index, (one, other) in pairs if one != other), min(len(ours), len(theirs)))

    @property
    def is_right(self) -> bool | None:
        """Whether the requested fact came back word for word; None if no fact was requested."""
        return None if self.line.wanted is None else self.reply.text.strip() == self.line.wanted

    @property
    def tier(self) -> str:
        """The tier of the reused tokens: hot, warm, both, or cold if none were reused."""
        report = self.reply.report
        return "+".join(tier for tier in ("hot", "warm") if report[f"{tier}_tokens"]) or "cold"

    @property
    def speedup(self) -> float:
        """Time to the first token with reuse off, divided by the time with reuse."""
        return self.baseline.first_token_s / self.reply.first_token_s


@dataclass(frozen=True, slots=True)
class Figures:
    """A whole run: the model's entry, stats and agents just before the kill, seconds until serving again, all turns."""

    model: dict[str, Any]
    stats: dict[str, Any]
    agents: list[dict[str, Any]]
    restart_s: float
    turns: tuple[Turn, ...]

    def of_phase(self, phase: str) -> list[Turn]:
        """Return the turns before or after the restart."""
        return [turn for turn in self.turns if turn.phase == phase]

    def first_after(self) -> list[Turn]:
        """Return every agent's first turn after the restart."""
        after = self.of_phase("after")
        return [turn for turn in after if turn.number == min(t.number for t in after if t.agent == turn.agent)]


@dataclass(frozen=True, slots=True)
class Check:
    """One sentence of the verdict."""

    text: str
    holds: bool


def reuse_share(turns: Sequence[Turn]) -> float:
    """Return reused tokens divided by prompt tokens; 0 without turns."""
    prompt = sum(turn.reply.report["prompt_tokens"] for turn in turns)
    return sum(turn.reply.report["reused_tokens"] for turn in turns) / prompt if prompt else 0.0


def checks(figures: Figures) -> list[Check]:
    """Return the verdict: equality before and after the restart, as far as it is promised, and reuse after it."""
    promise = figures.model["rekindle"]["promise"]
    results = []
    for phase in ("before", "after"):
        turns = figures.of_phase(phase)
        equal = sum(turn.is_equal for turn in turns)
        text = f"{equal} of {len(turns)} replies {phase} the restart equal the same tokens computed with reuse off"
        holds = promise == "bitwise" and equal == len(turns) > 0
        if promise == "close":
            share = equal_share(turns)
            holds = share >= EQUAL_WANTED
            text += f"; {share:.0%} of their tokens come before a difference ({EQUAL_WANTED:.0%} wanted of close paths)"
        results.append(Check(text, holds))
    share = reuse_share(figures.first_after())
    text = f"{share:.1%} of the prompts of the first turns after the restart were reused ({REUSE_WANTED:.0%} wanted)"
    return [*results, Check(text, share >= REUSE_WANTED)]


def equal_share(turns: Sequence[Turn]) -> float:
    """Return tokens of replies before the first one that differs divided by all of them; 0 without turns."""
    most = sum(max(len(turn.reply.completion_ids), len(turn.baseline.completion_ids)) for turn in turns)
    return sum(turn.num_equal for turn in turns) / most if most else 0.0


def turn_line(turn: Turn) -> str:
    """Format one turn; a second line shows the question if it asks for a fact."""
    report = turn.reply.report
    share = f"{report['reused_tokens']:>6,}/{report['prompt_tokens']:<6,}"
    times = f"{_ms(turn.reply.first_token_s)}, off {_ms(turn.baseline.first_token_s)} {turn.speedup:>5.1f}x"
    same = "same reply" if turn.is_equal else "[bold red]REPLY DIFFERS[/]"
    line = f"{turn.agent:<7}{turn.number} {report['outcome']:<8}{share}{turn.tier:<9}{times}  {same}"
    if turn.is_right is None:
        return line
    recall = "" if turn.is_right else f" [yellow](expected: {escape(turn.line.wanted or '')})[/]"
    return f"{line}\n[dim]         {escape(turn.line.text)} {escape(_short(turn.reply.text))}[/]{recall}"


def _short(text: str) -> str:
    """Shorten text to one line of at most 60 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:>6,.0f} ms"


def summary(figures: Figures) -> list[Table]:
    """Return the final tables: times to the first token by tier, and costs."""
    return [_tiers(figures), _costs(figures)]


def _tiers(figures: Figures) -> Table:
    title = "First token by where the memory was (median ms; tokens in thousands)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("restart", "memory", "turns", "prompt", "hot", "warm", "first", "off", "ratio"):
        table.add_column(name, justify="left" if name in ("restart", "memory") else "right", no_wrap=True)
    for phase in ("before", "after"):
        for tier in ("cold", "hot", "hot+warm", "warm"):
            turns = [turn for turn in figures.of_phase(phase) if turn.tier == tier]
            if turns:
                table.add_row(phase, tier, str(len(turns)), *_sums(turns), *_medians(turns))
    return table


def _sums(turns: Sequence[Turn]) -> list[str]:
    names = ("prompt_tokens", "hot_tokens", "warm_tokens")
    return [f"{sum(turn.reply.report[name] for turn in turns) / 1e3:,.1f}" for name in names]


def _medians(turns: Sequence[Turn]) -> list[str]:
    first = statistics.median(turn.reply.first_token_s for turn in turns)
    off = statistics.median(turn.baseline.first_token_s for turn in turns)
    return [f"{first * 1e3:,.0f}", f"{off * 1e3:,.0f}", f"{statistics.median(turn.speedup for turn in turns):.1f}x"]


def _costs(figures: Figures) -> Table:
    kv, stats = figures.model["rekindle"], figures.stats
    block_tokens = kv["block_tokens"]
    unshared = sum(-(-agent["num_tokens"] // block_tokens) for agent in figures.agents)
    used = stats["num_blocks"] - stats["num_free_blocks"]
    plain_bytes = unshared * block_tokens * kv["kv_bytes_per_token_16bit"]
    used_bytes = used * stats["block_bytes"]
    asked = [turn for turn in figures.turns if turn.is_right is not None]
    table = Table(title="What it cost", title_justify="left", show_header=False, box=box.SIMPLE_HEAD)
    table.add_row("blocks if unshared, in use", f"{unshared}, {used} ({unshared - used} shared)")
    table.add_row(
        "KV memory, against unshared 16-bit KV",
        f"{used_bytes / 2**20:.1f} MiB, {plain_bytes / 2**20:.1f} MiB ({plain_bytes / max(used_bytes, 1):.1f}x)",
    )
    store = stats["store"] or {}
    table.add_row("bytes written before the kill", f"{store.get('bytes_written', 0) / 2**20:.1f} MiB")
    table.add_row("from kill -9 to serving again", f"{figures.restart_s:.1f} s (with Python, weights)")
    table.add_row("recall, right answers (not judged)", f"{sum(turn.is_right is True for turn in asked)}/{len(asked)}")
    return table
