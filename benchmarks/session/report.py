"""What a session came to: its turns, and the share of its prompts that was known, as tables and measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from benchmarks.session.agent import Request
from benchmarks.session.client import Heard
from rekindle.harness.record import Measurement


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, its answer, and how long the client waited for the server to be idle before."""

    request: Request
    heard: Heard
    waited_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.heard.report["prompt_tokens"])

    @property
    def reused_tokens(self) -> int:
        """Those of them that were not computed."""
        return int(self.heard.report["reused_tokens"])

    @property
    def cause(self) -> str:
        """Why not more was reused, in a word; empty when nothing but new text was computed."""
        explanation = self.heard.report.get("explanation")
        return explanation["cause"] if explanation else ""

    @property
    def taken_out(self) -> str:
        """What was normalised, with the tokens each would have cost."""
        return ", ".join(f"{each['kind']} {each['tokens']:,}" for each in self.heard.report.get("normalised") or ())

    def usage_adds_up(self) -> bool:
        """Whether Anthropic's usage says the same as the report, to the token."""
        usage, report = self.heard.usage, self.heard.report
        read, made = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        sums = read == report["reused_tokens"] and usage["input_tokens"] + read + made == report["prompt_tokens"]
        return bool(sums and usage["output_tokens"] == report["completion_tokens"])


@dataclass(frozen=True, slots=True)
class Checked:
    """One request with its answer, and the answer to the same request with reuse off."""

    asked: Asked
    again: Heard

    @property
    def is_equal(self) -> bool:
        """Whether both say the same, and the second one computed all of as long a prompt."""
        report = self.again.report
        all_computed = report["reused_tokens"] == 0 and report["prompt_tokens"] == self.asked.prompt_tokens
        return all_computed and self.again.words() == self.asked.heard.words()


@dataclass(frozen=True, slots=True)
class Replayed:
    """A session: behaviour, arm, requests in order, those that were checked, tokens that idle time computed."""

    behaviour: str
    arm: str
    asked: tuple[Asked, ...]
    checked: tuple[Checked, ...]
    anticipated_tokens: int

    @property
    def share(self) -> float:
        """Reused of all prompt tokens but those of the very first request; sub-agents included."""
        return share(self.asked[1:])

    @property
    def num_equal(self) -> int:
        """Checked replies that are the same without reuse."""
        return sum(each.is_equal for each in self.checked)

    @property
    def num_wrong_usage(self) -> int:
        """Answers whose usage does not add up."""
        return sum(not each.usage_adds_up() for each in self.asked)

    @property
    def by_agent(self) -> dict[str, list[Asked]]:
        """The requests of each agent."""
        found: dict[str, list[Asked]] = {}
        for each in self.asked:
            found.setdefault(each.request.who, []).append(each)
        return found


def share(asked: Sequence[Asked]) -> float:
    """Reused of all prompt tokens of these requests; 1 for none."""
    return sum(each.reused_tokens for each in asked) / (sum(each.prompt_tokens for each in asked) or 1)


def turns_table(replayed: Replayed) -> Table:
    """A row per request."""
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
    for each in replayed.asked:
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
    """A row per session."""
    table = Table(title="All requests but the first of each session", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("template", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    names = ("requests", "longest", "prompts", "computed", "known", "main", "helpers", "in idle time", "waited",
             "first token", "equal", "usage")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for each in done:
        later = each.asked[1:]
        helpers = [asked for asked in later if asked.request.who != "main"]
        prompt = sum(asked.prompt_tokens for asked in later)
        table.add_row(
            each.behaviour,
            each.arm,
            str(len(each.asked)),
            f"{max(asked.prompt_tokens for asked in each.asked):,}",
            f"{prompt:,}",
            f"{prompt - sum(asked.reused_tokens for asked in later):,}",
            f"{each.share:.2%}",
            f"{share([asked for asked in later if asked.request.who == 'main']):.2%}",
            f"{share(helpers):.2%}" if helpers else "",
            f"{each.anticipated_tokens:,}",
            f"{sum(asked.waited_s for asked in later):.1f} s",
            f"{_median([asked.heard.first_s for asked in later]) * 1e3:,.0f} ms",
            f"{each.num_equal} of {len(each.checked)}",
            "adds up" if not each.num_wrong_usage else f"{each.num_wrong_usage} wrong",
        )
    return table


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def measurements(replayed: Replayed) -> Iterator[Measurement]:
    """The session as lines that say where they come from; per request in `detail`."""
    arm = f"{replayed.behaviour}, {replayed.arm}"
    later = replayed.asked[1:]
    turns = [
        {
            "agent": each.request.who,
            "turn": each.request.turn,
            **{name: each.heard.report[name] for name in ("outcome", "source", "prompt_tokens", "reused_tokens")},
            "cause": each.cause,
            "waited_s": round(each.waited_s, 3),
        }
        for each in replayed.asked
    ]
    detail = {"turns": turns, "anticipated_tokens": replayed.anticipated_tokens}
    yield Measurement("known of prompts", arm, "share", (replayed.share,), detail)
    yield Measurement("first token", arm, "s", tuple(each.heard.first_s for each in later))
    yield Measurement("waited for idle", arm, "s", tuple(each.waited_s for each in later))
    if replayed.checked:
        compared = {"compared": len(replayed.checked)}
        yield Measurement("replies equal without reuse", arm, "replies", (float(replayed.num_equal),), compared)
