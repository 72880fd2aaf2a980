"""Results of a session: its turns and the reused share of its prompts, as tables and measurements. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.coding_day.agent import Request
from benchmarks.coding_day.client import Heard
from rekindle_lab.record import Measurement


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, its answer, and how long the client waited beforehand for the server to be idle."""

    request: Request
    heard: Heard
    waited_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.heard.report["prompt_tokens"])

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return int(self.heard.report["reused_tokens"])

    @property
    def cause(self) -> str:
        """Why no more was reused, in a word; empty if only new text was computed."""
        explanation = self.heard.report.get("explanation")
        return explanation["cause"] if explanation else ""

    @property
    def taken_out(self) -> str:
        """What was normalised, with the tokens each item would have cost."""
        return ", ".join(f"{each['kind']} {each['tokens']:,}" for each in self.heard.report.get("normalised") or ())

    def usage_adds_up(self) -> bool:
        """Whether Anthropic's usage agrees with the report to the token."""
        usage, report = self.heard.usage, self.heard.report
        read, made = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        sums = read == report["reused_tokens"] and usage["input_tokens"] + read + made == report["prompt_tokens"]
        return bool(sums and usage["output_tokens"] == report["completion_tokens"])


@dataclass(frozen=True, slots=True)
class Checked:
    """One request with its answer, and the answer to the same prompt with reuse off; by their ids if they have any."""

    exchange: Exchange
    again: Heard

    @property
    def is_equal(self) -> bool:
        """Whether both answers are the same, and the second computed the whole of an equally long prompt."""
        before, report = self.exchange.heard.report, self.again.report
        all_computed = report["reused_tokens"] == 0 and report["prompt_tokens"] == self.exchange.prompt_tokens
        same_ids = before.get("completion_ids") == report.get("completion_ids")
        has_ids = report.get("completion_ids") is not None
        return all_computed and (same_ids if has_ids else self.again.words() == self.exchange.heard.words())


@dataclass(frozen=True, slots=True)
class Replayed:
    """A session: behaviour, arm, exchanges in order, checked ones, tokens computed in idle time."""

    behaviour: str
    arm: str
    exchanges: tuple[Exchange, ...]
    checked: tuple[Checked, ...]
    anticipated_tokens: int

    @property
    def share(self) -> float:
        """Reused share of all prompt tokens except the first request's; sub-agents included."""
        return share(self.exchanges[1:])

    @property
    def num_equal(self) -> int:
        """Number of checked replies that are the same without reuse."""
        return sum(each.is_equal for each in self.checked)

    @property
    def num_wrong_usage(self) -> int:
        """Number of answers whose usage does not add up."""
        return sum(not each.usage_adds_up() for each in self.exchanges)


def share(exchanges: Sequence[Exchange]) -> float:
    """Return the reused share of all prompt tokens of these requests; 0 for none."""
    return sum(each.reused_tokens for each in exchanges) / (sum(each.prompt_tokens for each in exchanges) or 1)


def turns_table(replayed: Replayed) -> Table:
    """Build a table with a row per request."""
    table = Table(
        title=f"{replayed.behaviour}, {replayed.arm}: {replayed.share:.1%} of all prompts after the first was known",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    names = (
        "agent",
        "turn",
        "outcome",
        "source",
        "prompt",
        "reused",
        "computed",
        "known",
        "idle",
        "cause",
        "taken out",
    )
    for name in names:
        left = name in ("agent", "outcome", "source", "cause", "taken out")
        table.add_column(name, justify="left" if left else "right")
    for each in replayed.exchanges:
        report = each.heard.report
        table.add_row(
            each.request.who,
            str(each.request.turn),
            report["outcome"],
            report["source"] or "",
            f"{each.prompt_tokens:,}",
            f"{each.reused_tokens:,}",
            f"{each.prompt_tokens - each.reused_tokens:,}",
            f"{each.reused_tokens / each.prompt_tokens:.1%}",
            f"{each.waited_s:.2f} s",
            each.cause,
            each.taken_out,
        )
    return table


def totals_table(done: Sequence[Replayed]) -> Table:
    """Build a table with a row per session."""
    table = Table(title="All requests but the first of each session", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("template", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    names = ("requests", "longest", "prompts", "computed", "known", "main", "helpers", "in idle time", "waited",
             "first token", "equal", "usage")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for each in done:
        later = each.exchanges[1:]
        helpers = [exchange for exchange in later if exchange.request.who != "main"]
        prompt = sum(exchange.prompt_tokens for exchange in later)
        table.add_row(
            each.behaviour,
            each.arm,
            str(len(each.exchanges)),
            f"{max(exchange.prompt_tokens for exchange in each.exchanges):,}",
            f"{prompt:,}",
            f"{prompt - sum(exchange.reused_tokens for exchange in later):,}",
            f"{each.share:.2%}",
            f"{share([exchange for exchange in later if exchange.request.who == 'main']):.2%}",
            f"{share(helpers):.2%}" if helpers else "",
            f"{each.anticipated_tokens:,}",
            f"{sum(exchange.waited_s for exchange in later):.1f} s",
            f"{statistics.median([exchange.heard.first_s for exchange in later]) * 1e3:,.0f} ms",
            f"{each.num_equal} of {len(each.checked)}",
            "adds up" if not each.num_wrong_usage else f"{each.num_wrong_usage} wrong",
        )
    return table


def measurements(replayed: Replayed) -> Iterator[Measurement]:
    """Yield the session's measurements; the first one's detail holds its requests."""
    arm = f"{replayed.behaviour}, {replayed.arm}"
    later = replayed.exchanges[1:]
    turns = [
        {
            "agent": each.request.who,
            "turn": each.request.turn,
            **{name: each.heard.report[name] for name in ("outcome", "source", "prompt_tokens", "reused_tokens")},
            "cause": each.cause,
            "waited_s": round(each.waited_s, 3),
        }
        for each in replayed.exchanges
    ]
    detail = {"turns": turns, "anticipated_tokens": replayed.anticipated_tokens}
    yield Measurement("known of prompts", arm, "share", (replayed.share,), detail)
    yield Measurement("first token", arm, "s", tuple(each.heard.first_s for each in later))
    yield Measurement("waited for idle", arm, "s", tuple(each.waited_s for each in later))
    if replayed.checked:
        compared = {"compared": len(replayed.checked)}
        yield Measurement("replies equal without reuse", arm, "replies", (float(replayed.num_equal),), compared)
